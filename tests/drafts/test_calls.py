"""What neural calls are charged and credited with."""

from __future__ import annotations

import random

import pytest

from drafts.calls import Asked, NeuralCalls
from drafts.kinds.base import DraftRow
from drafts.mixture import Mixture
from drafts.pacing import Pacing
from drafts.proposal import EMPTY, Price, Proposal
from drafts.tree import TreeGrower
from tests.drafts.mixture_rig import Clock, Oracle, Useless

MEMORY_AND_HEAD = {"memory": 1, "head": 1}


def expected_after(proposal: Proposal, accepted: int, right: dict[str, int]) -> float:
    calls = NeuralCalls(Clock(), Pacing())
    asked = Asked(TreeGrower(DraftRow("r", "d", [1], 1), {}, None, (), 1, 0.0), 0.0, ["head"])  # type: ignore[arg-type]
    for _ in range(300):
        calls.note_gains("d", asked, right, proposal, accepted)
    return calls._pricing["head"].expected("d", 0.0)[0]


def test_a_token_that_was_right_but_not_verified_is_no_loss_of_the_other_source():
    before = NeuralCalls(Clock(), Pacing())._pricing["head"].expected("d", 0.0)[0]
    assert expected_after(EMPTY, 0, MEMORY_AND_HEAD) == before
    cut = Proposal.chain([5], "memory+head", [0.9])
    assert expected_after(cut, 1, {"memory": 2, "head": 2}) == pytest.approx(0.0, abs=0.02)
    assert expected_after(cut, 1, {"memory": 0, "head": 2}) == pytest.approx(1.0, abs=0.02)


class Slow(Oracle):
    """A memory that takes 0.1 ms of the stand-in clock to say what is wrong."""

    def __init__(self, clock: Clock, text: list[int]) -> None:
        super().__init__(text, 0.6, shift=1)
        self.clock = clock

    def guesses(self, row, path):
        self.clock.seconds += 1e-4
        return super().guesses(row, path)


class Late(Useless):
    """A neural source that knows the text once ``good``."""

    good = False

    def __init__(self, clock: Clock, ms: float, text: list[int]) -> None:
        super().__init__(clock, ms)
        self.text = text

    def draft(self, rows, limits, extend, draw=False):
        if not self.good:
            return super().draft(rows, limits, extend, draw)
        self.calls += 1
        self.clock.seconds += self.ms / 1e3
        for index, (row, limit) in enumerate(zip(rows, limits, strict=True)):
            for depth in range(limit):
                if extend(index, [(self.text[len(row.tokens) + depth], 0.9)]) is None:
                    break
        return None


def steps(mixture: Mixture, batch: list[DraftRow], text: list[int], price: Price, count: int) -> int:
    """Serve ``count`` greedy steps; the tokens emitted."""
    total = 0
    for _ in range(count):
        proposals = mixture.propose(batch, [4] * len(batch), price)
        emitted = []
        for row, proposal in zip(batch, proposals, strict=True):
            rest = text[len(row.tokens) : len(row.tokens) + 8]
            emitted.append(rest[: len(proposal.path(rest)) + 1])
            row.tokens.extend(emitted[-1])
        mixture.observe(batch, proposals, emitted)
        total += sum(map(len, emitted))
    return total


def scene(
    rows: int, step_ms: float, call_ms: float
) -> tuple[Mixture, list[DraftRow], list[int], Price, Late]:
    rng = random.Random(rows)
    text = [rng.randrange(900) for _ in range(60_000)]
    clock = Clock()
    head = Late(clock, call_ms, text)
    mixture = Mixture({"memory": Slow(clock, text), "head": head}, clock=clock)
    batch = [DraftRow(f"r{i}", "math", [text[0]], 1) for i in range(rows)]
    return mixture, batch, text, Price(rows, lambda n: step_ms * (1 + 0.02 * n)), head


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("step_ms", [5.0, 50.0])
def test_a_source_of_a_resting_domain_is_tried_again_and_comes_back(rows: int, step_ms: float):
    mixture, batch, text, price, head = scene(rows, step_ms, 1.5)
    steps(mixture, batch, text, price, 1500)
    before = head.calls
    steps(mixture, batch, text, price, 3000)
    assert head.calls - before >= 2
    head.good = True
    steps(mixture, batch, text, price, 6000)
    assert steps(mixture, batch, text, price, 50) > 2 * 50 * rows


@pytest.mark.parametrize("rows", [1, 4])
def test_a_good_source_that_was_dear_for_a_while_comes_back_soon(rows: int):
    mixture, batch, text, price, head = scene(rows, 5.0, 100.0)
    head.good = True
    steps(mixture, batch, text, price, 400)
    head.ms = 1.0
    steps(mixture, batch, text, price, 1500)
    assert steps(mixture, batch, text, price, 50) > 2 * 50 * rows
