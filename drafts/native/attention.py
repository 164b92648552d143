"""Kernels of attention for single queries, and the elementwise ones of a layer."""

from __future__ import annotations

from llvmlite import ir

from drafts.native.vectors import F16, F32, I16, I32, I64, LANES, Emitter, constant, lanes

SIZES = {"f32": 4, "bf16": 2, "f16": 2}
"""Bytes of a number by kind."""

_SUMS = 24


def emit_scores(module: ir.Module, name: str, size: int, kind: str) -> None:
    """``name(query, keys, count, out)``: ``out[i] = query . keys[i]``.

    Args:
        module: Where the function goes.
        name: Its name.
        size: Numbers of a key, a multiple of 16; keys lie one after the other.
        kind: Of the keys, see :meth:`Emitter.floats`; the query is float32.
    """
    e = Emitter(module, name, 4)
    query, keys, count, out = e.arguments
    parts = [e.floats(e.at(query, 4 * LANES * part), "f32") for part in range(size // LANES)]
    line = size * SIZES[kind]

    def products(at: ir.Value) -> ir.Value:
        sums = e.b.fmul(parts[0], e.floats(at, kind))
        for part in range(1, len(parts)):
            sums = e.fma(parts[part], e.floats(e.at(at, SIZES[kind] * LANES * part), kind), sums)
        return sums

    def block(index: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
        base = e.at(keys, e.b.mul(index, I64(line)))
        found = [products(e.at(base, line * place)) for place in range(LANES)]
        e.store(_sums_of(e, found), e.at(out, e.b.mul(index, I64(4))))
        return []

    e.loop(count, LANES, [], block)
    whole = e.b.and_(count, I64(-LANES))
    rest = e.b.sub(count, whole)

    def single(index: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
        place = e.b.add(whole, index)
        found = products(e.at(keys, e.b.mul(place, I64(line))))
        total = _sums_of(e, [found] * LANES)
        e.store(e.b.extract_element(total, I32(0)), e.at(out, e.b.mul(place, I64(4))))
        return []

    e.loop(rest, 1, [], single)
    e.b.ret_void()


def _sums_of(e: Emitter, vectors: list[ir.Value]) -> ir.Value:
    """The sum of each of 16 vectors, in their order; always added in the same order."""
    width = LANES
    while len(vectors) > 1:
        half = width // 2
        # Lanes in runs of `half`: even runs of both, then odd runs of both.
        runs = [lane for lane in range(2 * LANES) if (lane // half) % 2 == 0]
        odd = [lane + half for lane in runs]
        merged = []
        count = len(vectors) // 2
        for first, second in zip(vectors[:count], vectors[count:], strict=True):
            a = e.b.shuffle_vector(first, second, ir.Constant(lanes(I32), runs))
            b = e.b.shuffle_vector(first, second, ir.Constant(lanes(I32), odd))
            merged.append(e.b.fadd(a, b))
        vectors, width = merged, half
    return e.b.shuffle_vector(vectors[0], vectors[0], ir.Constant(lanes(I32), _order()))


def _order() -> list[int]:
    """Where :func:`_sums_of` leaves the sum of each vector, found by following labels."""
    vectors: list[list[int]] = [[index] * LANES for index in range(LANES)]
    width = LANES
    while len(vectors) > 1:
        half, count = width // 2, len(vectors) // 2
        runs = [lane for lane in range(2 * LANES) if (lane // half) % 2 == 0]
        vectors = [
            [(a + b)[lane] for lane in runs] for a, b in zip(vectors[:count], vectors[count:], strict=True)
        ]
        width = half
    return [vectors[0].index(index) for index in range(LANES)]


def queries_at_once(share: int, size: int) -> int:
    """How many of ``share`` queries :func:`emit_values` can sum side by side."""
    most = max(1, _SUMS // (size // LANES))
    return max(count for count in range(1, min(share, most) + 1) if share % count == 0)


def emit_values(module: ir.Module, name: str, queries: int, size: int, kind: str, more: bool = False) -> None:
    """``name(weights, stride, values, count, out)``: ``out[q] = sum_i weights[q][i] values[i]``.

    Values are added one after the other, so a sum may be cut anywhere and go on with ``more``.

    Args:
        module: Where the function goes.
        name: Its name.
        queries: Number of ``q``; their weights lie ``stride`` bytes apart, the outputs side by side.
        size: Numbers of a value, a multiple of 16; values lie one after the other.
        kind: Of the values; weights and outputs are float32.
        more: Adds to what ``out`` holds.
    """
    e = Emitter(module, name, 5)
    weights, stride, values, count, out = e.arguments
    parts = size // LANES
    lines = [e.at(weights, e.b.mul(I64(q), stride)) for q in range(queries)]

    def add(index: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
        base = e.at(values, e.b.mul(index, I64(size * SIZES[kind])))
        place = e.b.mul(index, I64(4))
        found = [e.floats(e.at(base, SIZES[kind] * LANES * part), kind) for part in range(parts)]
        for q in range(queries):
            factor = e.splat(e.load(e.at(lines[q], place), F32))
            for part in range(parts):
                sums[q * parts + part] = e.fma(factor, found[part], sums[q * parts + part])
        return sums

    places = range(queries * parts)
    start = [e.floats(e.at(out, 4 * LANES * i), "f32") if more else constant(F32, 0.0) for i in places]
    sums = e.loop(count, 1, start, add)
    for index, value in enumerate(sums):
        e.store(value, e.at(out, 4 * LANES * index))
    e.b.ret_void()


def emit_softmax(module: ir.Module, name: str) -> None:
    """``name(scores, count)``: in place; up to 15 numbers behind ``count`` are overwritten."""
    e = Emitter(module, name, 2)
    scores, count = e.arguments
    rounds = e.b.and_(e.b.add(count, I64(LANES - 1)), I64(-LANES))
    lowest = F32(float("-inf"))

    def blank(index: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
        e.store(lowest, e.at(scores, e.b.mul(e.b.add(count, index), I64(4))))
        return []

    e.loop(e.b.sub(rounds, count), 1, [], blank)

    def place(index: ir.Value) -> ir.Value:
        return e.at(scores, e.b.mul(index, I64(4)))

    def highest(index: ir.Value, carried: list[ir.Value]) -> list[ir.Value]:
        value = e.floats(place(index), "f32")
        return [e.b.select(e.b.fcmp_ordered(">", value, carried[0]), value, carried[0])]

    (most,) = e.loop(rounds, LANES, [constant(F32, float("-inf"))], highest)
    top = e.splat(e.fold(most, lambda a, b: e.b.select(e.b.fcmp_ordered(">", a, b), a, b)))

    def raised(index: ir.Value, carried: list[ir.Value]) -> list[ir.Value]:
        value = e.exp(e.b.fsub(e.floats(place(index), "f32"), top))
        e.store(value, place(index))
        return [e.b.fadd(carried[0], value)]

    (total,) = e.loop(rounds, LANES, [constant(F32, 0.0)], raised)
    factor = e.splat(e.b.fdiv(F32(1.0), e.fold(total, e.b.fadd)))

    def scaled(index: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
        e.store(e.b.fmul(e.floats(place(index), "f32"), factor), place(index))
        return []

    e.loop(rounds, LANES, [], scaled)
    e.b.ret_void()


def emit_gate(module: ir.Module, name: str, rounded: bool) -> None:
    """``name(gate, up, count)``: ``gate = silu(gate) * up`` in place, ``count`` a multiple of 16.

    Args:
        module: Where the function goes.
        name: Its name.
        rounded: Gate, up and every result are rounded to bfloat16.
    """
    e = Emitter(module, name, 3)
    gate, up, count = e.arguments
    fit = e.rounded if rounded else lambda value: value

    def step(index: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
        offset = e.b.mul(index, I64(4))
        g, u = (fit(e.floats(e.at(side, offset), "f32")) for side in (gate, up))
        grown = e.exp(e.b.fneg(g))
        active = fit(e.b.fdiv(g, e.b.fadd(constant(F32, 1.0), grown)))
        e.store(fit(e.b.fmul(active, u)), e.at(gate, offset))
        return []

    e.loop(count, LANES, [], step)
    e.b.ret_void()


def emit_round(module: ir.Module, name: str) -> None:
    """``name(numbers, count)``: rounds to bfloat16 in place, ``count`` a multiple of 16."""
    e = Emitter(module, name, 2)
    numbers, count = e.arguments

    def step(index: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
        at = e.at(numbers, e.b.mul(index, I64(4)))
        e.store(e.rounded(e.floats(at, "f32")), at)
        return []

    e.loop(count, LANES, [], step)
    e.b.ret_void()


def emit_store(module: ir.Module, name: str, kind: str) -> None:
    """``name(numbers, out, count)``: float32 to ``kind``, ``count`` a multiple of 16.

    bfloat16 takes the upper half of numbers that are already rounded.
    """
    e = Emitter(module, name, 3)
    numbers, out, count = e.arguments

    def step(index: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
        value = e.floats(e.at(numbers, e.b.mul(index, I64(4))), "f32")
        if kind == "bf16":
            bits = e.b.lshr(e.b.bitcast(value, lanes(I32)), constant(I32, 16))
            value = e.b.trunc(bits, lanes(I16))
        elif kind == "f16":
            value = e.b.fptrunc(value, lanes(F16))
        e.store(value, e.at(out, e.b.mul(index, I64(SIZES[kind]))))
        return []

    e.loop(count, LANES, [], step)
    e.b.ret_void()
