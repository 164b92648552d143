"""Emits vector code: the few operations that the kernels are made of, over 16 lanes.

LLVM splits 16 lanes into what the processor has: one register with AVX-512, two with AVX2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llvmlite import ir

LANES = 16
"""Lanes of a vector."""

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F16, F32 = ir.HalfType(), ir.FloatType()


def lanes(kind: ir.Type) -> ir.VectorType:
    """The vector type over ``kind``."""
    return ir.VectorType(kind, LANES)


def constant(kind: ir.Type, value: float) -> ir.Constant:
    """The same number in every lane."""
    return ir.Constant(lanes(kind), [value] * LANES)


class Emitter:
    """Emits one function ``void name(int64, ...)`` whose addresses are integers.

    Args:
        module: Where the function goes.
        name: Its name.
        count: Number of arguments.
    """

    def __init__(self, module: ir.Module, name: str, count: int) -> None:
        kind = ir.FunctionType(ir.VoidType(), [I64] * count)
        self.function = ir.Function(module, kind, name)
        self.module = module
        self.b = ir.IRBuilder(self.function.append_basic_block())

    @property
    def arguments(self) -> Sequence[ir.Value]:
        """The int64 arguments."""
        return tuple(self.function.args)

    def at(self, base: ir.Value, offset: int | ir.Value) -> ir.Value:
        """``base + offset`` bytes."""
        if isinstance(offset, int):
            return base if offset == 0 else self.b.add(base, I64(offset))
        return self.b.add(base, offset)

    def load(self, address: ir.Value, kind: ir.Type) -> ir.Value:
        """Read ``kind``, wherever it lies."""
        value = self.b.load(self.b.inttoptr(address, kind.as_pointer()))
        value.align = 1
        return value

    def store(self, value: ir.Value, address: ir.Value) -> None:
        """Write ``value``, wherever it belongs."""
        self.b.store(value, self.b.inttoptr(address, value.type.as_pointer())).align = 1

    def splat(self, value: ir.Value) -> ir.Value:
        """``value`` in every lane."""
        empty = ir.Constant(lanes(value.type), ir.Undefined)
        first = self.b.insert_element(empty, value, I32(0))
        return self.b.shuffle_vector(first, empty, ir.Constant(lanes(I32), [0] * LANES))

    def intrinsic(self, name: str, *values: ir.Value) -> ir.Value:
        """``llvm.<name>`` over float32 vectors."""
        full = f"llvm.{name}.v{LANES}f32"
        found = self.module.globals.get(full)
        if found is None:
            kind = ir.FunctionType(lanes(F32), [lanes(F32)] * len(values))
            found = ir.Function(self.module, kind, full)
        return self.b.call(found, values)

    def fma(self, x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
        """``x * y + z``, rounded once."""
        return self.intrinsic("fma", x, y, z)

    def floats(self, address: ir.Value, kind: str) -> ir.Value:
        """16 numbers stored as ``f32``, ``f16`` or ``bf16``, as float32."""
        if kind == "f32":
            return self.load(address, lanes(F32))
        if kind == "f16":
            return self.b.fpext(self.load(address, lanes(F16)), lanes(F32))
        bits = self.b.zext(self.load(address, lanes(I16)), lanes(I32))
        return self.b.bitcast(self.b.shl(bits, constant(I32, 16)), lanes(F32))

    def rounded(self, value: ir.Value) -> ir.Value:
        """float32 rounded to bfloat16 (nearest, ties to even) and back; not for NaN with a small payload."""
        bits = self.b.bitcast(value, lanes(I32))
        odd = self.b.and_(self.b.lshr(bits, constant(I32, 16)), constant(I32, 1))
        bits = self.b.add(self.b.add(bits, constant(I32, 0x7FFF)), odd)
        return self.b.bitcast(self.b.and_(bits, constant(I32, 0xFFFF0000 - (1 << 32))), lanes(F32))

    def exp(self, x: ir.Value) -> ir.Value:
        """``e ** x`` to about two units in the last place, 0 below -87.3; NaN stays NaN.

        Range reduction by ln 2 in two parts and a polynomial of degree six (Cephes ``expf``).
        """
        b = self.b
        vanishing = b.fcmp_ordered("<", x, constant(F32, -87.3))
        x = b.select(vanishing, constant(F32, -87.3), x)
        x = b.select(b.fcmp_ordered(">", x, constant(F32, 88.3)), constant(F32, 88.3), x)
        steps = self.intrinsic("rint", b.fmul(x, constant(F32, 1.4426950408889634)))
        x = self.fma(steps, constant(F32, -0.693359375), x)
        x = self.fma(steps, constant(F32, 2.12194440e-4), x)
        y = constant(F32, 1.9875691500e-4)
        for factor in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
            y = self.fma(y, x, constant(F32, factor))
        y = b.fadd(self.fma(y, b.fmul(x, x), x), constant(F32, 1.0))
        power = b.shl(b.add(b.fptosi(steps, lanes(I32)), constant(I32, 127)), constant(I32, 23))
        return b.select(vanishing, constant(F32, 0.0), b.fmul(y, b.bitcast(power, lanes(F32))))

    def loop(
        self,
        count: ir.Value,
        step: int,
        start: Sequence[ir.Value],
        body: Callable[[ir.Value, list[ir.Value]], Sequence[ir.Value]],
    ) -> list[ir.Value]:
        """``for i in range(0, count, step)``, while a whole step is left, carrying values.

        Args:
            count: End, int64.
            step: Of the index.
            start: What is carried into the first round.
            body: From the index and what is carried to what is carried on.

        Returns:
            What is carried out. The builder goes on behind the loop.
        """
        b = self.b
        before = b.block
        head = self.function.append_basic_block("head")
        inside = self.function.append_basic_block("inside")
        behind = self.function.append_basic_block("behind")
        b.branch(head)
        b.position_at_end(head)
        index = b.phi(I64)
        index.add_incoming(I64(0), before)
        carried = [b.phi(value.type) for value in start]
        for phi, value in zip(carried, start, strict=True):
            phi.add_incoming(value, before)
        following = b.add(index, I64(step))
        b.cbranch(b.icmp_signed("<=", following, count), inside, behind)
        b.position_at_end(inside)
        results = body(index, list(carried))
        end = b.block
        index.add_incoming(following, end)
        for phi, value in zip(carried, results, strict=True):
            phi.add_incoming(value, end)
        b.branch(head)
        b.position_at_end(behind)
        return list(carried)

    def fold(self, vector: ir.Value, join: Callable[[ir.Value, ir.Value], ir.Value]) -> ir.Value:
        """All lanes joined into one number."""
        width = LANES // 2
        while width:
            turned = [(lane + width) % LANES for lane in range(LANES)]
            vector = join(vector, self.b.shuffle_vector(vector, vector, ir.Constant(lanes(I32), turned)))
            width //= 2
        return self.b.extract_element(vector, I32(0))
