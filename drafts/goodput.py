"""Goodput: how many proposed nodes are worth verifying (TurboSpec, arXiv 2406.14066, section 4)."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def worthwhile_nodes(
    reaches: Sequence[Sequence[float]], step_ms: Callable[[int], float], goodput: float
) -> tuple[list[int], float]:
    """How many leading nodes of each row to verify.

    Speculation is a renewal process: with ``g`` the long-run goodput, a step is best when it
    maximises ``tokens - g * time``, not its own tokens/time (which would be too eager where drafts
    are poor and too timid where they are good). The cost of a pass is a staircase in the number of
    tokens, so all prefix counts are compared instead of stopping at the first loss.

    Args:
        reaches: Per row, the acceptance probability of each node, ancestors included; must not
            increase along a row (as in a chain).
        step_ms: Milliseconds of a target pass by number of tokens.
        goodput: Long-run tokens per millisecond.

    Returns:
        The number of nodes kept per row, and the gain in tokens over proposing nothing.
    """
    rows = len(reaches)
    nodes = sorted(((reach, row) for row, chain in enumerate(reaches) for reach in chain), reverse=True)
    base = goodput * step_ms(rows)
    best_value, best_count, tokens = 0.0, 0, 0.0
    for count, (reach, _) in enumerate(nodes, start=1):
        tokens += reach
        value = tokens - (goodput * step_ms(rows + count) - base)
        if value > best_value:
            best_value, best_count = value, count
    kept = [0] * rows
    for _, row in nodes[:best_count]:
        kept[row] += 1
    return kept, best_value
