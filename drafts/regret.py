"""What each source alone, at a fixed depth, would have gained: regret of the mixture against the best one.

Verified text is evidence for all sources (full information; HedgeSpec, arXiv 2510.20064), so no target
pass is spent. At sampled steps every source draws its own chain, whatever the tree holds; once the text
that follows is known the chain is scored on it. A step's own tokens would not do: they end one token after
the mixture's, so a source that knows more could not be seen to.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from drafts.hedge import SleepingHedge
from drafts.kinds.base import DraftRow, MemorySource
from drafts.proposal import Price

PROBE_EVERY = 16
"""Row-steps of a domain of which one is probed: the chains of all memories cost then a few microseconds."""

FIRST_PROBES = 16
"""Probes of a domain that are made as fast as its texts allow, so that a useless source is soon known."""

DEPTHS = (1, 2, 4, 8)
"""Depths at which a source is judged as a way of drafting of its own."""

SPAN = 4.0
"""Tokens of gain that are a whole unit to Hedge."""

FIRST_TOKEN_MS = 0.03
"""Milliseconds assumed of a memory's guess, before it was timed."""

KEEP, PRIOR_GAIN = 0.97, 0.5
"""Share of a way's recent gains left after one more probe, and the gain of the one probe it starts with."""

TIME_RATE = 0.1
"""Weight of one timing; one three times its mean counts as that much, as only disturbances are so long."""

PLAIN = "plain"
"""The source that never says anything: depth 0, gain 0, never asleep."""

SCRATCH = "regret"
"""Where a row keeps its open probe."""

Fixed = tuple[str, int]
"""One way of drafting: a source and the depth of its chains."""


@dataclass
class _Sums:
    """Over probed steps in which a way of drafting was awake; ``recent`` and ``weight`` forget."""

    steps: int = 0
    accepted: float = 0.0
    gain: float = 0.0
    regret: float = 0.0
    recent: float = PRIOR_GAIN
    weight: float = 1.0

    def see(self, accepted: int, gain: float, served: float) -> None:
        self.steps += 1
        self.accepted += accepted
        self.gain += gain
        self.regret += gain - served
        self.recent = KEEP * self.recent + gain
        self.weight = KEEP * self.weight + 1.0


@dataclass
class _Domain:
    """Everything that was counted of one domain."""

    seen: int = 0
    opened: int = 0
    steps: int = 0
    accepted: float = 0.0
    gain: float = 0.0
    ways: dict[Fixed, _Sums] = field(default_factory=dict)
    hedge: SleepingHedge[Fixed] = field(default_factory=SleepingHedge)
    useless: frozenset[str] = frozenset()

    def judge(self) -> None:
        """Tell the sources that lose at every depth from the others."""
        good = {source for (source, _), sums in self.ways.items() if sums.recent >= 0.0}
        self.useless = frozenset(source for source, _ in self.ways) - good


@dataclass
class _Probe:
    """One step of one row that waits for the text that follows ``start``; costs are in tokens."""

    domain: str
    start: int
    chains: dict[str, tuple[int, ...]]
    costs: dict[Fixed, float]
    accepted: int = 0
    served: float | None = None


