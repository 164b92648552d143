"""Chosen k and its gain, where people look: the table, the result of a replay, the page."""

import io

from rich.console import Console

from drafts.speculation import Choice, SpeculationBook
from osd.types import Tally
from router.app.live import domain_table
from router.app.report import render
from router.app.summary import speculation
from tests.router.fake_engine import FakeEngine
from tests.router.test_report import run


def told(book: SpeculationBook) -> dict:
    return {"math": {"speculation": book.figures("math")}, "bare": {}}


def booked(steps: int) -> SpeculationBook:
    book = SpeculationBook()
    for _ in range(steps):
        book.add(["math"], [Choice(4, 2, 3.0, 20.0, 10.0)], [3], 20.0, 0.0)
        book.add(["math"], [Choice(0, 0, 1.0, 10.0, 10.0, "no proposal")], [1], 10.0, 0.0)
    return book


def test_the_table_shows_k_and_gain_and_dashes_where_nothing_is_known():
    table = domain_table({"bare": Tally()}, [{"name": "math", "speculation": booked(5).figures("math")}])
    text = io.StringIO()
    Console(file=text, width=120).print(table)
    math, bare = (
        next(line for line in text.getvalue().splitlines() if name in line) for name in told(booked(1))
    )
    assert "1.0" in math
    assert "1.33×" in math
    assert "×" not in bare


def test_a_replay_reports_its_own_steps_and_not_those_of_an_older_state():
    found = speculation(told(booked(5)), told(booked(8)))
    assert list(found) == ["math"]
    assert found["math"]["steps"] == 6
    assert found["math"]["plain_because"] == {"no proposal": 0.5}


def test_the_page_shows_both_gains_and_why_steps_were_plain():
    result = run(FakeEngine(), count=3)
    assert "Speculation length" not in render(result)
    result["speculation"] = speculation({}, told(booked(5)))
    page = render(result)
    for words in ("Speculation length", "1.33×", "50%", "no proposal 50%"):
        assert words in page
