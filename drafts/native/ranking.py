"""The most probable of many candidates, and their log-probabilities, in two readings of the scores.

A library sorts or copies all of a vocabulary for that: 0.24 ms for 49,152 scores, where a target's pass over
one token takes 4 ms.
"""

from __future__ import annotations

import ctypes
import functools
import math

import numpy as np
from llvmlite import ir
from numpy.typing import NDArray

from drafts.native.machine import compiled
from drafts.native.vectors import F32, I64, LANES, Emitter, constant

BLOCK = 128
"""Scores of which the greatest is noted: the top k of all lie in the k blocks with the greatest ones."""

_VECTORS = BLOCK // LANES


def emit_maxima(module: ir.Module, name: str) -> None:
    """``name(scores, count, maxima)``: the greatest of every block of float32; NaN counts as nothing."""
    e = Emitter(module, name, 3)
    scores, count, maxima = e.arguments

    def greater(x: ir.Value, y: ir.Value) -> ir.Value:
        return e.b.select(e.b.fcmp_ordered(">", x, y), x, y)

    def step(index: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
        line = e.at(scores, e.b.mul(index, I64(4 * BLOCK)))
        best = constant(F32, -math.inf)
        for part in range(_VECTORS):
            best = greater(e.floats(e.at(line, 4 * LANES * part), "f32"), best)
        e.store(e.fold(best, greater), e.at(maxima, e.b.mul(index, I64(4))))
        return []

    e.loop(count, 1, [], step)
    e.b.ret_void()


def emit_mass(module: ir.Module, name: str) -> None:
    """``name(scores, count, top, out)``: ``out = sum exp(scores - top)`` over ``count`` blocks, float32."""
    e = Emitter(module, name, 4)
    scores, count, top, out = e.arguments
    most = e.splat(e.load(top, F32))

    def step(index: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
        line = e.at(scores, e.b.mul(index, I64(4 * BLOCK)))
        for part in range(_VECTORS):
            value = e.b.fsub(e.floats(e.at(line, 4 * LANES * part), "f32"), most)
            sums[part % 2] = e.b.fadd(sums[part % 2], e.exp(value))
        return sums

    first, second = e.loop(count, 1, [constant(F32, 0.0)] * 2, step)
    e.store(e.fold(e.b.fadd(first, second), e.b.fadd), out)
    e.b.ret_void()


class Ranker:
    """Ranks scores in memory, float32 and contiguous; their number is a multiple of :data:`BLOCK`."""

    def __init__(self) -> None:
        def emit(module: ir.Module) -> None:
            emit_maxima(module, "maxima")
            emit_mass(module, "mass")

        found = compiled(emit)
        self._maxima = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 3)(found["maxima"])
        self._mass = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)(found["mass"])

    def top(self, scores: NDArray[np.float32], count: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """The ``count`` greatest of ``scores [V]``, greatest first.

        Returns:
            Their indices and natural log-probabilities under the softmax of all, ``[count]`` each. The latter
            are not finite where one of the scores is not, or is NaN.
        """
        blocks = len(scores) // BLOCK
        numbers = np.empty(blocks + 2, dtype=np.float32)
        begin, into = scores.ctypes.data, numbers.ctypes.data
        self._maxima(begin, blocks, into)
        maxima, ends = numbers[:blocks], numbers[blocks:]
        ends[0] = maxima.max()
        self._mass(begin, blocks, into + 4 * blocks, into + 4 * blocks + 4)
        chosen = np.arange(blocks) if blocks <= count else np.argpartition(maxima, -count)[-count:]
        candidates = scores.reshape(blocks, BLOCK)[chosen].ravel()
        at = np.argpartition(candidates, -count)[-count:]
        at = at[np.argsort(-candidates[at], kind="stable")]
        logprobs = candidates[at] - (ends[0] + np.log(ends[1]))
        return chosen[at // BLOCK] * BLOCK + at % BLOCK, logprobs


@functools.cache
def ranker() -> Ranker | None:
    """One for this process, where the processor's code can be made here."""
    try:
        return Ranker()
    except (OSError, RuntimeError):
        return None
