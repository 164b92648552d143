"""The mixture: per row and step, the sources compete by what each is expected to earn.

Verification is lossless, so the emitted text is evidence for every source that was asked, also for
those whose proposal was not the one verified (full information, HedgeSpec, arXiv 2510.20064, section
4). No exploration of target passes is needed.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from drafts.calibration import Calibrator
from drafts.goodput import expected_tokens, worthwhile_nodes
from drafts.kinds.base import DraftRow, NeuralSource, Source
from drafts.proposal import EMPTY, Price, Proposal
from drafts.registry import Swap
from drafts.versions import VersionFollower

REFRESH_STEPS = 48
"""A neural source that does not pay is asked once in this many steps, so that it can come back."""

MEMORY_PRIOR = 0.65
"""What a memory's raw confidence is worth before it was observed."""

BATCH_MARGIN = 1.35
"""Factor on the price of time where several rows share a pass."""

DEFAULT_NEURAL_MS = 1.5
"""Milliseconds per depth assumed of a neural source before it was timed."""

DEFAULT_NEURAL_ALPHA = 0.4
"""Acceptance assumed of a neural source before its first observation."""


@dataclass
class _Earned:
    """Counters of one source in one domain, for the statistics."""

    asked: int = 0
    chosen: int = 0
    proposed: int = 0
    accepted: int = 0
    would_accept: int = 0


@dataclass
class _Candidate:
    source: str
    raw: Proposal
    calibrated: Proposal


