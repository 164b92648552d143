"""The controller's cost side: what a target pass costs by its number of tokens, learned while running."""

from __future__ import annotations

import bisect
from collections.abc import Mapping

from drafts.errors import InvalidValueError


class StepCosts:
    """Milliseconds of a target pass as a function of the tokens in it.

    Machines differ and the same machine changes speed from one minute to the next, so two things are
    kept apart: the *shape* (relative cost by token count, from timing at load and refined slowly) and
    the *drift* (how much slower the machine is now than at load, followed quickly). Decisions depend
    on the shape alone, and so a noisy minute does not change k.

    Args:
        measured: Milliseconds by token count, from :meth:`TargetModel.measure_costs`; at least one.
    """

    def __init__(self, measured: Mapping[int, float]) -> None:
        if not measured or any(count < 1 or cost <= 0 for count, cost in measured.items()):
            raise InvalidValueError("measured", dict(measured), "positive costs for counts of 1 or more")
        self._counts = sorted(measured)
        self._shape = {count: float(measured[count]) for count in self._counts}
        self._drift = 1.0

    @property
    def drift(self) -> float:
        """Recent cost relative to the shape; 1 means as at load."""
        return self._drift

    def ms(self, tokens: int) -> float:
        """Expected milliseconds of a pass over ``tokens`` tokens, at the speed of load time."""
        index = bisect.bisect_left(self._counts, tokens)
        if index < len(self._counts) and self._counts[index] == tokens:
            return self._shape[tokens]
        if index == 0:
            return self._shape[self._counts[0]]
        if index == len(self._counts):
            last = self._counts[-1]
            if len(self._counts) == 1:
                return self._shape[last] * tokens / last
            before = self._counts[-2]
            slope = (self._shape[last] - self._shape[before]) / (last - before)
            return self._shape[last] + max(slope, 0.0) * (tokens - last)
        low, high = self._counts[index - 1], self._counts[index]
        weight = (tokens - low) / (high - low)
        return (1 - weight) * self._shape[low] + weight * self._shape[high]

    def record(self, tokens: int, milliseconds: float) -> None:
        """One measured pass. A single slow block moves the estimate by a bounded amount only."""
        expected = self.ms(tokens)
        ratio = min(max(milliseconds / expected, 0.2), 5.0)
        self._drift += 0.1 * (ratio - self._drift)
        if tokens in self._shape:
            relative = min(max(ratio / self._drift, 0.5), 2.0)
            self._shape[tokens] *= 1 + 0.02 * (relative - 1)

    def as_dict(self) -> dict[int, float]:
        """The shape, milliseconds by token count."""
        return dict(self._shape)
