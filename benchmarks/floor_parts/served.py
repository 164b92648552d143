"""Where the compiled pass that is served spends its time, by timing its groups of kernels one at a time.

A compiled pass is one call, which no profiler looks into. So a second compiled function runs one group of its
kernels over all layers: the same kernels, weights, buffers, tables and threads, and the same wait after each
layer. Before every such call a whole pass runs, so that the group finds its weights as cold as in a pass, and
in its buffers the numbers of a pass.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numba
import numpy as np
from numba import types

from drafts.native.calls import call0, integers
from drafts.native.steps import (
    BARRIER,
    HIDDEN,
    INNER,
    PRIVATE,
    PRIVATE_STRIDE,
    PRIVATE_X,
    SHAPE,
    SIZE,
    enter,
    gated,
    multiply,
)
from floor_parts.passes import CONTEXT, filled_cache
from osd.serve import native
from osd.serve import native_entries as entry
from osd.serve.native_attend import attend_all
from osd.serve.native_pass import SHARED_FROM
from osd.serve.target import PassRow

GROUPS = ("around", "qkv", "attention", "attn_out", "gate_up", "down", "output")
"""``around`` is a pass without kernels: its tables, the embedding, the threads that enter and leave."""

REST = "rest"
"""What the groups leave of a pass: norms, sums, waiting; noise can take it a little below 0."""

SHAPES = {"1 token": (1, 1), "4 tokens of one request": (1, 4), "4 requests": (4, 1), "16 requests": (16, 1)}
"""Requests of a pass, and tokens of each."""

_chosen = np.zeros(1, dtype=np.int64)
_QKV, _ATTENTION, _ATTN_OUT, _GATE_UP, _DOWN, _OUTPUT = range(1, 7)


def _compiled(choice: int) -> Any:
    """One group of kernels over all layers, as one thread of the team; ``choice`` is the address of which."""

    @numba.cfunc(types.void(types.CPointer(types.int64)), error_model="numpy", boundscheck=False)
    def run_group(a):  # type: ignore[no-untyped-def]
        thread = enter(a)
        group = integers(choice)[0]
        private = a[PRIVATE] + 4 * thread * a[PRIVATE_STRIDE]
        hidden, wide = a[HIDDEN], a[entry.HEADS] * a[SIZE]
        chunks, stride = a[entry.CHUNK_TABLE], a[entry.OUT_STRIDE]
        x = a[entry.SHARED_X] if a[entry.TOKENS] >= SHARED_FROM else private + 4 * a[PRIVATE_X]
        shapes = a[entry.WEIGHTS] + 8 * entry.WIDTH * a[entry.LAYERS]
        pairs = integers(a[entry.PAIRS])
        if 0 < group < _OUTPUT:
            for layer in range(a[entry.LAYERS]):
                w = integers(a[entry.WEIGHTS] + 8 * entry.WIDTH * layer)
                if group == _QKV:
                    bias, out = w[entry.QKV_BIAS], a[entry.SHARED_QKV]
                    wider = a[entry.QKV_STRIDE]
                    multiply(a, shapes, w[entry.QKV], bias, x, hidden, chunks, out, wider, private, thread)
                elif group == _ATTENTION:
                    attend_all(a, w[entry.HEAD_NORM], pairs[layer], private, thread)
                elif group == _ATTN_OUT:
                    at, tiles, bias = shapes + 8 * SHAPE, w[entry.ATTN_OUT], w[entry.ATTN_OUT_BIAS]
                    into, out = a[entry.SHARED_ATTENDED], a[entry.SHARED_PROJECTED]
                    multiply(a, at, tiles, bias, into, wide, chunks, out, stride, private, thread)
                elif group == _GATE_UP:
                    at, tiles, bias = shapes + 16 * SHAPE, w[entry.GATE_UP], w[entry.GATE_UP_BIAS]
                    gated(a, at, tiles, bias, x, private, chunks, a[entry.SHARED_ACTIVE], thread, 0)
                else:
                    at, tiles, bias = shapes + 24 * SHAPE, w[entry.DOWN], w[entry.DOWN_BIAS]
                    into, out = a[entry.SHARED_ACTIVE], a[entry.SHARED_DOWN]
                    multiply(a, at, tiles, bias, into, a[INNER], chunks, out, stride, private, thread)
                call0(a[BARRIER])
        elif group == _OUTPUT and a[entry.LOGITS] > 0:
            at, tiles, rows = shapes + 32 * SHAPE, a[entry.HEAD_WEIGHTS], a[entry.LOGIT_TABLE]
            out, wider = a[entry.OUT], a[entry.VOCAB_STRIDE]
            multiply(a, at, tiles, 0, x, hidden, rows, out, wider, private, thread)

    return run_group


@contextmanager
def only(group: str, compiled: Any) -> Iterator[None]:
    """Within it, compiled passes run one group of kernels; ``compiled`` is :func:`compiled_groups`'."""
    whole = native.run_pass
    _chosen[0] = GROUPS.index(group)
    native.run_pass = compiled
    try:
        yield
    finally:
        native.run_pass = whole


def compiled_groups() -> Any:
    """The compiled function that :func:`only` puts in the place of the pass; takes seconds to make."""
    made = _compiled(_chosen.ctypes.data)
    return SimpleNamespace(address=made.address, keep=made)


def served_profile(target: Any, rounds: int = 30) -> dict[str, dict[str, Any]] | None:
    """Milliseconds of a compiled pass by group, by shape of pass; ``None`` where passes are not compiled.

    Args:
        target: The target.
        rounds: Readings of every group, in turns, each after a whole pass; their median counts.
    """
    if getattr(target, "native", None) is None:
        return None
    compiled = compiled_groups()
    shapes = {
        name: [PassRow(slot, CONTEXT, [7] * tokens) for slot in range(requests)]
        for name, (requests, tokens) in SHAPES.items()
        if requests * tokens <= target.limit
    }
    return {name: _by_group(target, rows, compiled, rounds) for name, rows in shapes.items()}


def _by_group(target: Any, rows: Sequence[PassRow], compiled: Any, rounds: int) -> dict[str, Any]:
    cache = filled_cache(target, len(rows))
    whole: list[float] = []
    taken: dict[str, list[float]] = {group: [] for group in GROUPS}

    def once() -> float:
        begin = time.perf_counter()
        target.forward(cache, rows)
        return 1e3 * (time.perf_counter() - begin)

    once()
    for number in range(rounds):
        shift = number % len(GROUPS)
        for group in (*GROUPS[shift:], *GROUPS[:shift]):
            whole.append(once())
            with only(group, compiled):
                taken[group].append(once())
    median = {group: statistics.median(ms) for group, ms in taken.items()}
    return {"pass_ms": statistics.median(whole), "groups_ms": shares(median, statistics.median(whole))}


def shares(median: dict[str, float], whole: float) -> dict[str, float]:
    """Each group by itself, ``around`` taken off it, and what they leave of the pass, all in milliseconds."""
    around = median["around"]
    found = {group: ms if group == "around" else ms - around for group, ms in median.items()}
    return {**found, REST: whole - sum(found.values())}
