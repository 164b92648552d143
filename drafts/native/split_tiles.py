"""float32 products with the processor's bfloat16 matrix registers (AMX), for weights that are small codes.

A code of four or eight bits is a bfloat16 exactly, and a float32 is the sum of three bfloat16 exactly (8 bits
of its 24 each). So the products of codes and parts are exact, they are summed in float32, and what a group of
32 inputs sums to is scaled in float32: as accurate as float32 products, for many rows several times faster.

Of a group, ``sum x (scale code + shift) = scale sum x (code - 8) + (shift + 8 scale) sum x``.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass

from llvmlite import ir

from drafts.native.matrix_tiles import MatrixEmitter
from drafts.native.tiles import GROUP, OUTPUTS, Format
from drafts.native.vectors import F32, I8, I16, I32, I64, LANES, Emitter, constant, lanes

PARTS = 3
"""bfloat16 numbers that make up a float32."""

SPLIT_ROWS = (16, 32, 48, 64)
"""Row counts that kernels are made for."""

LINE_BYTES = 2 * GROUP
PART_BYTES = LINE_BYTES * LANES
GROUP_BYTES = PART_BYTES * PARTS
"""Of a row's group in one part, of 16 rows' group in one part, and in all three."""

INPUT_BYTES = 8
"""Of an input of a row: three parts, and its share of a group's sum, with room to spare."""

_CENTRE = 8
_WORDS = 2 * LANES
_HALVES = OUTPUTS // LANES
_BLOCK = 4 * LANES * LANES
_SUMS, _WEIGHTS, _INPUTS = 0, 4, 6
"""First matrix register of each use."""


def splittable(fmt: Format) -> bool:
    """Whether products of this format can be run here; for float32 models."""
    return fmt.name in ("q4", "q8") and not fmt.rounded


def split_scratch_bytes(inputs: int) -> int:
    """Room that a thread needs: for a decoded tile, for two groups' sums, and for those of all rows."""
    return inputs * OUTPUTS * 2 + 2 * _HALVES * _BLOCK + 4 * OUTPUTS * SPLIT_ROWS[-1]


