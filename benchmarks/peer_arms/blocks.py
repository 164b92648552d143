"""Blocks of prompts through every arm in turn, one arm at a time."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from peer_arms.in_engine import MODES
from peer_arms.measured import ArmUnavailableError, BlockRun, PeerArm, Prompt
from peer_arms.summary import ARMS, Measurements

SETTLE_SECONDS = 0.05
"""Pause before each arm's turn: threads of the arm before still spin for some milliseconds."""


def shuffled(names: Sequence[str], order: random.Random) -> list[str]:
    """The arms in random order, except that the learning engine never comes before the frozen one.

    Both share memories: answers that the one had just learned would be known to the other.
    """
    names = list(names)
    order.shuffle(names)
    if {"polydraft", "polydraft_frozen"} <= set(names):
        a, b = sorted((names.index("polydraft"), names.index("polydraft_frozen")))
        names[a], names[b] = "polydraft_frozen", "polydraft"
    return names


def measure(
    make: Callable[[str], PeerArm],
    names: Sequence[str],
    blocks: Sequence[Sequence[Prompt]],
    warm_up: Sequence[Prompt],
    max_tokens: int,
    seed: int,
    *,
    say: Callable[[str], None] = lambda text: None,
    settle: float = SETTLE_SECONDS,
) -> Measurements:
    """Start every arm, warm it up with a block that does not count, and run all blocks.

    An arm that fails is left out from then on, with the reason; all are closed at the end, whatever happens.
    """
    labels = {prompt.index: prompt.item.label or "unlabelled" for block in blocks for prompt in block}
    measured = Measurements(labels)
    order = random.Random(f"peers:{seed}")
    with ExitStack() as stack:
        arms: dict[str, PeerArm] = {}

        def run(name: str, block: Sequence[Prompt], **options: Any) -> BlockRun | None:
            time.sleep(settle)
            try:
                return arms[name].run(block, max_tokens, **options)
            except (ArmUnavailableError, RuntimeError, ValueError) as error:
                measured.skipped[name] = str(error)
                say(f"skipped: {name}: {error}")
                arms.pop(name).close()
                return None

        for name in names:
            try:
                arms[name] = make(name)
            except ArmUnavailableError as error:
                measured.skipped[name] = str(error)
                say(f"skipped: {name}: {error}")
                continue
            stack.callback(arms[name].close)
            measured.notes[name] = arms[name].note
            run(name, warm_up, **({"store": False} if name in MODES else {}))
        for number, block in enumerate(blocks, start=1):
            runs: dict[str, BlockRun] = {}
            for name in shuffled(list(arms), order):
                result = run(name, block)
                if result is not None:
                    runs[name] = result
            measured.blocks.append(runs)
            speeds = ", ".join(f"{n} {runs[n].tokens_per_second:.1f}" for n in ARMS if n in runs)
            say(f"block {number} of {len(blocks)}, tokens/s: {speeds}")
    return measured
