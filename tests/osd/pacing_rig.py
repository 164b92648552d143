"""A simulated target for the controller: costs and acceptance are functions, time is a counter."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from drafts.kinds.base import DraftRow, MemorySource, NeuralSource
from drafts.mixture import Mixture
from drafts.proposal import Price, Proposal
from osd.serve.controller import StepCosts

RIGHT, WRONG = 5, 6
"""Drafts always name ``RIGHT``; the target says it or ``WRONG``."""

DEPTH = 8


class Clock:
    """Milliseconds that only pass when something is done."""

    def __init__(self) -> None:
        self.ms = 0.0

    def __call__(self) -> float:
        return self.ms / 1e3


class Memory(MemorySource):
    """Names the same token at every position, with a confidence that is right on average."""

    name = "memory"

    def __init__(self, clock: Clock, ask_ms: float = 0.05) -> None:
        self.clock, self.ask_ms, self.confidence, self.asked, self.rows_asked = clock, ask_ms, 0.7, 0, 0

    def guesses(self, row, path):
        self.clock.ms += self.ask_ms
        self.asked += 1
        self.rows_asked += not path
        return [(RIGHT, self.confidence)] if self.confidence else []


class Head(NeuralSource):
    """A head whose every call takes the same time."""

    name = "head"

    def __init__(self, clock: Clock, call_ms: float = 4.0, confidence: float = 0.7) -> None:
        self.clock, self.call_ms, self.confidence, self.calls = clock, call_ms, confidence, 0

    def draft(self, rows, limits, extend):
        self.clock.ms += self.call_ms
        self.calls += 1
        for index, limit in enumerate(limits):
            for _ in range(limit):
                if extend(index, [(RIGHT, self.confidence)]) is None:
                    break


class Sim:
    """Steps of a batch under ``cost(rows, tokens)`` and an acceptance per position.

    Attributes:
        acceptance: Chance that the target says what the drafts name, by domain.
        spent_ms: Simulated milliseconds so far, drafting included.
    """

    def __init__(
        self,
        cost: Callable[[int, int], float],
        acceptance: float = 0.8,
        *,
        head: bool = False,
        load: Callable[[int], float] | None = None,
        noise: Callable[[], float] = lambda: 1.0,
    ) -> None:
        self.cost, self.acceptance, self.noise = cost, {"d": acceptance}, noise
        shape = load or (lambda n: cost(1, n))
        self.costs = StepCosts({n: shape(n) for n in (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64)})
        self.clock = Clock()
        self.memory, self.head = Memory(self.clock), Head(self.clock)
        sources = {"memory": self.memory, **({"head": self.head} if head else {})}
        self.mixture = Mixture(sources, clock=self.clock)
        self.random = random.Random(0)
        self.tokens = 0
        self.pass_ms = 0.0

    @property
    def spent_ms(self) -> float:
        return self.pass_ms + self.clock.ms

    def step(self, rows: int = 1, domains: Sequence[str] | None = None) -> list[Proposal]:
        names = list(domains or ["d"] * rows)
        batch = [DraftRow(str(i), name, [1, 2, 3], 3) for i, name in enumerate(names)]
        price = Price(
            rows,
            self.costs.price(rows),
            silenced=[""] * rows,
            slowdown=self.costs.drift,
            measured_ms=lambda: self.costs.last_ms,
        )
        proposals = self.mixture.propose(batch, [DEPTH] * rows, price)
        emitted: list[list[int]] = []
        for row, proposal in zip(batch, proposals, strict=True):
            accept = self.acceptance[row.domain]
            truth = [RIGHT if self.random.random() < accept else WRONG for _ in range(DEPTH + 1)]
            emitted.append(truth[: len(proposal.path(truth)) + 1])
            row.tokens.extend(emitted[-1])
        tokens = rows + sum(map(len, proposals))
        took = self.cost(rows, tokens) * self.noise()
        self.costs.record(rows, tokens, took)
        self.pass_ms += took
        self.tokens += sum(map(len, emitted))
        self.mixture.observe(batch, proposals, emitted)
        return proposals

    def nodes(self, steps: int, rows: int = 1) -> list[float]:
        """Mean nodes per row of each of ``steps`` steps."""
        return [sum(map(len, self.step(rows))) / rows for _ in range(steps)]

    def rate(self, steps: int, rows: int = 1) -> float:
        """Tokens per millisecond over ``steps`` steps."""
        tokens, spent = self.tokens, self.spent_ms
        for _ in range(steps):
            self.step(rows)
        return (self.tokens - tokens) / (self.spent_ms - spent)
