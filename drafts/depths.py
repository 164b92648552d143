"""Acceptance by depth as it is now, and how far the confidences of proposed nodes can be believed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from drafts.proposal import ROOT, Proposal

DEPTHS = 8
"""Depths told apart; deeper ones share the last."""

PRIOR = 0.5
"""Weight of the belief that confidences are right, in expected acceptances."""

CHANCE = 2.0
"""Standard deviations by which acceptances may miss what was promised before anything is concluded:
correcting what is only luck costs up to 2 % of tokens per millisecond, measured in simulation."""

HIGHEST = 0.98
"""No node is surer than this."""


@dataclass
class _Depth:
    """Forgetting sums over positions that were tested: how many were hit, were expected to be, and how
    far chance alone lets the two differ.
    """

    tested: float = 0.0
    hit: float = 0.0
    expected: float = 0.0
    variance: float = 0.0

    def see(self, hit: bool, expected: float, keep: float) -> None:
        self.tested = keep * self.tested + 1.0
        self.hit = keep * self.hit + hit
        self.expected = keep * self.expected + expected
        self.variance = keep * keep * self.variance + expected * (1.0 - expected)

    @property
    def factor(self) -> float:
        """By which a confidence is to be multiplied; 1 as long as chance explains the outcomes."""
        luck = CHANCE * math.sqrt(self.variance)
        missed = self.hit - self.expected
        missed = max(missed - luck, 0.0) if missed > 0.0 else min(missed + luck, 0.0)
        return max(self.expected + missed + PRIOR, 0.0) / (self.expected + PRIOR)


@dataclass
class DepthAcceptance:
    """Per domain and depth d: accepted at d, given that d - 1 was, recently; and what was promised.

    The combiner learns slowly, and so finely; when drafts turn useless (or good) at once, this follows
    within a few steps. Verified text is evidence for every grown node, verified or not.

    Attributes:
        keep: Share of the past that is left after one more test at a depth.
    """

    keep: float = 0.85
    _depths: dict[str, list[_Depth]] = field(default_factory=dict)
    _factors: dict[str, list[float]] = field(default_factory=dict)

    def see(self, domain: str, proposal: Proposal, path: Sequence[int], emitted: int) -> None:
        """Count one row's step.

        Args:
            domain: Its domain.
            proposal: All its grown nodes, also those that were not verified.
            path: Indices of those that spell the beginning of the emitted text.
            emitted: How many tokens that text has.
        """
        self._factors.pop(domain, None)
        promised = dict.fromkeys((ROOT, *path), 0.0)
        for parent, confidence in zip(proposal.parents, proposal.confidence, strict=True):
            if parent in promised:
                promised[parent] += confidence
        depths = self._depths.setdefault(domain, [_Depth() for _ in range(DEPTHS)])
        for depth, expected in enumerate(list(promised.values())[:emitted]):
            if expected > 0.0:
                depths[min(depth, DEPTHS - 1)].see(depth < len(path), min(expected, 1.0), self.keep)

    def reach(self, domain: str, proposal: Proposal) -> list[float]:
        """Each node's probability of being accepted, ancestors included, as recent outcomes correct it.

        Nodes keep their order, and so no node is given more than the one before it.
        """
        depths = self._depths.get(domain)
        if depths is None or not len(proposal):
            return list(proposal.reach)
        factors = self._factors.get(domain)
        if factors is None:
            factors = self._factors[domain] = [depth.factor for depth in depths]
        reach: list[float] = []
        for parent, depth, confidence in zip(
            proposal.parents, proposal.depths, proposal.confidence, strict=True
        ):
            believed = min(confidence * factors[min(depth, DEPTHS) - 1], HIGHEST)
            reach.append(believed * (1.0 if parent == ROOT else reach[parent]))
        for index in range(1, len(reach)):
            if reach[index] > reach[index - 1]:
                reach[index] = reach[index - 1]
        return reach

    def recent(self, domain: str) -> list[float]:
        """Acceptance by depth over the latest steps, as deep as it was tested."""
        return [d.hit / d.tested for d in self._depths.get(domain, ()) if d.tested]

    def forget(self, domain: str) -> None:
        """Drop a domain."""
        self._depths.pop(domain, None)
        self._factors.pop(domain, None)