def emit_split(module: ir.Module, name: str) -> None:
    """``name(numbers, out, count, sums)``: a row's inputs as a split product wants them.

    ``count`` float32 numbers, whole groups, become three bfloat16 parts and one sum a group.
    """
    e = Emitter(module, name, 4)
    numbers, out, count, sums = e.arguments

    def group(index: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
        total = constant(F32, 0.0)
        for half in range(GROUP // LANES):
            place = e.b.add(index, I64(LANES * half))
            left = e.floats(e.at(numbers, e.b.mul(place, I64(4))), "f32")
            total = e.b.fadd(total, left)
            into = e.at(e.at(out, e.b.mul(index, I64(GROUP_BYTES // GROUP))), 2 * LANES * half)
            for part in range(PARTS):
                rounded = e.rounded(left)
                bits = e.b.lshr(e.b.bitcast(rounded, lanes(I32)), constant(I32, 16))
                e.store(e.b.trunc(bits, lanes(I16)), e.at(into, PART_BYTES * part))
                left = e.b.fsub(left, rounded)
        e.store(e.fold(total, e.b.fadd), e.at(sums, e.b.lshr(index, I64(3))))
        return []

    e.loop(count, GROUP, [], group)
    e.b.ret_void()


def emit_split_tile(module: ir.Module, name: str, fmt: Format, rows: int) -> None:
    """``name(weights, x, out, out_stride, groups, scratch)``.

    Args:
        module: Where the function goes.
        name: Its name.
        fmt: Of the weights: ``q4`` or ``q8``.
        rows: Of ``x``, whole blocks of 16: bfloat16 ``[blocks, groups, parts, 16, 32]``, then float32 sums
            ``[rows, groups]``.
    """
    e = _Split(module, name, 6)
    weights, x, out, stride, groups, scratch = e.arguments
    e.configure()
    e.loop(groups, 1, [weights, scratch], lambda _, at: e.codes(fmt, *at))
    room = e.at(scratch, e.b.mul(groups, I64(GROUP * OUTPUTS * 2)))
    totals = e.at(room, 2 * _HALVES * _BLOCK)

    def clear(index: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
        e.store(constant(F32, 0.0), e.at(totals, e.b.mul(index, I64(4 * LANES))))
        return []

    e.loop(I64(rows * _HALVES), 1, [], clear)
    sums = e.at(x, e.b.mul(groups, I64(GROUP_BYTES * rows // LANES)))
    operands = _Operands(x, sums, groups, room, totals)

    def several(at: list[ir.Value]) -> list[ir.Value]:
        tile, codes, place = at
        factors = [e.scales(fmt, tile, half) for half in range(_HALVES)]
        for half in range(_HALVES):
            e.read(_WEIGHTS + half, e.at(codes, 4 * LANES * half), I64(4 * OUTPUTS))

        def blocks(count: int, first: int) -> Callable[[ir.Value, list[ir.Value]], list[ir.Value]]:
            def step(index: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
                _block(e, operands, count, e.b.add(index, I64(first)), place, factors)
                return []

            return step

        pairs = rows // (2 * LANES) * 2 * LANES
        e.loop(I64(pairs), 2 * LANES, [], blocks(2, 0))
        e.loop(I64(rows - pairs), LANES, [], blocks(1, pairs))
        return [e.at(tile, fmt.group_bytes), e.at(codes, GROUP * OUTPUTS * 2), e.b.add(place, I64(1))]

    e.loop(groups, 1, [weights, scratch, I64(0)], lambda _, at: several(at))
    e.release()

    def hand_out(index: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
        source, into = e.at(totals, e.b.mul(index, I64(4 * OUTPUTS))), e.at(out, e.b.mul(stride, index))
        for half in range(_HALVES):
            e.store(e.floats(e.at(source, 4 * LANES * half), "f32"), e.at(into, 4 * LANES * half))
        return []

    e.loop(I64(rows), 1, [], hand_out)
    e.b.ret_void()


@dataclass(frozen=True)
class _Operands:
    """Addresses of inputs and their sums; groups; addresses of what is in work."""

    x: ir.Value
    sums: ir.Value
    groups: ir.Value
    room: ir.Value
    totals: ir.Value


def _block(
    e: _Split,
    o: _Operands,
    count: int,
    row: ir.Value,
    group: ir.Value,
    factors: list[tuple[ir.Value, ir.Value | None]],
) -> None:
    """A group of ``count`` blocks of 16 rows; two blocks have four sums, so that none waits for itself."""
    wide = e.b.mul(o.groups, I64(GROUP_BYTES))
    blocks = e.b.mul(e.b.lshr(row, I64(4)), wide)
    inputs = e.at(e.at(o.x, blocks), e.b.mul(group, I64(GROUP_BYTES)))
    for index in range(_HALVES * count):
        e.zero(_SUMS + index)
    for part in range(PARTS):
        for turn in range(count):
            at = e.at(e.at(inputs, e.b.mul(wide, I64(turn))), PART_BYTES * part)
            e.read(_INPUTS + turn, at, I64(LINE_BYTES))
            for half in range(_HALVES):
                e.dot(_SUMS + _HALVES * turn + half, _INPUTS + turn, _WEIGHTS + half)
    for index in range(_HALVES * count):
        e.write(_SUMS + index, e.at(o.room, _BLOCK * index), I64(4 * LANES))
    across = e.b.mul(o.groups, I64(4))
    shares = e.at(e.at(o.sums, e.b.mul(across, row)), e.b.mul(group, I64(4)))
    into = e.at(o.totals, e.b.mul(row, I64(4 * OUTPUTS)))
    for line in range(LANES * count):
        share = e.splat(e.load(e.at(shares, e.b.mul(across, I64(line))), F32))
        for half, (scale, shift) in enumerate(factors):
            block = _HALVES * (line // LANES) + half
            place = e.at(into, 4 * (OUTPUTS * line + LANES * half))
            found = e.floats(e.at(o.room, _BLOCK * block + 4 * LANES * (line % LANES)), "f32")
            total = e.fma(found, scale, e.floats(place, "f32"))
            e.store(total if shift is None else e.fma(share, shift, total), place)


class _Split(MatrixEmitter):
    """Codes as bfloat16, and their scales."""

    def codes(self, fmt: Format, at: ir.Value, into: ir.Value) -> list[ir.Value]:
        """One group's codes, ``[pairs of inputs, outputs, 2]`` in bfloat16; the next addresses."""
        for pair in range(GROUP // 2):
            for half in range(OUTPUTS // LANES):
                both = self._small(at, pair, half) if fmt.name == "q4" else self._large(at, pair, half)
                self.store(both, self.at(into, 4 * (OUTPUTS * pair + LANES * half)))
        return [self.at(at, fmt.group_bytes), self.at(into, GROUP * OUTPUTS * 2)]

    def _small(self, at: ir.Value, pair: int, half: int) -> ir.Value:
        """Two codes of four bits an output, less 8, looked up."""
        b = self.b
        codes = b.zext(self.load(self.at(at, OUTPUTS * pair + LANES * half), lanes(I8)), lanes(I32))
        spread = b.and_(b.or_(codes, b.shl(codes, constant(I32, 12))), constant(I32, 0x000F000F))
        words = ir.VectorType(I16, _WORDS)
        table = ir.Constant(words, [_bfloat16(code % 16 - _CENTRE) for code in range(_WORDS)])
        name = "llvm.x86.avx512.permvar.hi.512"
        found = self.module.globals.get(name)
        if found is None:
            found = ir.Function(self.module, ir.FunctionType(words, [words, words]), name)
        return b.bitcast(b.call(found, [table, b.bitcast(spread, words)]), lanes(I32))

    def _large(self, at: ir.Value, pair: int, half: int) -> ir.Value:
        """Two codes of eight bits an output: small integers, whose float32 end in sixteen zeros."""
        b = self.b
        low, high = (
            b.bitcast(
                b.sitofp(
                    b.sext(
                        self.load(self.at(at, OUTPUTS * (2 * pair + turn) + LANES * half), lanes(I8)),
                        lanes(I32),
                    ),
                    lanes(F32),
                ),
                lanes(I32),
            )
            for turn in range(2)
        )
        return b.or_(b.lshr(low, constant(I32, 16)), high)

    def scales(self, fmt: Format, at: ir.Value, half: int) -> tuple[ir.Value, ir.Value | None]:
        """What a group's sums are multiplied with, and what its sum of inputs is."""
        behind = 512 if fmt.name == "q4" else 1024
        scale = self.floats(self.at(at, behind + 2 * LANES * half), "f16")
        if fmt.name == "q8":
            return scale, None
        shift = self.floats(self.at(at, behind + 64 + 2 * LANES * half), "f16")
        return scale, self.fma(scale, constant(F32, float(_CENTRE)), shift)


def _bfloat16(value: int) -> int:
    """The bits of a small integer."""
    return int(struct.unpack("<I", struct.pack("<f", float(value)))[0] >> 16)
