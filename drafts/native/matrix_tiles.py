"""Products over a tile of 32 outputs with the processor's matrix registers (AMX), for bfloat16 models.

Up to 16 rows cost what one costs, so the time is that of reading and decoding the weights. A tile's weights
are decoded to bfloat16, pairs of inputs side by side as the instruction wants them, and multiplied sixteen
rows by sixteen outputs by 32 inputs at a time, summed in float32.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable

import llvmlite.binding as llvm
from llvmlite import ir

from drafts.native.tiles import GROUP, OUTPUTS, Format
from drafts.native.vectors import F32, I8, I32, I64, LANES, Emitter, constant, lanes

MATRIX_ROWS = (16, 32)
"""Row counts that kernels are made for."""

_SUMS, _WEIGHTS, _INPUTS = 0, 4, 6
"""First register of each use; there are eight."""

_SYSCALL, _REQUEST, _TILE_DATA = 158, 0x1023, 18
"""``arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)`` of Linux on x86-64."""


@functools.cache
def has_matrix_registers() -> bool:
    """Whether bfloat16 matrix registers are there and the system lets this process use them."""
    features = llvm.get_host_cpu_features()
    needed = ("amx-bf16", "amx-tile", "avx512bf16")
    if not sys.platform.startswith("linux") or not all(features.get(name, False) for name in needed):
        return False
    return bool(ctypes.CDLL(None).syscall(_SYSCALL, _REQUEST, _TILE_DATA) == 0)


def scratch_bytes(inputs: int) -> int:
    """Room that a thread needs: for a decoded tile and for sums."""
    return inputs * OUTPUTS * 2 + 4 * LANES * LANES


def emit_matrix_tile(module: ir.Module, name: str, fmt: Format, rows: int) -> None:
    """``name(weights, x, out, out_stride, groups, scratch)``.

    Args:
        module: Where the function goes.
        name: Its name.
        fmt: Of the weights: ``q4p`` and ``q8p`` are decoded, ``bf16`` is read as it is.
        rows: Of ``x``, stored ``[rows, inputs]`` in bfloat16: 16 or 32.
    """
    e = MatrixEmitter(module, name, 6)
    weights, x, out, stride, groups, scratch = e.arguments
    e.configure()
    read = weights
    if fmt.name != "bf16":
        e.loop(groups, 1, [weights, scratch], lambda _, at: e.decode(fmt, *at))
        read = scratch
    if rows == LANES:
        _one_block(e, read, x, out, stride, groups, scratch)
    else:
        _two_blocks(e, read, x, out, stride, groups)
    e.release()
    e.b.ret_void()


def _two_blocks(
    e: MatrixEmitter, weights: ir.Value, x: ir.Value, out: ir.Value, stride: ir.Value, groups: ir.Value
) -> None:
    """32 rows: a sum for each block of 16 and each half, so that none has to wait."""
    line = e.b.mul(groups, I64(2 * GROUP))
    for register in range(4):
        e.zero(_SUMS + register)

    def step(_: ir.Value, at: list[ir.Value]) -> list[ir.Value]:
        for half in range(2):
            e.read(_WEIGHTS + half, e.at(at[0], 4 * LANES * half), I64(4 * OUTPUTS))
        for block in range(2):
            e.read(_INPUTS + block, e.at(at[1], e.b.mul(line, I64(LANES * block))), line)
            for half in range(2):
                e.dot(_SUMS + 2 * block + half, _INPUTS + block, _WEIGHTS + half)
        return [e.at(at[0], GROUP * OUTPUTS * 2), e.at(at[1], 2 * GROUP)]

    e.loop(groups, 1, [weights, x], step)
    for block in range(2):
        into = e.at(out, e.b.mul(stride, I64(LANES * block)))
        for half in range(2):
            e.write(_SUMS + 2 * block + half, e.at(into, 4 * LANES * half), stride)


def _one_block(
    e: MatrixEmitter,
    weights: ir.Value,
    x: ir.Value,
    out: ir.Value,
    stride: ir.Value,
    groups: ir.Value,
    scratch: ir.Value,
) -> None:
    """16 rows: each half has one sum for even groups and one for odd ones."""
    line = e.b.mul(groups, I64(2 * GROUP))
    for register in range(4):
        e.zero(_SUMS + register)

    def step(count: int) -> Callable[[ir.Value, list[ir.Value]], list[ir.Value]]:
        def several(_: ir.Value, at: list[ir.Value]) -> list[ir.Value]:
            for turn in range(count):
                tile = e.at(at[0], GROUP * OUTPUTS * 2 * turn)
                e.read(_INPUTS + turn, e.at(at[1], 2 * GROUP * turn), line)
                for half in range(2):
                    e.read(_WEIGHTS + half, e.at(tile, 4 * LANES * half), I64(4 * OUTPUTS))
                    e.dot(_SUMS + 2 * turn + half, _INPUTS + turn, _WEIGHTS + half)
            return [e.at(at[0], GROUP * OUTPUTS * 2 * count), e.at(at[1], 2 * GROUP * count)]

        return several

    at = e.loop(groups, 2, [weights, x], step(2))
    e.loop(e.b.and_(groups, I64(1)), 1, at, step(1))
    behind = e.at(scratch, e.b.mul(groups, I64(GROUP * OUTPUTS * 2)))
    for half in range(2):
        into = e.at(out, 4 * LANES * half)
        e.write(_SUMS + half, into, stride)
        e.write(_SUMS + 2 + half, behind, I64(4 * LANES))
        for row in range(LANES):
            address = e.at(into, e.b.mul(stride, I64(row)))
            more = e.floats(e.at(behind, 4 * LANES * row), "f32")
            e.store(e.b.fadd(e.floats(address, "f32"), more), address)


class _BFloat(ir.Type):  # type: ignore[misc]  # llvmlite has no annotations
    """LLVM's ``bfloat``, which llvmlite does not name."""

    def _to_string(self) -> str:
        return "bfloat"


