"""From how many tokens on another way of computing a pass is the faster one."""

from __future__ import annotations

import math
from collections.abc import Mapping


def crossover(times: Mapping[int, tuple[float, float]]) -> int | None:
    """The count from which the second way should be taken; ``None`` where never.

    A reading that noise spoiled must not decide alone, so the count is the one that makes the product of
    all times taken least.

    Args:
        times: Seconds by token count: the first way's, and the second's.
    """
    counts = sorted(times)
    gains = [math.log(times[count][0] / times[count][1]) for count in counts]
    best, place = 0.0, len(counts)
    total = 0.0
    for index in reversed(range(len(counts))):
        total += gains[index]
        if total > best:
            best, place = total, index
    return counts[place] if place < len(counts) else None
