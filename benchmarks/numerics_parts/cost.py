"""What a pass costs under strict numerics, as a multiple of the same pass under fast ones."""

from __future__ import annotations

import statistics
from functools import partial
from typing import Any

from osd.serve.cache import SlotCache
from osd.serve.embedded import EMBEDDED, embedded_folder, embedded_weights
from osd.serve.load import build_target
from osd.serve.target import PassRow, TargetModel, timed
from router.app.paired import median_interval
from router.config import PolydraftConfig

CONTEXT = 150
"""Committed tokens of every row of a decode step."""

ROWS = (1, 4, 16)
"""Rows of the decode steps that are timed, one token each."""

PROMPT = 256
"""Tokens of the prompt that is timed, read in one pass."""


def strict_beside(fast: TargetModel, config: PolydraftConfig) -> TargetModel:
    """The target that ``target.numerics: strict`` serves, over the weights of a fast one.

    Raises:
        InvalidValueError: The model cannot be served with strict numerics.
    """
    exact = None
    if config.target.model == EMBEDDED:
        exact = embedded_weights(embedded_folder(config.target.cache_dir))
    return build_target(
        fast.reference,
        name=fast.name,
        forward=config.target.forward,
        feature_layers=fast.feature_layers,
        numerics="strict",
        exact=exact,
    )


def computes_by(strict: Any) -> str:
    """What makes a strict target strict: compiled passes, or the name of a library's kernel."""
    return "compiled passes" if strict.forward_kind == "native" else str(strict.kernel.name)


def pass_ratios(fast: TargetModel, strict: TargetModel, rounds: int, seed: int = 0) -> dict[str, Any]:
    """By shape of pass, its milliseconds under both numerics and the ratio of neighbours in time.

    Args:
        fast: The fast target.
        strict: The strict one.
        rounds: Pairs of every shape; all shapes take turns, and who comes first alternates.
        seed: Of the bootstrap.

    Returns:
        Medians ``fast_ms`` and ``strict_ms``, and the pairs' median ``ratio`` with its 95 % interval.
    """
    length = min(PROMPT, fast.max_positions)
    prompt = [PassRow(0, 0, [(7 * at) % fast.vocab_size for at in range(length)], logits_from=length - 1)]
    passes: dict[str, tuple[list[PassRow], dict[str, SlotCache]]] = {}
    for rows in ROWS:
        step = [PassRow(slot, CONTEXT, [7 + slot]) for slot in range(rows)]
        caches = {name: _filled(target, rows) for name, target in (("fast", fast), ("strict", strict))}
        passes[f"decode, {rows} row{'s' * (rows > 1)}"] = (step, caches)
    empty = {name: _cache(target, 1, length + 1) for name, target in (("fast", fast), ("strict", strict))}
    passes[f"prompt of {length} tokens"] = (prompt, empty)
    targets = {"fast": fast, "strict": strict}
    taken: dict[str, dict[str, list[float]]] = {shape: {"fast": [], "strict": []} for shape in passes}
    for number in range(-1, rounds):
        for shape, (batch, caches) in passes.items():
            for name in ("fast", "strict") if number % 2 else ("strict", "fast"):
                ms = 1e3 * timed(partial(targets[name].forward, caches[name], batch), fast.device)
                if number >= 0:
                    taken[shape][name].append(ms)
    found: dict[str, Any] = {}
    for shape, ms_by in taken.items():
        ratios = [s / f for s, f in zip(ms_by["strict"], ms_by["fast"], strict=True)]
        ratio, low, high = median_interval(ratios, seed)
        medians = {f"{name}_ms": statistics.median(ms) for name, ms in ms_by.items()}
        found[shape] = {**medians, "ratio": ratio, "low": low, "high": high, "pairs": rounds}
    return found


def _cache(target: TargetModel, slots: int, room: int) -> SlotCache:
    cache = target.make_cache(slots, room, keep_features=True)
    for _ in range(slots):
        cache.acquire()
    return cache


def _filled(target: TargetModel, slots: int) -> SlotCache:
    cache = _cache(target, slots, CONTEXT + 1)
    for row in range(slots):
        cache.reserve(row, 0, CONTEXT)
        cache.commit(row, CONTEXT)
    return cache
