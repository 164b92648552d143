"""Products over a tile of 32 outputs, for a fixed number of rows.

A tile holds its weights in the order in which a product reads them, groups of 32 inputs one after the
other, so that a thread reads one stream. A weight is decoded in registers, to the very float32 that the
model's matrix holds, and multiplied into every row at once. Each output of each row is one chain of fused
multiply-adds over ascending inputs, whatever the number of rows: a row's result does not depend on its
neighbours or its place.
"""

from __future__ import annotations

from dataclasses import dataclass

from llvmlite import ir

from drafts.native.vectors import F32, I8, I32, I64, LANES, Emitter, constant, lanes

OUTPUTS = 32
"""Outputs of a tile."""

GROUP = 32
"""Inputs of a group."""

_HALVES = OUTPUTS // LANES


@dataclass(frozen=True, slots=True)
class Format:
    """How a tile stores its weights.

    Attributes:
        name: ``q4``: codes of 4 bits, ``scale * code + shift`` by group; ``q8``: signed codes of 8 bits,
            ``scale * code``; both with float16 scales and shifts. ``f32``, ``f16``: the numbers.
            ``bf16``: the numbers, pairs of inputs side by side. ``q4p``, ``q8p``: codes in another order, see
            :mod:`~drafts.native.matrix_tiles`.
        group_bytes: Bytes of a group of 32 inputs by 32 outputs.
        rounded: The decoded float32 is rounded to bfloat16, as the model's own matrix was.
    """

    name: str
    group_bytes: int
    rounded: bool = False

    @property
    def key(self) -> str:
        """Part of a kernel's name."""
        return self.name + ("r" if self.rounded else "")


_BYTES = {"q4": 512 + 2 * 64, "q8": 1024 + 64, "f32": 4096, "f16": 2048, "bf16": 2048}
FORMATS = {name: Format(name, size) for name, size in _BYTES.items()}
ROUNDED = {name: Format(name, _BYTES[name], rounded=True) for name in ("q4", "q8")}
PAIRED = {name: Format(f"{name}p", _BYTES[name], rounded=True) for name in ("q4", "q8")}
"""The same with codes in the order of matrix registers."""


def emit_tile(module: ir.Module, name: str, fmt: Format, rows: int, wide: bool) -> None:
    """``name(weights, x, out, out_stride, groups, scratch)``; ``scratch`` is not read.

    Args:
        module: Where the function goes.
        name: Its name.
        fmt: Of the weights.
        rows: Rows of ``x``, stored ``[inputs, rows]`` in float32.
        wide: The processor has 32 registers of 16 lanes: both halves of the tile go at once as long as
            their sums fit.
    """
    e = Emitter(module, name, 6)
    if wide and rows <= 12:
        _emit_halves(e, fmt, rows, [0, 1])
    else:
        for half in range(_HALVES):
            _emit_halves(e, fmt, rows, [half])
    e.b.ret_void()


def _emit_halves(e: Emitter, fmt: Format, rows: int, halves: list[int]) -> None:
    weights, x, out, stride, groups, _ = e.arguments
    zero = constant(F32, 0.0)

    def group(_: ir.Value, carried: list[ir.Value]) -> list[ir.Value]:
        at, inputs, *sums = carried
        decode = _Decoder(e, fmt, at, halves)
        for k in range(GROUP):
            values = decode(k)
            for row in range(rows):
                factor = e.splat(e.load(e.at(inputs, 4 * (k * rows + row)), F32))
                for place, value in enumerate(values):
                    index = row * len(halves) + place
                    sums[index] = e.fma(factor, value, sums[index])
        return [e.at(at, fmt.group_bytes), e.at(inputs, 4 * GROUP * rows), *sums]

    start = [weights, x] + [zero] * (rows * len(halves))
    _, _, *sums = e.loop(groups, 1, start, group)
    for row in range(rows):
        line = e.at(out, e.b.mul(I64(row), stride))
        for place, half in enumerate(halves):
            e.store(sums[row * len(halves) + place], e.at(line, 4 * LANES * half))


class _Decoder:
    """Decodes one group, input after input."""

    def __init__(self, e: Emitter, fmt: Format, at: ir.Value, halves: list[int]) -> None:
        self.e, self.fmt, self.at, self.halves = e, fmt, at, halves
        self._next: list[ir.Value] = []
        if fmt.name in ("q4", "q8"):
            behind = 512 if fmt.name == "q4" else 1024
            self._scale = [e.floats(e.at(at, behind + 2 * LANES * half), "f16") for half in halves]
            if fmt.name == "q4":
                self._shift = [e.floats(e.at(at, behind + 64 + 2 * LANES * half), "f16") for half in halves]

    def __call__(self, k: int) -> list[ir.Value]:
        """float32 weights of input ``k``, a vector a half."""
        if self.fmt.name in ("q4", "bf16"):
            if k % 2:
                return self._next
            split = self._nibbles if self.fmt.name == "q4" else self._pairs
            pairs = [split(place, half, k // 2) for place, half in enumerate(self.halves)]
            self._next = [second for _, second in pairs]
            return [first for first, _ in pairs]
        e, b = self.e, self.e.b
        if self.fmt.name == "q8":
            found = []
            for place, half in enumerate(self.halves):
                codes = b.sext(e.load(e.at(self.at, OUTPUTS * k + LANES * half), lanes(I8)), lanes(I32))
                found.append(self._round(b.fmul(b.sitofp(codes, lanes(F32)), self._scale[place])))
            return found
        size = self.fmt.group_bytes // (GROUP * OUTPUTS)
        return [
            e.floats(e.at(self.at, size * (OUTPUTS * k + LANES * half)), self.fmt.name)
            for half in self.halves
        ]

    def _nibbles(self, place: int, half: int, pair: int) -> tuple[ir.Value, ir.Value]:
        e, b = self.e, self.e.b
        codes = b.zext(e.load(e.at(self.at, OUTPUTS * pair + LANES * half), lanes(I8)), lanes(I32))
        both = (b.and_(codes, constant(I32, 15)), b.lshr(codes, constant(I32, 4)))
        first, second = (
            self._round(e.fma(b.sitofp(c, lanes(F32)), self._scale[place], self._shift[place])) for c in both
        )
        return first, second

    def _pairs(self, place: int, half: int, pair: int) -> tuple[ir.Value, ir.Value]:
        e, b = self.e, self.e.b
        bits = e.load(e.at(self.at, 4 * (OUTPUTS * pair + LANES * half)), lanes(I32))
        first = b.shl(bits, constant(I32, 16))
        second = b.and_(bits, constant(I32, 0xFFFF0000 - (1 << 32)))
        return b.bitcast(first, lanes(F32)), b.bitcast(second, lanes(F32))

    def _round(self, value: ir.Value) -> ir.Value:
        return self.e.rounded(value) if self.fmt.rounded else value
