"""Kernels for an expert's low-rank deltas: down to the rank, and from the rank to a tile of 32 outputs."""

from __future__ import annotations

from llvmlite import ir

from drafts.native.tiles import OUTPUTS
from drafts.native.vectors import F32, I64, LANES, Emitter, constant

_CHAINS = 4


def padded_rank(rank: int) -> int:
    """The rank in whole vectors."""
    return -(-rank // LANES) * LANES


def emit_project(module: ir.Module, name: str, rank: int) -> None:
    """``name(x, stride, a, count, out)``: ``out[j] = sum_i x[i] a[i][j]``.

    Args:
        module: Where the function goes.
        name: Its name.
        rank: Of ``j``, whole vectors; ``a`` is float16 ``[count, rank]``. The numbers ``x`` are float32 and
            ``stride`` bytes apart; ``count`` is a multiple of 4, so that four sums run side by side.
    """
    e = Emitter(module, name, 5)
    x, stride, a, count, out = e.arguments
    parts = rank // LANES

    def step(index: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
        for chain in range(_CHAINS):
            at = e.b.add(index, I64(chain))
            factor = e.splat(e.load(e.at(x, e.b.mul(at, stride)), F32))
            line = e.at(a, e.b.mul(at, I64(2 * rank)))
            for part in range(parts):
                place = chain * parts + part
                sums[place] = e.fma(factor, e.floats(e.at(line, 2 * LANES * part), "f16"), sums[place])
        return sums

    sums = e.loop(count, _CHAINS, [constant(F32, 0.0)] * (_CHAINS * parts), step)
    for part in range(parts):
        first, second, third, fourth = (sums[chain * parts + part] for chain in range(_CHAINS))
        total = e.b.fadd(e.b.fadd(first, second), e.b.fadd(third, fourth))
        e.store(total, e.at(out, 4 * LANES * part))
    e.b.ret_void()


def emit_delta(module: ir.Module, name: str) -> None:
    """``name(t, b, rank, out)``: ``out[o] += sum_j t[j] b[j][o]`` for the 32 outputs of a tile.

    ``b`` is float16 ``[rank, 32]``, ``t`` and ``out`` float32.
    """
    e = Emitter(module, name, 4)
    t, b, rank, out = e.arguments
    halves = range(OUTPUTS // LANES)

    def step(index: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
        factor = e.splat(e.load(e.at(t, e.b.mul(index, I64(4))), F32))
        line = e.at(b, e.b.mul(index, I64(2 * OUTPUTS)))
        return [e.fma(factor, e.floats(e.at(line, 2 * LANES * half), "f16"), sums[half]) for half in halves]

    start = [e.floats(e.at(out, 4 * LANES * half), "f32") for half in halves]
    for half, value in enumerate(e.loop(rank, 1, start, step)):
        e.store(value, e.at(out, 4 * LANES * half))
    e.b.ret_void()
