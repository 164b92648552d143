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


def ratio_gain(
    a: Sequence[Sequence[float]], b: Sequence[Sequence[float]], seed: int = 0
) -> tuple[float, float, float]:
    """How much one ratio of sums exceeds another over the same requests, with its 95 % bootstrap interval.

    Requests are resampled in pairs, as long answers weigh more and hard ones are hard for both.

    Args:
        a: Numerator and denominator of every request, for example tokens and target passes: then the ratio
            is the mean accepted length. At least one request.
        b: The same of the same requests, in the same order.
        seed: Seed of the resampling.

    Returns:
        The difference of the ratios, its lower and its upper end.
    """
    one, other = (np.asarray(values, dtype=np.float64) for values in (a, b))
    generator = np.random.default_rng(seed)
    count = len(one)
    spread: list[NDArray[np.float64]] = []
    for _ in range(RESAMPLES // 1000):
        weights = generator.multinomial(count, np.full(count, 1.0 / count), size=1000).astype(np.float64)
        spread.append(_ratio(weights @ one) - _ratio(weights @ other))
    low, high = np.quantile(np.concatenate(spread), [0.025, 0.975])
    return float(_ratio(one.sum(0)) - _ratio(other.sum(0))), float(low), float(high)


def _ratio(sums: NDArray[np.float64]) -> NDArray[np.float64]:
    """Numerator over denominator ``[..., 2] -> [...]``; 0 where the denominator is 0."""
    below = sums[..., 1]
    ratio: NDArray[np.float64] = np.divide(sums[..., 0], below, out=np.zeros_like(below), where=below > 0)
    return ratio


def _median(data: NDArray[np.float64], axis: int) -> Any:
    return np.median(data, axis=axis)


def _mean(data: NDArray[np.float64], axis: int) -> Any:
    return np.mean(data, axis=axis)
