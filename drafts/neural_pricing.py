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

FAR_BELOW, FAR_RATE = 0.5, 0.5
"""A call that took less than this share of what was expected counts so much at any time: what disturbs a
measurement adds time, so the price was of a disturbed one."""

EVIDENCE_DISCOUNT = 0.7
"""Share of a call's cost that its tokens have to earn: near a tie asking is better, for it also tells which
source is right, and throughput is flat there (62.7 against 62.9 tokens/s with and without, simulated). Only
while speculation as a whole pays: otherwise a call has to earn all of its cost."""

EDGES = (0.25, 0.5, 0.75, 0.9)
"""Bin borders of how sure the memories are of the next token: a head adds most where they are not."""

DEFAULT_LIFT = 0.35
"""Accepted tokens a source is assumed to add to a row whose memories are silent."""


OWN_COUNT, MOST_COUNT = 20.0, 200.0
"""Observations at which a domain's own mean counts as much as that of all domains, and most that count. A
domain sees a fraction of the traffic: judged by its own few rows alone, some give a good source up by bad
luck."""

FIRST_COUNT = 20.0
"""Observations that what is assumed of all domains counts as: with few of them the first rows could decide
against a source, and nobody would ask again."""

DOUBT = 0.7
"""Share of a domain's observations that still counts after a time without: old evidence gives way to what
holds elsewhere."""

READ_MS, READ_RATE = 0.03, 0.1
"""Milliseconds a token assumed of reading a text for the first time, and weight of one timing of it."""

LONG_READ, READ_STEPS = 16, 16
"""Unread tokens from which on a call's time tells about reading, and steps among which reading is shared
out: it is done once, whatever is asked afterwards."""


@dataclass
class _Lift:
    """Running means of what asking added to one row."""

    tokens: float
    nodes: float = 1.5
    count: float = 0.0
    idle: int = 0

    def follow(self, tokens: float, nodes: float, rate: float) -> None:
        self.count = min(self.count + 1.0, MOST_COUNT)
        rate = max(rate, 1.0 / self.count)
        self.tokens += rate * (tokens - self.tokens)
        self.nodes += rate * (nodes - self.nodes)


