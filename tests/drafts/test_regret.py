"""Regret of the mixture against fixed sources and depths, on the text that follows a sampled step."""

from __future__ import annotations

import json

import pytest

from drafts.kinds.base import DraftRow
from drafts.mixture import Mixture
from drafts.proposal import Price
from drafts.regret import FIRST_PROBES, PLAIN, PROBE_EVERY, SCRATCH, RegretBook, _Sums
from tests.drafts.mixture_rig import Clock, Oracle, Useless, serve
from tests.drafts.test_mixture import Head, run, steep

TEXT = [7 + at % 900 for at in range(4000)]


def price(rows: int = 1) -> Price:
    return Price(rows, lambda n: 10.0 + 0.5 * n)


def mixture(**sources) -> Mixture:
    return Mixture(sources, clock=Clock())


def probed(book: RegretBook, row: DraftRow, chains, served: int = 0, cost: float = 0.0) -> None:
    while not book.due(row):
        pass
    book.open(row, chains, {"head": 2.0}, price(), 0.1)
    book.served(row, served, cost)


def test_a_fixed_source_gains_its_accepted_tokens_less_what_their_time_is_worth():
    book, row = RegretBook(Clock()), DraftRow("r", "math", [1], 1)
    probed(book, row, {"head": (2, 3, 9, 9)}, served=1, cost=0.25)
    row.tokens += [2, 3, 4, 5, 6, 7, 8, 9]
    book.close(row)
    figures = book.figures("math")
    # Depth 2: two tokens right; two more in the pass take 1 ms and two depths 4 ms, worth 0.1 each.
    assert figures["sources"]["head"]["depth"] == 2
    assert figures["sources"]["head"]["gain_per_step"] == pytest.approx(2 - 0.1 * (1.0 + 4.0))
    assert figures["sources"]["head"]["regret_per_step"] == pytest.approx(1.5 - 0.75)
    assert figures["sources"][PLAIN]["regret_per_step"] == pytest.approx(-0.75)
    assert figures["best"] == "head"


def test_a_chain_is_scored_beyond_what_the_step_itself_emitted():
    book, row = RegretBook(Clock()), DraftRow("r", "math", [1], 1)
    probed(book, row, {"head": (2, 3, 4, 5, 6, 7, 8, 9)})
    row.tokens.append(2)
    book.close(row)
    assert SCRATCH in row.scratch
    row.tokens += [3, 4, 5, 6, 7, 8, 9]
    book.close(row)
    assert book.figures("math")["sources"]["head"]["accepted_per_step"] == 8


def test_the_end_of_an_answer_ends_every_chain():
    book, row = RegretBook(Clock()), DraftRow("r", "math", [1], 1)
    probed(book, row, {"head": (2, 3, 4)})
    row.tokens += [2, 3]
    book.close(row, ended=True)
    assert book.figures("math")["sources"]["head"]["accepted_per_step"] == 2
    assert SCRATCH not in row.scratch


def test_a_source_with_nothing_to_say_sleeps():
    book, row = RegretBook(Clock()), DraftRow("r", "math", [1], 1)
    probed(book, row, {"head": (2,), "ngram": ()}, served=1)
    row.tokens += [2] * 8
    book.close(row)
    assert set(book.figures("math")["sources"]) == {PLAIN, "head"}


def test_a_source_that_was_not_chosen_is_scored_and_becomes_the_best_one():
    text = TEXT
    found = mixture(liar=Oracle(text, 0.95, shift=1), honest=Oracle(text, 0.3, every=5))
    serve(found, text, 1200, price())
    figures = found.speculation("math")["regret"]
    assert figures["best"] == "honest"
    assert figures["sources"]["liar"]["accepted_per_step"] == 0
    assert figures["sources"]["honest"]["weight"] > 0.9
    # After the first steps the mixture does what the honest source would do.
    assert figures["sources"]["honest"]["regret_per_step"] < 0.3


def test_one_step_in_so_many_is_probed():
    found = mixture(honest=Oracle(TEXT, 0.9, every=2))
    steps = len(serve(found, TEXT, 400, price()))
    more = found.speculation("math")["regret"]["steps"] - FIRST_PROBES
    assert 0 < more <= steps // PROBE_EVERY


def test_a_mixture_that_loses_shows_regret_against_plain_decoding():
    clock = Clock()
    found = Mixture({"useless": Useless(clock, 8.0)}, clock=clock)
    serve(found, TEXT, 40, price())
    figures = found.speculation("math")["regret"]
    assert figures["best"] == PLAIN
    assert figures["sources"][PLAIN]["regret"] > 0.0


def test_state_goes_through_json_and_a_dropped_domain_is_forgotten():
    found = mixture(honest=Oracle(TEXT, 0.9, every=3))
    serve(found, TEXT, 300, price())
    twin = mixture(honest=Oracle(TEXT, 0.9, every=3))
    twin.load_state(json.loads(json.dumps(found.state())))
    assert twin.speculation("math")["regret"] == found.speculation("math")["regret"]
    found.drop_domain("math")
    assert found.speculation("math")["regret"]["steps"] == 0


class Ticking(Clock):
    """Every look at it takes a twentieth of a millisecond."""

    def __call__(self) -> float:
        self.seconds += 5e-5
        return self.seconds


def test_probes_leave_the_allowance_to_calls_where_nothing_pays_yet():
    """At this price the heads are at first asked by allowance only, and no text ends that could be scored."""
    good, idle = Head([5, 6, 7], 0.9), Head([9, 9, 9], 0.9)
    found = Mixture({"good": good, "idle": idle}, clock=Ticking())
    run(found, [5, 6, 7, 8], 400, cost=steep)
    before = good.calls
    run(found, [5, 6, 7, 8], 100, cost=steep)
    assert good.calls - before == 100


def test_figures_are_read_while_the_engine_counts():
    """Another thread reads them: a way just added has no steps yet, and more may come any time."""
    book, row = RegretBook(Clock()), DraftRow("r", "math", [1], 1)
    probed(book, row, {"head": (2, 3, 4)}, served=1)
    row.tokens += [2, 3, 4, 5, 6, 7, 8, 9]
    book.close(row)
    ways = book._domains["math"].ways

    class Counted(_Sums):
        @property
        def regret(self):
            ways.setdefault((f"new{len(ways)}", 1), _Sums())
            return 1.0

        @regret.setter
        def regret(self, value):
            pass

    ways["ngram", 1] = Counted(steps=2, gain=1.0)
    ways["late", 1] = _Sums()
    assert set(book.figures("math")["sources"]) == {PLAIN, "head", "ngram"}
    assert any(source.startswith("new") for source, _ in ways)
