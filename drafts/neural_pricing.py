"""When is a neural source worth its time? Decided per row from what it added before."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

REFRESH_STEPS = 48
"""A kind of row for which a source does not pay is still asked once in so many of its steps, so that the
source can come back there."""

CALL_DEPTHS = 3
"""Depths of a typical call."""

DEFAULT_CALL_MS = 1.5
"""Milliseconds assumed of a call before it was timed: few, so that a source is tried at once."""

CALL_RATE, FIRST_RATE, FIRST_CALLS = 0.1, 0.3, 10
"""Weight of one call in its expected cost. Among the first ones, which read prompts and meet cold code, those
that took less than expected count more.
"""

EVIDENCE_DISCOUNT = 0.7
"""Share of a call's cost that its tokens have to earn: near a tie asking is better, for it also tells which
source is right, and throughput is flat there (62.7 against 62.9 tokens/s with and without, simulated). Only
while speculation as a whole pays: otherwise a call has to earn all of its cost."""

EDGES = (0.25, 0.5, 0.75, 0.9)
"""Bin borders of how sure the memories are of the next token: a head adds most where they are not."""

DEFAULT_LIFT = 0.35
"""Accepted tokens a source is assumed to add to a row whose memories are silent."""


@dataclass
class _Lift:
    """Running means of what asking added to one row."""

    tokens: float
    nodes: float = 1.5
    idle: int = 0

    def follow(self, tokens: float, nodes: float, rate: float) -> None:
        self.tokens += rate * (tokens - self.tokens)
        self.nodes += rate * (nodes - self.nodes)


@dataclass
class NeuralPricing:
    """Costs and gains of one neural source.

    Attributes:
        rate: Weight of one observation in the running means.
    """

    rate: float = 0.03
    _call_ms: dict[int, float] = field(default_factory=dict)
    _calls: dict[int, int] = field(default_factory=dict)
    _lifts: dict[tuple[str, int], _Lift] = field(default_factory=dict)

    def choose(
        self,
        domains: Sequence[str],
        sure: Sequence[float],
        goodput: float,
        node_ms: float,
        *,
        discount: float = EVIDENCE_DISCOUNT,
        afford: Callable[[float], bool] = lambda milliseconds: True,
    ) -> list[bool]:
        """Which rows to ask.

        Args:
            domains: Domain of every row that may be asked.
            sure: Per row, how probable the memories' best candidate is.
            goodput: What a millisecond is worth, in tokens.
            node_ms: Milliseconds that one more verified node costs.
            discount: Share of a call's cost that its tokens have to earn.
            afford: Takes milliseconds out of what may be spent on asking where it does not pay, if they
                are there.
        """
        worth = []
        for domain, value in zip(domains, sure, strict=True):
            lift = self._lift(domain, value)
            worth.append(lift.tokens - goodput * node_ms * lift.nodes)
        order = sorted(range(len(worth)), key=lambda i: -worth[i])
        best, best_count, total = 0.0, 0, 0.0
        for count, index in enumerate(order, start=1):
            total += worth[index]
            if (value := total - discount * goodput * self.call_ms(count)) > best:
                best, best_count = value, count
        chosen = set(order[:best_count])
        for index in self._overdue(domains, sure, order[best_count:]):
            more = self.call_ms(len(chosen) + 1) - (self.call_ms(len(chosen)) if chosen else 0.0)
            if afford(max(more, 0.0)):
                chosen.add(index)
        for index in chosen:
            self._lift(domains[index], sure[index]).idle = 0
        return [index in chosen for index in range(len(worth))]

    def call_ms(self, rows: int) -> float:
        """Expected milliseconds of one call over ``rows`` rows."""
        if rows in self._call_ms:
            return self._call_ms[rows]
        known = [n for n in self._call_ms if n < rows]
        if not known:
            return DEFAULT_CALL_MS
        nearest = max(known)
        return self._call_ms[nearest] * (1.0 + 0.15 * (rows - nearest))

    def note_call(self, rows: int, milliseconds: float) -> None:
        """Follow the cost of a call; one slow call (a long prompt is read, a busy machine) counts little."""
        old = self.call_ms(rows)
        count = self._calls[rows] = self._calls.get(rows, 0) + 1
        rate = FIRST_RATE if count <= FIRST_CALLS and milliseconds < old else CALL_RATE
        self._call_ms[rows] = old + rate * (min(milliseconds, 3 * old) - old)

    def note_gain(self, domain: str, sure: float, tokens: float, nodes: float) -> None:
        """What asking added to one row: accepted tokens, and verified nodes that nobody else named."""
        self._lift(domain, sure).follow(tokens, nodes, self.rate)

    def depth_floor(self, goodput: float, asked: int) -> float:
        """Reach below which one more depth does not pay for itself."""
        return goodput * self.call_ms(asked) / CALL_DEPTHS / max(asked, 1)

    def forget(self, domain: str) -> None:
        """Drop what was observed of a domain."""
        for key in [key for key in self._lifts if key[0] == domain]:
            del self._lifts[key]

    def _overdue(self, domains: Sequence[str], sure: Sequence[float], left: Sequence[int]) -> set[int]:
        """One of the rows left out for every kind of row that was left out too often in a row."""
        kinds = {(domains[index], bisect(EDGES, sure[index])): index for index in left}
        found: set[int] = set()
        for index in kinds.values():
            lift = self._lift(domains[index], sure[index])
            lift.idle += 1
            if lift.idle >= REFRESH_STEPS:
                found.add(index)
        return found

    def _lift(self, domain: str, sure: float) -> _Lift:
        at = bisect(EDGES, sure)
        if (domain, at) not in self._lifts:
            middle = (0.1, 0.4, 0.6, 0.8, 0.95)[at]
            self._lifts[(domain, at)] = _Lift(DEFAULT_LIFT * (1.0 - middle) + 0.05)
        return self._lifts[(domain, at)]
