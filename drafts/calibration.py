"""Calibrated acceptance: how often what a source says with some confidence turns out right."""

from __future__ import annotations

import bisect
from collections import defaultdict
from dataclasses import dataclass, field

EDGES = (0.08, 0.18, 0.3, 0.42, 0.55, 0.68, 0.8, 0.9, 0.96)
"""Bin borders of raw confidence; finer near 1, where depth is decided."""


@dataclass
class _Bin:
    hits: float = 0.0
    total: float = 0.0

    def add(self, hit: bool, decay: float) -> None:
        self.hits = self.hits * decay + hit
        self.total = self.total * decay + 1.0


@dataclass
class Calibrator:
    """Maps a source's raw confidence to the observed probability of acceptance.

    Counts are kept per (domain, first or later position, confidence bin) with exponential
    forgetting, and shrunk towards the same bin over all domains, which in turn is shrunk towards the
    raw confidence. So a new domain starts from what its source earns elsewhere, and a source whose
    confidence is mere rank order (a match length) still yields probabilities.

    Args:
        decay: Weight kept by older observations at each new one; 0.98 remembers about 50.
        strength: Pseudo-observations of the parent level.
        prior_scale: What a raw confidence is worth before any observation. Counts of a memory are too
            sure of what they saw once (0.5-0.6 said, 0.29-0.38 accepted, measured); a head's softmax is not.
    """

    decay: float = 0.98
    strength: float = 12.0
    prior_scale: float = 1.0
    _local: dict[tuple[str, bool, int], _Bin] = field(default_factory=lambda: defaultdict(_Bin))
    _shared: dict[tuple[bool, int], _Bin] = field(default_factory=lambda: defaultdict(_Bin))

    def probability(self, domain: str, depth: int, confidence: float) -> float:
        """Estimated acceptance probability, in (0, 1), of a node at ``depth`` (1 = first)."""
        first, index = depth == 1, bisect.bisect(EDGES, confidence)
        estimate = min(max(confidence * self.prior_scale, 0.02), 0.98)
        for bin_ in (self._shared.get((first, index)), self._local.get((domain, first, index))):
            if bin_ is not None:
                estimate = (bin_.hits + self.strength * estimate) / (bin_.total + self.strength)
        return estimate

    def learn(self, domain: str, depth: int, confidence: float, hit: bool) -> None:
        """One tested position: whether the node equalled the emitted token."""
        first, index = depth == 1, bisect.bisect(EDGES, confidence)
        self._local[(domain, first, index)].add(hit, self.decay)
        self._shared[(first, index)].add(hit, 1 - (1 - self.decay) / 4)

    def mean(self, domain: str, depth: int, default: float) -> float:
        """Acceptance at ``depth`` over all confidences, ``default`` before any observation."""
        first = depth == 1
        bins = [b for (d, f, _), b in self._local.items() if d == domain and f == first]
        shared = [b for (f, _), b in self._shared.items() if f == first]
        shared_total = sum(b.total for b in shared)
        prior = (sum(b.hits for b in shared) + 4 * default) / (shared_total + 4)
        total = sum(b.total for b in bins)
        return (sum(b.hits for b in bins) + self.strength * prior) / (total + self.strength)
