"""Chosen k and its gain, where people look: the table, the result of a replay, the page."""

import io

from rich.console import Console

from drafts.kinds.base import DraftRow
from drafts.proposal import Price
from drafts.regret import RegretBook
from drafts.speculation import Choice, SpeculationBook
from osd.types import Tally
from router.app.live import domain_table, regret_table
from router.app.report import render
from router.app.summary import speculation
from tests.router.fake_engine import FakeEngine
from tests.router.test_report import run


def told(book: SpeculationBook) -> dict:
    found = {**book.figures("math"), "regret": RegretBook().figures("math")}
    return {"math": {"speculation": found}, "bare": {}}


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


def with_regret() -> dict:
    book, row = RegretBook(), DraftRow("r", "math", [1], 1)
    while not book.due(row):
        pass
    book.open(row, {"eagle": (2, 3, 9)}, {"eagle": 1.0}, Price(1, lambda n: 10.0 + n), 0.1)
    book.served(row, 1, 0.25)
    row.tokens += [2, 3, 4]
    book.close(row, ended=True)
    return {
        "math": {"speculation": {**booked(5).figures("math"), "regret": book.figures("math")}},
        "bare": {},
    }


def test_stats_show_what_each_source_alone_would_have_gained_and_the_regret():
    text = io.StringIO()
    rows = [{"name": name, **row} for name, row in with_regret().items()]
    Console(file=text, width=120).print(regret_table(rows))
    # Two tokens of the chain are right; 2 ms of pass and 2 of drafting are worth 0.1 a ms.
    served, eagle = (
        next(x for x in text.getvalue().splitlines() if name in x) for name in ("served", "eagle")
    )
    assert "0.75" in served
    assert "1.60" in eagle
    assert "+0.85" in eagle
    assert "bare" not in text.getvalue()


def test_the_page_shows_the_regret_where_it_was_measured():
    result = run(FakeEngine(), count=3)
    assert "Against fixed sources" not in render(result)
    result["speculation"] = speculation({}, with_regret())
    page = render(result)
    for words in ("Against fixed sources", "+0.85"):
        assert words in page
