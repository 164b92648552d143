"""Interleaved serving: block by block every arm answers the same requests, the arms' order rotated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from draft_arms.engine import Ready, Served
from draft_arms.figures import merged
from draft_arms.plans import Plan


class Server(Protocol):
    """An arm, as the run sees it."""

    plan: Plan

    def serve(self, ready: Ready, block: int) -> Served:
        """Answer one request."""
        ...


def run_blocks(
    arms: dict[str, Server],
    blocks: Sequence[Sequence[Ready]],
    pilot: int,
    on_border: Callable[[], None] = lambda: None,
    say: Callable[[str], None] = lambda text: None,
) -> tuple[dict[str, list[Served]], dict[str, float]]:
    """Serve all blocks with all arms.

    Variants of one arm (see :func:`draft_arms.plans.make_plans`) run until every label has been asked
    ``pilot`` times, or all of its requests but the last quarter; then only the one with the most tokens
    per pass goes on, under the arm's name.

    Args:
        arms: By unique name; variants that lost are taken out, so that they cost no more memory.
        blocks: Requests; a block lies before the last quarter or in it.
        pilot: Requests of a label before variants are judged.
        on_border: Called once, before the first block of the last quarter.
        say: Told after every block.

    Returns:
        What every arm served, in order, and τ of every variant over the pilot.
    """
    served: dict[str, list[Served]] = {name: [] for name in arms}
    tried: dict[str, float] = {}
    judged = crossed = False
    left = dict.fromkeys((ready.asked.label for block in blocks for ready in block), pilot)
    for number, block in enumerate(blocks):
        at_border = block[0].asked.last and not crossed
        if not judged and (at_border or max(left.values()) <= 0):
            judged = True
            tried = _judge(arms, served)
        if at_border:
            crossed = True
            on_border()
        names = list(arms)
        shift = number % len(names)
        for name in [*names[shift:], *names[:shift]]:
            served[name] += [arms[name].serve(ready, number) for ready in block]
        for ready in block:
            left[ready.asked.label] -= 1
        taus = ", ".join(f"{name} {merged(served[name]).mean_accepted_length:.2f}" for name in names)
        say(f"block {number + 1} of {len(blocks)}: τ {taus}")
    return {arm.plan.arm: served[name] for name, arm in arms.items()}, tried


def _judge(arms: dict[str, Server], served: Mapping[str, Sequence[Served]]) -> dict[str, float]:
    """Leave the best variant of every arm in ``arms``; τ of those that were compared."""
    variants: dict[str, list[str]] = {}
    for name, arm in arms.items():
        variants.setdefault(arm.plan.arm, []).append(name)
    tried: dict[str, float] = {}
    for names in variants.values():
        if len(names) < 2:
            continue
        taus = {name: merged(served[name]).mean_accepted_length for name in names}
        tried |= taus
        best = max(taus, key=lambda name: taus[name])
        for name in names:
            if name != best:
                del arms[name]
    return tried
