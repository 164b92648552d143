"""Statistics of paired measurements: machines drift, so only neighbours in time are compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 10_000


def bootstrap(
    values: Sequence[float],
    statistic: Callable[..., NDArray[np.float64]],
    *,
    seed: int = 0,
    confidence: float = 0.95,
) -> tuple[float, float, float]:
    """A statistic of ``values`` and its percentile bootstrap interval (Efron 1979).

    Args:
        values: The measurements, at least one.
        statistic: A numpy reduction that takes ``axis``, for example :func:`numpy.median`.
        seed: Seed of the resampling.
        confidence: Mass of the two-sided interval.

    Returns:
        The statistic, the lower and the upper end.
    """
    data: NDArray[np.float64] = np.asarray(values, dtype=np.float64)
    generator = np.random.default_rng(seed)
    picks = generator.integers(0, len(data), size=(RESAMPLES, len(data)))
    spread = statistic(data[picks], axis=1)
    tail = (1.0 - confidence) / 2.0
    low, high = np.quantile(spread, [tail, 1.0 - tail])
    return float(np.asarray(statistic(data, axis=0))), float(low), float(high)


def median_interval(values: Sequence[float], seed: int = 0) -> tuple[float, float, float]:
    """Median and its 95 % bootstrap interval."""
    return bootstrap(values, _median, seed=seed)


def mean_interval(values: Sequence[float], seed: int = 0) -> tuple[float, float, float]:
    """Mean and its 95 % bootstrap interval; for paired differences, of the mean difference."""
    return bootstrap(values, _mean, seed=seed)


def _median(data: NDArray[np.float64], axis: int) -> Any:
    return np.median(data, axis=axis)


def _mean(data: NDArray[np.float64], axis: int) -> Any:
    return np.mean(data, axis=axis)
