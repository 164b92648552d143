"""Combines what several sources say about the next token into one calibrated probability per candidate."""

from __future__ import annotations

import math
from collections.abc import Sequence

Vote = tuple[int, float]
"""A source's index and the log-odds of the confidence it gave to a candidate."""

NEURAL = (1.6, 0.75)
MEMORY = (0.8, 0.4)
"""Weight of being named, and of the log-odds, before anything was observed."""

NONE = 1.0
"""Score of "none of them" before anything was observed."""

CLIP = 4.0
"""Log-odds beyond this add nothing: no source is surer than 98 %."""


def log_odds(confidence: float) -> float:
    """Log-odds of a confidence in [0, 1], bounded by :data:`CLIP`; of NaN, the lowest."""
    bounded = min(max(0.018, confidence), 0.982)
    return math.log(bounded / (1.0 - bounded))


class Combiner:
    """A conditional logit over the candidates of one position (McFadden 1974), learned while serving.

    A candidate's score is the sum, over the sources that named it, of a weight of the source and a weight
    on the log-odds of its confidence; "none of them" competes with a score of its own. So agreement
    raises, contradiction lowers, and the probabilities of siblings add up to at most one. Every position
    of verified text is one observation for all candidates, also for those that were not verified.

    Weights are shared by all domains, plus a deviation per domain that fades unless it is confirmed.

    Args:
        neural: Per source, whether it runs a model. The starting weights, fitted on held-out text, trust a
            model's log-odds more than those of a memory, which is too sure of what it saw once.
        rate: Least step of the shared weights per observation.
        first_rate: Their first step. It shrinks with the root of the sum of a weight's squared gradients
            (AdaGrad, Duchi et al. 2011): a source that is never right is known after a few dozen positions,
            and what was learned from thousands is not moved by the last few.
        own_rate: Step of a domain's deviation.
        fade: Share of a domain's deviation lost at each of its observations.
    """

    def __init__(
        self,
        neural: Sequence[bool],
        *,
        rate: float = 0.02,
        first_rate: float = 0.2,
        own_rate: float = 0.03,
        fade: float = 0.002,
    ) -> None:
        self.sources = len(neural)
        self.rate, self.first_rate, self.own_rate, self.fade = rate, first_rate, own_rate, fade
        # Per source a weight and a slope, then the scores of "none" at the first and at later positions.
        self.shared = [w for is_neural in neural for w in (NEURAL if is_neural else MEMORY)] + [NONE, NONE]
        self.squares = [0.0] * len(self.shared)
        self.own: dict[str, list[float]] = {}

    def probabilities(self, domain: str, later: bool, candidates: Sequence[Sequence[Vote]]) -> list[float]:
        """Acceptance probability of every candidate.

        Args:
            domain: The request's domain.
            later: Whether the position follows another proposed token.
            candidates: Per candidate the votes it got.
        """
        weights = self._weights(domain)
        none = math.exp(weights[2 * self.sources + later])
        odds = []
        for votes in candidates:
            score = 0.0
            for source, value in votes:
                score += weights[2 * source] + weights[2 * source + 1] * value
            odds.append(math.exp(min(max(score, -20.0), 20.0)))
        total = none + sum(odds)
        return [value / total for value in odds]

    def learn(
        self, domain: str, later: bool, candidates: Sequence[Sequence[Vote]], right: int | None
    ) -> None:
        """One verified position: ``right`` is the index of the candidate that was emitted, if any."""
        found = self.probabilities(domain, later, candidates)
        own = self.own.setdefault(domain, [0.0] * len(self.shared))
        keep = 1.0 - self.fade
        for at, value in enumerate(own):
            own[at] = value * keep
        none = 2 * self.sources + later
        self._move(own, none, (right is None) - (1.0 - sum(found)))
        slopes: dict[int, float] = {}
        for index, (p, votes) in enumerate(zip(found, candidates, strict=True)):
            gap = (index == right) - p
            for source, value in votes:
                slopes[2 * source] = slopes.get(2 * source, 0.0) + gap
                slopes[2 * source + 1] = slopes.get(2 * source + 1, 0.0) + gap * value
        for at, slope in slopes.items():
            self._move(own, at, slope)

    def forget(self, domain: str) -> None:
        """Drop a domain's deviation."""
        self.own.pop(domain, None)

    def _move(self, own: list[float], at: int, slope: float) -> None:
        """One step of a weight along the gradient of the log-likelihood."""
        self.squares[at] += slope * slope
        self.shared[at] += max(self.rate, self.first_rate / math.sqrt(1.0 + self.squares[at])) * slope
        own[at] += self.own_rate * slope

    def _weights(self, domain: str) -> list[float]:
        own = self.own.get(domain)
        return self.shared if own is None else [a + b for a, b in zip(self.shared, own, strict=True)]