@dataclass
class NeuralPricing:
    """Costs and gains of one neural source.

    What it adds is learned by domain and by how sure the memories are, each domain's mean drawn towards that
    of all domains by how little it has seen.

    Attributes:
        rate: Least weight of one observation in a domain's means.
        shared_rate: The same in those of all domains.
        tried_ms: What the call chosen last was expected to take, where nothing but what ``afford`` granted
            speaks for it; else ``None``.
    """

    rate: float = 0.02
    shared_rate: float = 0.01
    _call_ms: dict[int, float] = field(default_factory=dict)
    _calls: dict[int, int] = field(default_factory=dict)
    _read_ms: float = READ_MS
    _shared: list[_Lift] = field(default_factory=lambda: [_first_lift(at) for at in range(len(EDGES) + 1)])
    _lifts: dict[tuple[str, int], _Lift] = field(default_factory=dict)
    tried_ms: float | None = None

    def choose(
        self,
        domains: Sequence[str],
        sure: Sequence[float],
        goodput: float,
        node_ms: float,
        *,
        unread: Sequence[int] = (),
        discount: float = EVIDENCE_DISCOUNT,
        afford: Callable[[float], bool] = lambda milliseconds: True,
    ) -> list[bool]:
        """Which rows to ask.

        Args:
            domains: Domain of every row that may be asked.
            sure: Per row, how probable the memories' best candidate is.
            goodput: What a millisecond is worth, in tokens.
            node_ms: Milliseconds that one more verified node costs.
            unread: Per row, tokens that a call would read for the first time; none if not given.
            discount: Share of a call's cost that its tokens have to earn.
            afford: Takes milliseconds out of what may be spent on asking where it does not pay, if they
                are there.
        """
        reading = [self.read_ms(count) for count in unread] or [0.0] * len(domains)
        worth = []
        for domain, value, read in zip(domains, sure, reading, strict=True):
            tokens, nodes = self.expected(domain, value)
            worth.append(tokens - goodput * (node_ms * nodes + discount * read / READ_STEPS))
        order = sorted(range(len(worth)), key=lambda i: -worth[i])
        best, best_count, total = 0.0, 0, 0.0
        for count, index in enumerate(order, start=1):
            total += worth[index]
            if (value := total - discount * goodput * self.call_ms(count)) > best:
                best, best_count = value, count
        chosen = set(order[:best_count])
        granted = 0.0
        for index in self._overdue(domains, sure, order[best_count:]):
            more = self.call_ms(len(chosen) + 1) - (self.call_ms(len(chosen)) if chosen else 0.0)
            cost = max(more, 0.0) + reading[index]
            if afford(cost):
                granted += cost
                chosen.add(index)
                self._lift(domains[index], sure[index]).count *= DOUBT
        self.tried_ms = granted if chosen and not best_count else None
        for index in chosen:
            self._lift(domains[index], sure[index]).idle = 0
        return [index in chosen for index in range(len(worth))]

    def call_ms(self, rows: int) -> float:
        """Expected milliseconds of one call over ``rows`` rows."""
        if rows in self._call_ms:
            return self._call_ms[rows]
        if not self._call_ms:
            return DEFAULT_CALL_MS
        known = [n for n in self._call_ms if n < rows]
        if not known:
            return self._call_ms[min(self._call_ms)]
        nearest = max(known)
        return self._call_ms[nearest] * (1.0 + 0.15 * (rows - nearest))

    def read_ms(self, unread: int) -> float:
        """Expected milliseconds of reading so many tokens, beyond what any call takes."""
        return self._read_ms * unread if unread >= LONG_READ else 0.0

    def expected(self, domain: str, sure: float) -> tuple[float, float]:
        """Accepted tokens that asking is expected to add to a row, and nodes it adds to its tree."""
        at = bisect(EDGES, sure)
        shared, own = self._shared[at], self._lifts.get((domain, at))
        if own is None:
            return shared.tokens, shared.nodes
        weight = own.count / (own.count + OWN_COUNT)
        return (
            shared.tokens + weight * (own.tokens - shared.tokens),
            shared.nodes + weight * (own.nodes - shared.nodes),
        )

    def note_call(self, rows: int, milliseconds: float, unread: Sequence[int] = ()) -> None:
        """Follow the cost of a call.

        Args:
            rows: Rows it was made for.
            milliseconds: What it took; one slow call (a busy machine) counts little.
            unread: Tokens of each row that it read for the first time. Where they are many of one row, the
                time says what reading costs, not what a call does; unless it is less than a call was thought
                to take even without.
        """
        old = self.call_ms(rows)
        long = sum(count for count in unread if count >= LONG_READ)
        if long and milliseconds >= old:
            each = max(milliseconds - old, 0.0) / long
            self._read_ms += READ_RATE * (min(each, 3 * self._read_ms) - self._read_ms)
            return
        count = self._calls[rows] = self._calls.get(rows, 0) + 1
        rate = FIRST_RATE if count <= FIRST_CALLS and milliseconds < old else CALL_RATE
        if milliseconds < FAR_BELOW * old:
            rate = FAR_RATE
        self._call_ms[rows] = old + rate * (min(milliseconds, 3 * old) - old)

    def note_gain(self, domain: str, sure: float, tokens: float, nodes: float) -> None:
        """What asking added to one row: accepted tokens, and verified nodes that nobody else named."""
        self._lift(domain, sure).follow(tokens, nodes, self.rate)
        self._shared[bisect(EDGES, sure)].follow(tokens, nodes, self.shared_rate)

    def depth_floor(self, goodput: float, asked: int) -> float:
        """Reach below which one more depth does not pay for itself."""
        return goodput * self.call_ms(asked) / CALL_DEPTHS / max(asked, 1)

    def forget(self, domain: str) -> None:
        """Drop what was observed of a domain."""
        for key in [key for key in self._lifts if key[0] == domain]:
            del self._lifts[key]

    def _overdue(self, domains: Sequence[str], sure: Sequence[float], left: Sequence[int]) -> list[int]:
        """One of the rows left out for every kind of row left out too often in a row, longest first."""
        kinds = {(domains[index], bisect(EDGES, sure[index])): index for index in left}
        waited: list[tuple[int, int]] = []
        for index in kinds.values():
            lift = self._lift(domains[index], sure[index])
            lift.idle += 1
            if lift.idle >= REFRESH_STEPS:
                waited.append((-lift.idle, index))
        return [index for _, index in sorted(waited)]

    def _lift(self, domain: str, sure: float) -> _Lift:
        at = bisect(EDGES, sure)
        if (domain, at) not in self._lifts:
            self._lifts[(domain, at)] = _Lift(self._shared[at].tokens, self._shared[at].nodes)
        return self._lifts[(domain, at)]


def _first_lift(at: int) -> _Lift:
    """What is assumed of all domains."""
    middle = (0.1, 0.4, 0.6, 0.8, 0.95)[at]
    return _Lift(DEFAULT_LIFT * (1.0 - middle) + 0.05, count=FIRST_COUNT)