@dataclass
class RegretBook:
    """Gains of fixed sources and depths by domain, beside those of the mixture.

    A gain is *accepted tokens less what their milliseconds are worth* at the long-run rate of tokens, so
    that comparing gains is comparing tokens per unit of time (a renewal process; see
    :mod:`drafts.goodput`). Regret against a way of drafting adds up over the steps in which it had
    something to say.

    Attributes:
        clock: Seconds, by which memories are timed.
    """

    clock: Callable[[], float] = time.perf_counter
    _domains: dict[str, _Domain] = field(default_factory=dict)
    _token_ms: dict[str, float] = field(default_factory=dict)

    def due(self, row: DraftRow, *, hurry: bool = True) -> bool:
        """Whether this step of ``row`` is to be probed; ``hurry`` makes the first probes at once."""
        domain = self._domains.setdefault(row.domain, _Domain())
        domain.seen += 1
        first = hurry and domain.opened < FIRST_PROBES
        return (first or domain.seen % PROBE_EVERY == 0) and SCRATCH not in row.scratch

    def useless(self, domain: str) -> frozenset[str]:
        """Sources that of late would have lost against plain decoding at every depth.

        Asking them costs time for nodes that do not pay; probes go on asking them, so they come back.
        """
        known = self._domains.get(domain)
        return frozenset() if known is None else known.useless

    def drawn(self, name: str, source: MemorySource, row: DraftRow, limit: int) -> tuple[int, ...]:
        """The chain of at most ``limit`` tokens that the memory ``name`` alone proposes now; timed."""
        begin = self.clock()
        chain = source.propose([row], [limit])[0].tokens
        each = (self.clock() - begin) * 1e3 / max(len(chain), 1)
        old = self._token_ms.get(name, FIRST_TOKEN_MS)
        self._token_ms[name] = old + TIME_RATE * (min(each, 3.0 * old) - old)
        return chain

    def open(
        self,
        row: DraftRow,
        chains: Mapping[str, Sequence[int]],
        call_ms: Mapping[str, float],
        price: Price,
        goodput: float,
    ) -> None:
        """Keep what every source said at the present end of the text.

        Args:
            row: The request.
            chains: The best chain of every source, by name; empty where it has nothing to say.
            call_ms: Milliseconds a token of a neural source's chain costs.
            price: Of this step.
            goodput: What a millisecond is worth, in tokens.
        """
        costs: dict[Fixed, float] = {}
        plain = price.step_ms(price.rows)
        for name, chain in chains.items():
            each = call_ms.get(name, self._token_ms.get(name, FIRST_TOKEN_MS)) / price.slowdown
            for depth in DEPTHS if chain else ():
                count = min(depth, len(chain))
                verify = (price.step_ms(price.rows * (1 + count)) - plain) / price.rows
                costs[(name, depth)] = goodput * (max(verify, 0.0) + each * count)
        said = {name: tuple(chain) for name, chain in chains.items() if chain}
        row.scratch[SCRATCH] = _Probe(row.domain, len(row.tokens), said, costs)
        self._domains[row.domain].opened += 1

    def served(self, row: DraftRow, accepted: int, cost: float) -> None:
        """What the mixture had accepted at a probed step, and its milliseconds' worth in tokens."""
        probe = row.scratch.get(SCRATCH)
        if isinstance(probe, _Probe) and probe.served is None:
            probe.accepted, probe.served = accepted, accepted - cost

    def close(self, row: DraftRow, *, ended: bool = False) -> None:
        """Score a row's open probe once its text is long enough, or has ended."""
        probe = row.scratch.get(SCRATCH)
        if not isinstance(probe, _Probe):
            return
        text = row.tokens[probe.start : probe.start + DEPTHS[-1]]
        if len(text) < DEPTHS[-1] and not ended:
            return
        del row.scratch[SCRATCH]
        domain = self._domains.get(probe.domain)
        if domain is not None and probe.served is not None:
            _count(domain, probe, probe.served, text)

    def figures(self, name: str) -> dict[str, Any]:
        """For the statistics of a domain.

        ``served`` and every source tell mean accepted tokens a probed step, mean gain, and the regret of the
        mixture against them, in tokens a step in which they spoke; of a source, at its best depth. A
        negative regret says that the mixture does better. ``weight`` is Hedge's, all depths together. Safe
        from any thread while the engine's goes on counting.
        """
        domain = self._domains.get(name, _Domain())
        ways = {way: sums for way, sums in domain.ways.copy().items() if sums.steps}
        weights = domain.hedge.weights(list(ways))
        sources: dict[str, dict[str, float | int]] = {}
        for source in dict.fromkeys(source for source, _ in ways):
            way = max((way for way in ways if way[0] == source), key=lambda w: ways[w].regret)
            sums = ways[way]
            sources[source] = {
                "depth": way[1],
                "steps": sums.steps,
                "accepted_per_step": sums.accepted / sums.steps,
                "gain_per_step": sums.gain / sums.steps,
                "regret_per_step": sums.regret / sums.steps,
                "regret": sums.regret,
                "weight": sum(weight for (other, _), weight in weights.items() if other == source),
            }
        best = max(sources, key=lambda source: sources[source]["regret"], default=None)
        steps = max(domain.steps, 1)
        return {
            "steps": domain.steps,
            "served": {"accepted_per_step": domain.accepted / steps, "gain_per_step": domain.gain / steps},
            "best": best,
            "sources": sources,
        }

    def forget(self, domain: str) -> None:
        """Drop a domain; its open probes count for nothing."""
        self._domains.pop(domain, None)

    def state(self) -> dict[str, Any]:
        """All sums, as JSON."""
        return {
            name: {
                "steps": domain.steps,
                "accepted": domain.accepted,
                "gain": domain.gain,
                "ways": [[*way, *vars(sums).values()] for way, sums in domain.ways.items()],
                "hedge": [[*way, *sums] for way, sums in domain.hedge.state().items()],
            }
            for name, domain in list(self._domains.items())
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state`."""
        self._domains = {}
        for name, kept in state.items():
            steps = int(kept["steps"])
            domain = _Domain(0, steps, steps, float(kept["accepted"]), float(kept["gain"]))
            domain.ways = {
                (source, depth): _Sums(int(steps), *map(float, rest))
                for source, depth, steps, *rest in kept["ways"]
            }
            domain.judge()
            domain.hedge.load_state({(source, depth): (r, c) for source, depth, r, c in kept["hedge"]})
            self._domains[name] = domain


def _count(domain: _Domain, probe: _Probe, served: float, text: Sequence[int]) -> None:
    """Add one scored step to a domain's sums."""
    gains: dict[Fixed, tuple[int, float]] = {(PLAIN, 0): (0, 0.0)}
    for (name, depth), cost in probe.costs.items():
        accepted = min(_right(probe.chains[name], text), depth)
        gains[(name, depth)] = accepted, accepted - cost
    for way, (accepted, gain) in gains.items():
        domain.ways.setdefault(way, _Sums()).see(accepted, gain, served)
    domain.steps += 1
    domain.accepted += probe.accepted
    domain.gain += served
    domain.hedge.see({way: gain / SPAN for way, (_, gain) in gains.items()})
    domain.judge()


def _right(chain: Sequence[int], text: Sequence[int]) -> int:
    """How many leading tokens of ``chain`` the text repeats."""
    for count, (token, truth) in enumerate(zip(chain, text, strict=False)):
        if token != truth:
            return count
    return min(len(chain), len(text))
