"""Hedge over fixed ways of drafting, of which only some have something to say at a time."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Expert = TypeVar("Expert", bound=Hashable)


@dataclass
class SleepingHedge(Generic[Expert]):
    """AdaNormalHedge for sleeping experts (Luo & Schapire 2015, arXiv 1502.05934, sections 3 and 5).

    It has no rate to tune: an expert's weight follows from its regret R, what it gained more than the
    weighted mean of those awake, and from C, the sum of that difference's size. An expert asleep neither
    gains nor loses (Freund, Schapire, Singer and Warmuth 1997). Both sums forget, so that a shift of the
    traffic is followed.

    Attributes:
        keep: Share of the past that is left after one more round in which the expert was awake.
    """

    keep: float = 0.99
    _sums: dict[Expert, tuple[float, float]] = field(default_factory=dict)

    def weights(self, awake: Sequence[Expert]) -> dict[Expert, float]:
        """How much each of the experts awake is to be trusted; they add up to 1, and start equal."""
        found = {expert: _weight(*self._sums.get(expert, (0.0, 0.0))) for expert in awake}
        total = sum(found.values())
        if total <= 0.0:
            return dict.fromkeys(found, 1.0 / max(len(found), 1))
        return {expert: value / total for expert, value in found.items()}

    def see(self, gains: Mapping[Expert, float]) -> None:
        """One round: what every expert awake gained; differences beyond 1 count as 1."""
        weights = self.weights(list(gains))
        mean = sum(weights[expert] * gain for expert, gain in gains.items())
        for expert, gain in gains.items():
            more = min(max(gain - mean, -1.0), 1.0)
            regret, size = self._sums.get(expert, (0.0, 0.0))
            self._sums[expert] = self.keep * regret + more, self.keep * size + abs(more)

    def state(self) -> dict[Expert, tuple[float, float]]:
        """Both sums by expert."""
        return dict(self._sums)

    def load_state(self, sums: Mapping[Expert, tuple[float, float]]) -> None:
        """Restore :meth:`state`."""
        self._sums = dict(sums)


def _weight(regret: float, size: float) -> float:
    """Half the difference of the potential exp([R]₊² / 3C) one round of gain above and below."""
    return 0.5 * (_potential(regret + 1.0, size + 1.0) - _potential(regret - 1.0, size + 1.0))


def _potential(regret: float, size: float) -> float:
    return math.exp(min(max(regret, 0.0) ** 2 / (3.0 * size), 300.0))