@dataclass
class Mixture:
    """Chooses who proposes for each row, how deep, and keeps score; implements ``osd.ports.Drafter``.

    Args:
        sources: All sources by name, cheapest first.
        domain_sources: Names of the sources a domain uses; domains not listed use all.
        versions: Adopts published versions at step borders; ``None`` when nothing learns.
        learn: False keeps the sources from learning the text of finished requests.
        default: Domain whose sources are used by domains that are not listed.
        only: Restricts all domains to these sources; ``None`` does not.
    """

    sources: Mapping[str, Source]
    domain_sources: dict[str, tuple[str, ...]] = field(default_factory=dict)
    versions: VersionFollower | None = None
    learn: bool = True
    default: str = "base"
    only: frozenset[str] | None = None
    learn_seconds: float = 0.0
    earned: dict[tuple[str, str], _Earned] = field(default_factory=lambda: defaultdict(_Earned))
    _calibrators: dict[tuple[str, bool], Calibrator] = field(default_factory=dict)
    _candidates: list[list[_Candidate]] = field(default_factory=list)
    _goodput: dict[int, float] = field(default_factory=dict)
    _neural_ms: dict[tuple[str, int], float] = field(default_factory=dict)
    _since_asked: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    _spent_ms: float = 0.0
    _price: Price | None = None

    @property
    def needs_features(self) -> bool:
        """Whether any source reads the target's hidden states."""
        return any(source.needs_features for source in self.sources.values())

    def propose(self, rows: Sequence[DraftRow], limits: Sequence[int], price: Price) -> list[Proposal]:
        """One proposal per row, trimmed to the nodes that pay at ``price``."""
        self._price, self._spent_ms = price, 0.0
        self._candidates = [[] for _ in rows]
        caps = [self._cap(limit, price) for limit in limits]
        for name, source in self.sources.items():
            if not source.is_neural:
                self._ask(name, source, rows, self._enabled(name, rows, caps))
        for name, source in self.sources.items():
            if source.is_neural:
                self._ask_neural(name, source, rows, caps, price)
        best = [self._best(candidates) for candidates in self._candidates]
        return self._trim(best, rows, price)

    def observe(
        self, rows: Sequence[DraftRow], proposals: Sequence[Proposal], emitted: Sequence[Sequence[int]]
    ) -> None:
        """Score every candidate of the last step on the verified text, chosen or not."""
        for row, proposal, tokens, candidates in zip(rows, proposals, emitted, self._candidates, strict=True):
            for candidate in candidates:
                self._score(row, candidate, tokens)
            if len(proposal):
                earned = self.earned[(row.domain, proposal.sources[0])]
                earned.chosen += 1
                earned.proposed += len(proposal)
                earned.accepted += min(len(tokens) - 1, len(proposal)) if tokens else 0
        if self._price is not None and rows:
            processed = len(rows) + sum(len(proposal) for proposal in proposals)
            spent = self._price.step_ms(processed) + self._spent_ms
            self._update_goodput(len(rows), sum(len(tokens) for tokens in emitted) / max(spent, 1e-6))
        for row, tokens in zip(rows, emitted, strict=True):
            for source in self.sources.values():
                source.observe(row, tokens)
        self._candidates = []

    def finish(self, row: DraftRow) -> None:
        """A request ended: sources learn its text if learning is on and the request allows it."""
        if self.learn and row.store:
            begin = time.perf_counter()
            for source in self.sources.values():
                source.finish(row)
            self.learn_seconds += time.perf_counter() - begin
        row.scratch.clear()

    def swap(self) -> list[Swap]:
        """Adopt newly published versions (called at a step border only)."""
        return [] if self.versions is None else self.versions.adopt()

    def version(self, domain: str) -> int:
        """The version that serves ``domain`` now; 0 is what it was born with."""
        return 0 if self.versions is None else self.versions.served(domain)

    def add_domain(self, domain: str, parent: str | None = None) -> None:
        """Serve a new domain with every source, inheriting from ``parent``."""
        for source in self.sources.values():
            source.add_domain(domain, parent)
        if parent in self.domain_sources:
            self.domain_sources.setdefault(domain, self.domain_sources[parent])

    def drop_domain(self, domain: str) -> None:
        """Forget a domain in every source."""
        for source in self.sources.values():
            source.drop_domain(domain)
        self.domain_sources.pop(domain, None)
        if self.versions is not None:
            self.versions.forget(domain)

    def names(self, domain: str) -> tuple[str, ...]:
        """Sources that ``domain`` uses."""
        names = self.domain_sources.get(domain) or self.domain_sources.get(self.default, tuple(self.sources))
        return names if self.only is None else tuple(name for name in names if name in self.only)

    def describe(self, domain: str) -> dict[str, dict[str, float | int | str]]:
        """Per source of a domain: what it earned and how large it is."""
        report: dict[str, dict[str, float | int | str]] = {}
        for name in self.names(domain):
            earned = self.earned[(domain, name)]
            report[name] = {
                "asked": earned.asked,
                "chosen": earned.chosen,
                "proposed_tokens": earned.proposed,
                "accepted_tokens": earned.accepted,
                "would_accept_per_ask": earned.would_accept / earned.asked if earned.asked else 0.0,
                **self.sources[name].describe(domain),
            }
        return report

    @staticmethod
    def _cap(limit: int, price: Price) -> int:
        return limit if price.fixed_k is None else min(limit, price.fixed_k)

    def _enabled(self, name: str, rows: Sequence[DraftRow], caps: Sequence[int]) -> list[int]:
        return [cap if name in self.names(row.domain) else 0 for row, cap in zip(rows, caps, strict=True)]

    def _ask(self, name: str, source: Source, rows: Sequence[DraftRow], limits: Sequence[int]) -> None:
        if not any(limits):
            return
        self._add(name, rows, limits, source.propose(rows, limits))

    def _add(
        self,
        name: str,
        rows: Sequence[DraftRow],
        limits: Sequence[int],
        proposals: Sequence[Proposal],
    ) -> None:
        for index, (row, limit, raw) in enumerate(zip(rows, limits, proposals, strict=True)):
            if limit > 0:
                self.earned[(row.domain, name)].asked += 1
            if len(raw):
                calibrator = self._calibrator(name, row)
                probabilities = tuple(
                    calibrator.probability(row.domain, depth, confidence)
                    for depth, confidence in zip(raw.depths, raw.confidence, strict=True)
                )
                calibrated = Proposal(raw.tokens, raw.parents, raw.sources, probabilities)
                self._candidates[index].append(_Candidate(name, raw, calibrated))

    def _ask_neural(
        self, name: str, source: Source, rows: Sequence[DraftRow], caps: Sequence[int], price: Price
    ) -> None:
        limits = self._enabled(name, rows, caps)
        if not any(limits):
            return
        if price.fixed_k is None:
            limits = self._worth_asking(name, rows, limits, price)
            if not any(limits):
                return
        asked = sum(limit > 0 for limit in limits)
        floor = 0.0 if price.fixed_k is not None else self._floor(name, len(rows), asked, price)
        begin = time.perf_counter()
        if isinstance(source, NeuralSource):
            proposals = source.propose_priced(rows, limits, [floor] * len(rows))
        else:
            proposals = source.propose(rows, limits)
        elapsed = (time.perf_counter() - begin) * 1e3
        depth = max((len(proposal) for proposal in proposals), default=0)
        if depth:
            self._note_cost(name, asked, elapsed / depth)
        self._spent_ms += elapsed
        self._add(name, rows, limits, proposals)

    def _worth_asking(
        self, name: str, rows: Sequence[DraftRow], limits: Sequence[int], price: Price
    ) -> list[int]:
        """Limits with 0 for rows where the neural source is not expected to earn its time."""
        goodput = self._current_goodput(len(rows), price)
        base = [self._best(candidates).reach for candidates in self._candidates]
        _, value_without = worthwhile_nodes(base, price.step_ms, goodput)
        hopes, asked = [], [0] * len(rows)
        for index, (row, limit) in enumerate(zip(rows, limits, strict=True)):
            hope = self._hope(name, row, limit)
            if limit and sum(hope) > sum(base[index]):
                asked[index] = limit
                hopes.append(hope)
            else:
                hopes.append(base[index])
        count = sum(limit > 0 for limit in asked)
        if count:
            kept, value_with = worthwhile_nodes(hopes, price.step_ms, goodput)
            depth = max((kept[i] for i in range(len(rows)) if asked[i]), default=0)
            cost = goodput * self._neural_ms.get((name, count), DEFAULT_NEURAL_MS) * max(depth, 1)
            if value_with - cost > value_without:
                self._since_asked[name] = 0
                return asked
        self._since_asked[name] += 1
        if self._since_asked[name] >= REFRESH_STEPS:
            self._since_asked[name] = 0
            first = next(index for index, limit in enumerate(limits) if limit)
            return [min(limit, 1) if index == first else 0 for index, limit in enumerate(limits)]
        return [0] * len(rows)

    def _hope(self, name: str, row: DraftRow, limit: int) -> tuple[float, ...]:
        calibrator = self._calibrator(name, row)
        first = calibrator.mean(row.domain, 1, DEFAULT_NEURAL_ALPHA)
        later = calibrator.mean(row.domain, 2, DEFAULT_NEURAL_ALPHA)
        return tuple(first * later**depth for depth in range(limit))

    def _floor(self, name: str, rows: int, asked: int, price: Price) -> float:
        per_depth = self._neural_ms.get((name, asked), DEFAULT_NEURAL_MS) / max(asked, 1)
        marginal = max(price.step_ms(rows + 2) - price.step_ms(rows + 1), 0.0)
        return self._current_goodput(rows, price) * (per_depth + 0.5 * marginal)

    def _trim(self, best: list[Proposal], rows: Sequence[DraftRow], price: Price) -> list[Proposal]:
        if price.fixed_k is not None:
            return best
        goodput = self._current_goodput(len(rows), price)
        kept, _ = worthwhile_nodes([proposal.reach for proposal in best], price.step_ms, goodput)
        return [proposal.first(count) for proposal, count in zip(best, kept, strict=True)]

    @staticmethod
    def _best(candidates: Sequence[_Candidate]) -> Proposal:
        return max((c.calibrated for c in candidates), key=expected_tokens, default=EMPTY)

    def _score(self, row: DraftRow, candidate: _Candidate, emitted: Sequence[int]) -> None:
        """Compare a candidate chain with the emitted tokens; what lies beyond them is censored."""
        calibrator = self._calibrator(candidate.source, row)
        earned = self.earned[(row.domain, candidate.source)]
        pairs = zip(candidate.raw.tokens, candidate.raw.confidence, emitted, strict=False)
        for depth, (token, confidence, truth) in enumerate(pairs, start=1):
            calibrator.learn(row.domain, depth, confidence, token == truth)
            if token != truth:
                break
            earned.would_accept += 1

    def _calibrator(self, name: str, row: DraftRow) -> Calibrator:
        key = (name, row.temperature > 0)
        if key not in self._calibrators:
            scale = 1.0 if self.sources[name].is_neural else MEMORY_PRIOR
            self._calibrators[key] = Calibrator(prior_scale=scale)
        return self._calibrators[key]

    def _current_goodput(self, rows: int, price: Price) -> float:
        """What a millisecond is worth, in tokens; dearer in a batch, where an over-estimate costs everyone.

        Nodes are picked for their estimated reach, so the picked ones are over-estimated (the
        optimiser's curse), and the more rows compete the more so.
        """
        goodput = self._goodput.get(rows, rows / max(price.step_ms(rows), 1e-6))
        return goodput * (BATCH_MARGIN if rows > 1 else 1.0)

    def _update_goodput(self, rows: int, value: float) -> None:
        old = self._goodput.get(rows)
        self._goodput[rows] = value if old is None else old + 0.05 * (value - old)

    def _note_cost(self, name: str, asked: int, milliseconds: float) -> None:
        """Follow the cost per depth; a first call reads the whole prompt, so one call counts little."""
        old = self._neural_ms.get((name, asked), DEFAULT_NEURAL_MS)
        self._neural_ms[(name, asked)] = old + 0.1 * (min(milliseconds, 3 * old) - old)