class MatrixEmitter(Emitter):
    """Adds the instructions on matrix registers."""

    def configure(self) -> None:
        """All eight registers hold 16 rows of 64 bytes."""
        words = [1, 0] + [0] * 6  # palette 1
        for register in range(8):
            shift = 16 + 2 * register
            words[shift // 8] |= 64 << (8 * (shift % 8))
        words[6] = sum(16 << (8 * register) for register in range(8))
        table = ir.GlobalVariable(self.module, ir.ArrayType(I64, 8), f"{self.function.name}_shape")
        table.initializer = ir.Constant(ir.ArrayType(I64, 8), words)
        table.global_constant = True
        table.align = 64
        self._call("ldtilecfg", [self.b.bitcast(table, I8.as_pointer())])

    def release(self) -> None:
        """Leave the registers."""
        self._call("tilerelease", [])

    def zero(self, register: int) -> None:
        """Clear a register."""
        self._call("tilezero", [I8(register)])

    def read(self, register: int, at: ir.Value, stride: ir.Value) -> None:
        """Load a register from 16 lines ``stride`` bytes apart."""
        self._call("tileloadd64", [I8(register), self.b.inttoptr(at, I8.as_pointer()), stride])

    def write(self, register: int, at: ir.Value, stride: ir.Value) -> None:
        """Store a register to 16 lines ``stride`` bytes apart."""
        self._call("tilestored64", [I8(register), self.b.inttoptr(at, I8.as_pointer()), stride])

    def dot(self, into: int, x: int, weights: int) -> None:
        """``into += x @ weights``."""
        self._call("tdpbf16ps", [I8(into), I8(x), I8(weights)])

    def decode(self, fmt: Format, at: ir.Value, into: ir.Value) -> list[ir.Value]:
        """One group to bfloat16, ``[pairs of inputs, outputs, 2]``; the next addresses.

        The conversion joins two vectors, eight outputs with both inputs each, and codes lie accordingly.
        """
        b = self.b
        small = fmt.name == "q4p"
        behind = 512 if small else 1024
        halves = range(OUTPUTS // LANES)
        every = [self._doubled(self.at(at, behind + 2 * LANES * half)) for half in halves]
        shifting = [
            self._doubled(self.at(at, behind + 64 + 2 * LANES * half)) if small else None for half in halves
        ]
        for line in range(GROUP):
            scales, shifts = every[line % 2], shifting[line % 2]
            if shifts is not None:
                codes = b.zext(self.load(self.at(at, LANES * line), lanes(I8)), lanes(I32))
                both = [b.and_(codes, constant(I32, 15)), b.lshr(codes, constant(I32, 4))]
                numbers = [
                    self.fma(b.sitofp(side, lanes(F32)), scale, shift)
                    for side, scale, shift in zip(both, scales, shifts, strict=True)
                ]
            else:
                numbers = [
                    b.fmul(b.sitofp(b.sext(self.load(address, lanes(I8)), lanes(I32)), lanes(F32)), scale)
                    for address, scale in zip(
                        (self.at(at, 2 * LANES * line), self.at(at, 2 * LANES * line + LANES)),
                        scales,
                        strict=True,
                    )
                ]
            self.store(self._joined(*numbers), self.at(into, 4 * LANES * line))
        return [self.at(at, fmt.group_bytes), self.at(into, GROUP * OUTPUTS * 2)]

    def _doubled(self, address: ir.Value) -> list[ir.Value]:
        """16 float16 as two float32 vectors, every number twice."""
        numbers = self.floats(address, "f16")
        return [
            self.b.shuffle_vector(
                numbers, numbers, ir.Constant(lanes(I32), [first + lane // 2 for lane in range(LANES)])
            )
            for first in (0, LANES // 2)
        ]

    def _joined(self, low: ir.Value, high: ir.Value) -> ir.Value:
        """Both vectors rounded to bfloat16, ``low`` first."""
        name = "llvm.x86.avx512bf16.cvtne2ps2bf16.512"
        found = self.module.globals.get(name)
        if found is None:
            result = ir.VectorType(_BFloat(), 2 * LANES)
            found = ir.Function(self.module, ir.FunctionType(result, [lanes(F32)] * 2), name)
        return self.b.call(found, [high, low])

    def _call(self, name: str, arguments: list[ir.Value]) -> None:
        full = f"llvm.x86.{name}"
        found = self.module.globals.get(full)
        if found is None:
            kind = ir.FunctionType(ir.VoidType(), [argument.type for argument in arguments])
            found = ir.Function(self.module, kind, full)
        self.b.call(found, arguments)
