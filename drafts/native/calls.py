"""What numba needs to read memory by address and to call compiled kernels."""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

_I64 = ir.IntType(64)


def _pointer(kind):
    @intrinsic
    def cast(typingctx, address):
        def generate(context, builder, signature, args):
            return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

        return types.CPointer(kind)(types.int64), generate

    return cast


floats = _pointer(types.float32)
"""``float *`` at an address."""
halves = _pointer(types.uint16)
"""``uint16_t *`` at an address."""
integers = _pointer(types.int64)
"""``int64_t *`` at an address."""
flags = _pointer(types.uint8)
"""``uint8_t *`` at an address."""


def _call(builder, address, args, result):
    kind = ir.FunctionType(result, [_I64] * len(args))
    return builder.call(builder.inttoptr(address, kind.as_pointer()), args)


@intrinsic
def call0(typingctx, address):
    """Call ``void f(void)``."""

    def generate(context, builder, signature, args):
        _call(builder, args[0], [], ir.VoidType())
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic
def call0_int(typingctx, address):
    """Call ``int f(void)``."""

    def generate(context, builder, signature, args):
        found = _call(builder, args[0], [], ir.IntType(32))
        return builder.sext(found, _I64)

    return types.int64(types.int64), generate


@intrinsic
def call2(typingctx, address, a, b):
    """Call ``void f(int64, int64)``."""

    def generate(context, builder, signature, args):
        _call(builder, args[0], args[1:], ir.VoidType())
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), generate


@intrinsic
def call3(typingctx, address, a, b, c):
    """Call ``void f(int64, ...)`` with three."""

    def generate(context, builder, signature, args):
        _call(builder, args[0], args[1:], ir.VoidType())
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


@intrinsic
def call4(typingctx, address, a, b, c, d):
    """Call ``void f(int64, ...)`` with four."""

    def generate(context, builder, signature, args):
        _call(builder, args[0], args[1:], ir.VoidType())
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), generate


@intrinsic
def call5(typingctx, address, a, b, c, d, e):
    """Call ``void f(int64, ...)`` with five."""

    def generate(context, builder, signature, args):
        _call(builder, args[0], args[1:], ir.VoidType())
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6), generate


@intrinsic
def call6(typingctx, address, a, b, c, d, e, f):
    """Call ``void f(int64, ...)`` with six."""

    def generate(context, builder, signature, args):
        _call(builder, args[0], args[1:], ir.VoidType())
        return context.get_dummy_value()

    return types.void(*[types.int64] * 7), generate


@intrinsic
def call8(typingctx, address, a, b, c, d, e, f, g, h):
    """Call ``void f(int64, ...)`` with eight."""

    def generate(context, builder, signature, args):
        _call(builder, args[0], args[1:], ir.VoidType())
        return context.get_dummy_value()

    return types.void(*[types.int64] * 9), generate
