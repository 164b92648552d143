"""Attention of sixteen neighbouring tokens at once in matrix registers (AMX), for prompts of bfloat16 models.

Scores are computed as keys times queries, so that a vector holds one key's scores for all sixteen tokens:
the softmax then needs no sums across lanes, and weights of two neighbouring keys lie as the registers want
them for the product with the values, which are read transposed.
"""

from __future__ import annotations

from llvmlite import ir

from drafts.native.matrix_tiles import MatrixEmitter
from drafts.native.vectors import F32, I32, I64, LANES, Emitter, constant, lanes

TOKENS = 16
"""Tokens of a block."""

KEYS = 32
"""Keys of a round: counts are padded to it."""

_SUMS, _QUERIES, _READ = 0, 4, 7
"""First matrix register of each use: sums, the queries or the weights, what is read beside them."""

_LINE = 4 * LANES


def block_fits(size: int) -> bool:
    """Whether heads of this size can be attended by :func:`emit_attend`: its queries stay in registers."""
    return size in (32, 64, 96)


def block_scratch_bytes(size: int, keys: int) -> int:
    """Room that a block needs for queries, scores, weights and sums over so many keys."""
    padded = -(-keys // KEYS) * KEYS
    return 2 * size * TOKENS + padded * (_LINE + _LINE // 2) + 4 * size * TOKENS


def emit_attend(module: ir.Module, name: str, size: int) -> None:
    """``name(queries, keys, values, count, scratch, out, scaling, stride)``: 16 tokens' attention in a head.

    The block's first token sees ``count - 15`` keys, each further one a key more. Weights are rounded to
    bfloat16, sums are float32.

    Args:
        module: Where the function goes.
        name: Its name.
        size: Numbers of a head, see :func:`block_fits`.

    The function reads bfloat16 queries ``[16, size]``, keys ``[., size]`` (up to 31 behind the last, whose
    scores are ignored), values transposed ``[size, stride]`` with zeros up to the padded count, and the bits
    of the float32 ``scaling``. ``out`` is float32 ``[16, size]``.
    """
    e = MatrixEmitter(module, name, 8)
    queries, keys, values, count, scratch, out, scaling, stride = e.arguments
    parts = size // 32
    turned = scratch
    scores = e.at(turned, 2 * size * TOKENS)
    padded = e.b.and_(e.b.add(count, I64(KEYS - 1)), I64(-KEYS))
    weights = e.at(scores, e.b.mul(padded, I64(_LINE)))
    sums = e.at(weights, e.b.mul(padded, I64(_LINE // 2)))
    e.configure()
    _turn_queries(e, queries, turned, size)
    for part in range(parts):
        e.read(_QUERIES + part, e.at(turned, 1024 * part), I64(_LINE))

    def score(index: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
        at = e.at(keys, e.b.mul(index, I64(2 * size)))
        into = e.at(scores, e.b.mul(index, I64(_LINE)))
        for half in range(2):
            e.zero(_SUMS + half)
            for part in range(parts):
                e.read(_READ, e.at(at, 2 * size * LANES * half + 64 * part), I64(2 * size))
                e.dot(_SUMS + half, _READ, _QUERIES + part)
            e.write(_SUMS + half, e.at(into, _LINE * LANES * half), I64(_LINE))
        return []

    e.loop(padded, KEYS, [], score)
    factor = _softmax(e, scores, weights, count, padded, scaling)
    for first in range(0, size // LANES, 4):
        blocks = range(first, min(first + 4, size // LANES))
        _sum_values(e, blocks, values, weights, padded, stride, sums)
    e.release()
    for block in range(size // LANES):
        at = e.at(sums, _LINE * LANES * block)
        columns = [e.b.fmul(e.floats(e.at(at, _LINE * line), "f32"), factor) for line in range(LANES)]
        for token, row in enumerate(transposed(e, columns)):
            e.store(row, e.at(out, 4 * (size * token + LANES * block)))
    e.b.ret_void()


def _turn_queries(e: MatrixEmitter, queries: ir.Value, turned: ir.Value, size: int) -> None:
    """``[16, size]`` to ``[pairs of numbers, 16, 2]``."""
    for part in range(size // 32):
        rows = [e.load(e.at(queries, 2 * size * token + 64 * part), lanes(I32)) for token in range(TOKENS)]
        for pair, line in enumerate(transposed(e, rows)):
            e.store(line, e.at(turned, 1024 * part + _LINE * pair))


def _softmax(
    e: Emitter,
    scores: ir.Value,
    weights: ir.Value,
    count: ir.Value,
    padded: ir.Value,
    scaling: ir.Value,
) -> ir.Value:
    """Weights of pairs of keys, not yet divided by their sums; one over the sums by token."""
    b = e.b
    scale = e.splat(b.bitcast(b.trunc(scaling, I32), F32))
    order = ir.Constant(lanes(I32), list(range(LANES)))
    last = b.add(e.splat(b.trunc(b.sub(count, I64(TOKENS)), I32)), order)
    lowest = constant(F32, float("-inf"))

    def highest(index: ir.Value, carried: list[ir.Value]) -> list[ir.Value]:
        at = e.at(scores, b.mul(index, I64(_LINE)))
        seen = b.icmp_signed("<=", e.splat(b.trunc(index, I32)), last)
        value = b.select(seen, b.fmul(e.floats(at, "f32"), scale), lowest)
        e.store(value, at)
        return [b.select(b.fcmp_ordered(">", value, carried[0]), value, carried[0])]

    (top,) = e.loop(padded, 1, [lowest], highest)

    def raised(index: ir.Value, carried: list[ir.Value]) -> list[ir.Value]:
        at = e.at(scores, b.mul(index, I64(_LINE)))
        even, odd = (e.exp(b.fsub(e.floats(e.at(at, _LINE * side), "f32"), top)) for side in range(2))
        low = b.lshr(b.bitcast(e.rounded(even), lanes(I32)), constant(I32, 16))
        both = b.or_(low, b.bitcast(e.rounded(odd), lanes(I32)))
        e.store(both, e.at(weights, b.mul(index, I64(_LINE // 2))))
        return [b.fadd(carried[0], b.fadd(even, odd))]

    (total,) = e.loop(padded, 2, [constant(F32, 0.0)], raised)
    return b.fdiv(constant(F32, 1.0), total)


def _sum_values(
    e: MatrixEmitter,
    blocks: range,
    values: ir.Value,
    weights: ir.Value,
    padded: ir.Value,
    stride: ir.Value,
    sums: ir.Value,
) -> None:
    """16 numbers of every token's result at a time, numbers by tokens."""
    wide = e.b.mul(stride, I64(2))
    for turn in range(len(blocks)):
        e.zero(_SUMS + turn)

    def add(index: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
        e.read(_QUERIES, e.at(weights, e.b.mul(index, I64(_LINE // 2))), I64(_LINE))
        for turn, block in enumerate(blocks):
            line = e.at(values, e.b.mul(wide, I64(LANES * block)))
            e.read(_READ - turn % 2, e.at(line, e.b.mul(index, I64(2))), wide)
            e.dot(_SUMS + turn, _READ - turn % 2, _QUERIES)
        return []

    e.loop(padded, KEYS, [], add)
    for turn, block in enumerate(blocks):
        e.write(_SUMS + turn, e.at(sums, _LINE * LANES * block), I64(_LINE))


def transposed(e: Emitter, rows: list[ir.Value]) -> list[ir.Value]:
    """16 vectors of 16 lanes, turned: lane ``i`` of result ``j`` is lane ``j`` of row ``i``."""
    for width in (8, 4, 2, 1):
        low = [lane if not lane & width else LANES + lane - width for lane in range(LANES)]
        high = [lane + width if not lane & width else LANES + lane for lane in range(LANES)]
        found = list(rows)
        for first in range(LANES):
            if not first & width:
                pair = rows[first], rows[first + width]
                found[first] = e.b.shuffle_vector(*pair, ir.Constant(lanes(I32), low))
                found[first + width] = e.b.shuffle_vector(*pair, ir.Constant(lanes(I32), high))
        rows = found
    return rows
