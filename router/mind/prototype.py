"""One domain as the classifier sees it: what was declared, and what traffic has added."""

from __future__ import annotations

import numpy as np

from router.mind.embed import Vector

TRAFFIC_MEMORY = 200.0
"""Confident requests after which the mean of traffic forgets its oldest ones."""


class Prototype:
    """The mean embedding of a domain.

    It is *not* normalised: the mean of unit vectors is the shorter the wider the domain, and the
    Euclidean distance to it accounts for that width. (Nearest class mean; on mixed prompts from five
    examples it beats the normalised prototype by 0.05 and equals logistic regression.)

    Declared examples keep a fixed share of the mean, so traffic can widen a domain but never carry
    it away from what it was declared to be.

    Args:
        anchors: Unit vectors ``[n, d]`` of the declared examples; ``n`` may be 0.
        traffic_weight: Most weight of traffic, in multiples of the number of anchors.
    """

    def __init__(self, anchors: Vector, *, traffic_weight: float = 3.0) -> None:
        self.anchors = anchors
        self.traffic_weight = traffic_weight
        self.traffic_mean: Vector = np.zeros(anchors.shape[1], dtype=np.float32)
        self.traffic_count = 0.0

    @property
    def is_empty(self) -> bool:
        """Whether nothing is known of the domain, so that nothing can be routed to it."""
        return len(self.anchors) == 0

    @property
    def _weight(self) -> float:
        return min(self.traffic_count, self.traffic_weight * len(self.anchors))

    @property
    def mean(self) -> Vector:
        """The prototype ``[d]``; zeros for an empty domain."""
        return self._mean(self.anchors.sum(axis=0), len(self.anchors))

    def left_out_means(self) -> Vector:
        """The prototype without each anchor in turn ``[n, d]``; no rows where nothing would be left."""
        count = len(self.anchors)
        if count < 2:
            return np.zeros((0, self.anchors.shape[1]), dtype=np.float32)
        total = self.anchors.sum(axis=0)
        return np.stack([self._mean(total - anchor, count - 1) for anchor in self.anchors])

    def add_traffic(self, vector: Vector) -> None:
        """Move the mean of traffic towards a confidently routed request."""
        self.traffic_count += 1.0
        step = 1.0 / min(self.traffic_count, TRAFFIC_MEMORY)
        self.traffic_mean = ((1.0 - step) * self.traffic_mean + step * vector).astype(np.float32)

    def _mean(self, total: Vector, count: int) -> Vector:
        weight = self._weight
        if count + weight == 0:
            return np.zeros_like(total)
        mixed = (total + weight * self.traffic_mean) / (count + weight)
        return np.asarray(mixed, dtype=np.float32)


def cohesion(vectors: Vector) -> float:
    """Mean cosine similarity of distinct pairs of unit vectors ``[n, d]``; 0 below two vectors."""
    count = len(vectors)
    if count < 2:
        return 0.0
    total = vectors.sum(axis=0)
    return float((total @ total - count) / (count * (count - 1)))
