"""The classifier: nearest class mean among the domains, or no domain at all."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from drafts.errors import InvalidValueError, UnknownNameError
from router.mind.embed import Vector
from router.mind.prototype import Prototype, cohesion

_BACKGROUND_QUANTILE = 0.95
_TOWARDS_EXAMPLES = 0.25
_TYPICAL_CONFIDENCE = 0.95
_LEAST_SCALE = 0.005
_REFIT_EVERY = 8


@dataclass(frozen=True)
class Verdict:
    """What the classifier makes of one vector.

    Attributes:
        domain: The nearest domain, ``None`` when there is none to choose from.
        confidence: That the request belongs to it and not to none, in [0, 1].
        runner_up: The second nearest domain.
        known: Whether ``confidence`` reaches the threshold (equal counts as reached).
    """

    domain: str | None
    confidence: float
    runner_up: str | None
    known: bool


@dataclass(frozen=True)
class Density:
    """Cosine similarity of pairs of requests.

    Attributes:
        by_chance: Mean in the background.
        spread: Standard deviation in the background.
        usual: Mean within a usual domain.
    """

    by_chance: float
    spread: float
    usual: float


NO_DOMAIN = Verdict(None, 0.0, None, False)
"""The verdict on a blank text, and on any text while no domain is registered."""


class Classifier:
    """Nearest class mean with a background class.

    The *margin* of a vector for a domain is how much better the domain's prototype explains it than
    the mean of a background of everyday requests does (both as squared Euclidean distances, halved).
    The nearest domain is the one of greatest margin. It is believed if the margin reaches the
    domain's threshold, which comes from data: a quarter of the way from the 95th percentile of the
    background's own margins to the mean margin of the domain's examples, each against a prototype
    that does not contain it. Confidence is the logistic of the margin, 0.5 at the threshold and about
    0.95 at a typical example (the slope is shrunk half way to the mean of all domains).

    Args:
        background: Unit vectors ``[m, d]``, at least two, of requests that belong to no domain.
        unknown_threshold: Confidence below which a request is unknown; ``None`` is 0.5, which is
            the threshold from data.
        traffic_weight: See :class:`Prototype`.
    """

    def __init__(
        self,
        background: Vector,
        *,
        unknown_threshold: float | None = None,
        traffic_weight: float = 3.0,
    ) -> None:
        if unknown_threshold is not None and not 0.0 <= unknown_threshold <= 1.0:
            raise InvalidValueError("router.unknown_threshold", unknown_threshold, "'auto' or 0 to 1")
        self.background = background
        self.unknown_threshold = 0.5 if unknown_threshold is None else unknown_threshold
        self.traffic_weight = traffic_weight
        self.prototypes: dict[str, Prototype] = {}
        self.rejected_vectors = 0
        self.revision = 0
        self._refinements = 0
        pairs = (background @ background.T)[~np.eye(len(background), dtype=bool)].reshape(len(background), -1)
        self._by_chance, self._chance_spread = float(pairs.mean()), float(pairs.std())
        self._neighbours = float(pairs.max(axis=1).mean())
        self._base_mean = background.mean(axis=0)
        self._base_offset = 0.5 * float(self._base_mean @ self._base_mean)
        self.refit()

    def add(self, domain: str, anchors: Vector) -> None:
        """Register a domain by the unit vectors ``[n, d]`` of its examples (none: never chosen)."""
        self.prototypes[domain] = Prototype(_usable(anchors), traffic_weight=self.traffic_weight)
        self.refit()

    def remove(self, domain: str) -> None:
        """Forget a domain."""
        if domain not in self.prototypes:
            raise UnknownNameError("domain", domain, list(self.prototypes))
        del self.prototypes[domain]
        self.refit()

    def classify(self, vector: Vector | None) -> Verdict:
        """The verdict on one unit vector ``[d]``; ``None`` (a blank text) belongs to no domain."""
        if vector is None or not self._names or not _is_usable(vector):
            return NO_DOMAIN
        margins = self._margins(vector[None, :])[0]
        order = np.argsort(-margins, kind="stable")
        best = int(order[0])
        confidence = _logistic((margins[best] - self._thresholds[best]) / self._scales[best])
        runner_up = self._names[int(order[1])] if len(order) > 1 else None
        return Verdict(self._names[best], confidence, runner_up, confidence >= self.unknown_threshold)

    def refine(self, domain: str, vector: Vector) -> None:
        """Let a request that certainly belongs to ``domain`` widen its prototype."""
        if not _is_usable(vector):
            self.rejected_vectors += 1
            return
        prototype = self.prototypes.get(domain)
        if prototype is None or prototype.is_empty:
            return
        prototype.add_traffic(vector)
        self._refinements += 1
        if self._refinements % _REFIT_EVERY == 0:
            self.refit()

    def density(self) -> Density:
        """How similar requests are to each other, by chance and within a domain.

        A usual domain is shrunk towards the similarity of nearest neighbours in the background, which
        stands in for two domains, so that it is defined without any domain.
        """
        known = [cohesion(p.anchors) for p in self.prototypes.values() if len(p.anchors) >= 3]
        usual = (sum(known) + 2 * self._neighbours) / (len(known) + 2)
        return Density(self._by_chance, self._chance_spread, usual)

    def refit(self) -> None:
        """Prototypes as a matrix, and each domain's threshold and scale from examples and background."""
        self.revision += 1
        self._names = [name for name, p in self.prototypes.items() if not p.is_empty]
        if not self._names:
            return
        means = [self.prototypes[name].mean for name in self._names]
        self._means = np.stack(means)
        self._offsets = 0.5 * np.einsum("nd,nd->n", self._means, self._means)
        strangers = float(np.quantile(self._background_margins(), _BACKGROUND_QUANTILE))
        typical = np.array([self._typical_margin(self.prototypes[name]) for name in self._names])
        pooled = float(np.nanmean(typical)) if np.isfinite(typical).any() else strangers
        typical = np.where(np.isfinite(typical), typical, pooled)
        self._thresholds = strangers + _TOWARDS_EXAMPLES * (typical - strangers)
        reach = np.log(_TYPICAL_CONFIDENCE / (1.0 - _TYPICAL_CONFIDENCE))
        own = np.maximum((typical - self._thresholds) / reach, _LEAST_SCALE)
        self._scales = 0.5 * (own + own.mean())

    def _margins(self, vectors: Vector) -> Vector:
        """Margins ``[n, domains]`` of unit vectors ``[n, d]``."""
        own = vectors @ self._means.T - self._offsets
        base = vectors @ self._base_mean - self._base_offset
        return np.asarray(own - base[:, None], dtype=np.float32)

    def _background_margins(self) -> Vector:
        """Each background vector's greatest margin, itself left out of the background's mean ``[m]``."""
        count = len(self.background)
        own = self.background @ self._means.T - self._offsets
        rest = (self._base_mean * count - self.background) / max(count - 1, 1)
        base = np.einsum("nd,nd->n", self.background, rest) - 0.5 * np.einsum("nd,nd->n", rest, rest)
        return np.asarray(own.max(axis=1) - base, dtype=np.float32)

    def _typical_margin(self, prototype: Prototype) -> float:
        """Mean margin of a domain's examples, each left out of its prototype; NaN below two."""
        rest = prototype.left_out_means()
        if not len(rest):
            return float("nan")
        own = np.einsum("nd,nd->n", prototype.anchors, rest) - 0.5 * np.einsum("nd,nd->n", rest, rest)
        base = prototype.anchors @ self._base_mean - self._base_offset
        return float((own - base).mean())


def _logistic(value: float) -> float:
    return float(1.0 / (1.0 + np.exp(-np.clip(value, -60.0, 60.0))))


def _is_usable(vector: Vector) -> bool:
    norm = float(np.linalg.norm(vector))
    return bool(np.isfinite(norm)) and norm > 1e-6


def _usable(vectors: Vector) -> Vector:
    """The rows that are finite and not zero, at unit length."""
    keep = np.array([_is_usable(vector) for vector in vectors], dtype=bool)
    kept = vectors[keep]
    return np.asarray(kept / np.linalg.norm(kept, axis=1, keepdims=True), dtype=np.float32)
