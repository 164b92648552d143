"""The book of speculation: what was chosen, what it was to gain, what it gained, and why it was not done."""

import json

import pytest

from drafts.control import Control, Drawn
from drafts.mixture import Mixture
from drafts.proposal import EMPTY, Price, Proposal
from drafts.speculation import Choice, Speculated, SpeculationBook

CHAIN = Proposal.chain([5, 6, 7], "a", [0.9, 0.9, 0.9])


def price(rows: int = 1, fixed_k: int | None = None, **extra) -> Price:
    return Price(rows, lambda n: 10.0 + 1.0 * n, fixed_k, **extra)


def cut(control: Control, *drawn: Drawn | None, at: Price | None = None) -> list[Proposal]:
    return control.cut(["d"] * len(drawn), list(drawn), at or price(len(drawn)))


def settle(control: Control, emitted: list[int], nodes: int, at: Price | None = None) -> None:
    control.settle(at or price(len(emitted)), nodes, emitted, 0.0, 0.0, counted=True)


def test_figures_may_be_read_while_the_engine_adds_a_reason():
    counted = Speculated(steps=4)

    class Meanwhile(int):
        def __truediv__(self, other):
            counted.reasons["no proposal"] = 1
            return int(self) / other

    counted.reasons["fixed k"] = Meanwhile(2)
    assert counted.figures()["plain_because"] == {"fixed k": 0.5}


@pytest.mark.parametrize(
    ("drawn", "at", "reason"),
    [
        (None, price(silenced=["request cap"]), "request cap"),
        (None, price(silenced=["max_tokens left"]), "max_tokens left"),
        (None, price(silenced=[""]), "asking does not pay"),
        (None, price(fixed_k=0), "fixed k"),
        (Drawn(EMPTY), price(silenced=[""]), "no proposal"),
        (Drawn(Proposal.chain([5], "a", [0.01])), price(), "verifying does not pay"),
    ],
)
def test_every_plain_step_has_its_reason(drawn, at, reason):
    control = Control()
    assert cut(control, drawn, at=at) == [EMPTY]
    settle(control, [1], 0, at)
    assert control.figures("d")["plain_because"] == {reason: 1.0}
    assert control.figures("d")["plain_share"] == 1.0


def test_a_step_counts_depth_nodes_and_both_gains():
    control = Control()
    assert cut(control, Drawn(CHAIN)) == [CHAIN]
    settle(control, [4], 3)
    told = control.figures("d")
    assert (told["k"], told["nodes"], told["steps_by_nodes"]["3"]) == (3, 3, 1)
    assert told["expected"]["tokens_per_step"] == pytest.approx(1 + 0.9 + 0.81 + 0.729)
    assert told["realised"] == {
        "tokens_per_step": 4.0,
        "tokens_per_ms": pytest.approx(4 / 14),
        "speedup": pytest.approx(4 / 14 * 11),
    }
    assert told["plain_because"] == {}


def test_measured_time_counts_where_it_is_measured():
    control, slow = Control(), price(measured_ms=lambda: 28.0)
    cut(control, Drawn(CHAIN), at=slow)
    settle(control, [4], 3, slow)
    assert control.figures("d")["realised"]["tokens_per_ms"] == pytest.approx(4 / 28)


def test_rows_with_more_nodes_bear_the_pass_that_is_longer_for_them():
    book = SpeculationBook()
    choices = [Choice(3, 3, 3.0, 9.0, 5.0), Choice(0, 0, 1.0, 5.0, 5.0, "no proposal")]
    book.add(["a", "b"], choices, [4, 1], 16.0, 0.0)
    assert book.figures("a")["realised"]["tokens_per_ms"] == pytest.approx(4 / 11)
    assert book.figures("b")["realised"]["speedup"] == pytest.approx(1.0)


def test_a_row_that_failed_is_not_counted():
    book = SpeculationBook()
    book.add(["a"], [Choice(3, 3, 3.0, 9.0, 5.0)], [0], 16.0, 0.0)
    assert book.figures("a")["steps"] == 0
    assert book.figures("a")["realised"]["speedup"] is None


def test_the_book_survives_a_restart_as_json_and_goes_on():
    mixture = Mixture({})
    mixture.control.book.add(["a"], [Choice(3, 3, 3.0, 9.0, 5.0)], [4], 16.0, 0.5)
    mixture.control.book.add(["a"], [Choice(0, 0, 1.0, 5.0, 5.0, "no proposal")], [1], 5.0, 0.0)
    again = Mixture({})
    again.load_state(json.loads(json.dumps(mixture.state())))
    assert again.speculation("a") == mixture.speculation("a")
    again.drop_domain("a")
    assert again.speculation("a")["steps"] == 0


def test_a_run_is_what_was_added_since_its_beginning():
    before = Speculated()
    before.add(Choice(0, 0, 1.0, 5.0, 5.0, "no proposal"), 1, 5.0)
    after = Speculated.from_dict(json.loads(json.dumps(before.figures()["counters"])))
    after.add(Choice(2, 2, 2.5, 7.0, 5.0), 3, 6.0)
    run = after.since(before).figures()
    assert (run["steps"], run["k"], run["plain_share"]) == (1, 2, 0.0)
    assert run["realised"]["tokens_per_ms"] == pytest.approx(0.5)
    assert run["plain_because"] == {"no proposal": 0.0}


def test_the_share_of_time_saved_is_known_after_enough_steps_and_follows() -> None:
    control, at = Control(), price(2)
    plain = at.step_ms(2)
    for _ in range(99):
        control.settle(at, 0, [2, 2], 0.0, 0.0, counted=False)
    assert control.saved is None
    control.settle(at, 0, [2, 2], 0.0, 0.0, counted=False)
    assert control.saved == pytest.approx(0.5)
    for _ in range(1000):
        control.settle(at, 0, [1, 1], 0.25 * plain, 0.0, counted=False)
    assert control.saved == pytest.approx(-0.25, abs=0.01)
