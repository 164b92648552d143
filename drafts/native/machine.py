"""Compiles emitted kernels for the processor at hand."""

from __future__ import annotations

from collections.abc import Callable

import llvmlite.binding as llvm
from llvmlite import ir

_engines: list[llvm.ExecutionEngine] = []
"""Compiled code stays valid until the process ends."""


def wide_registers() -> bool:
    """Whether the processor has 32 registers of 16 lanes (AVX-512)."""
    return bool(llvm.get_host_cpu_features().get("avx512f", False))


def compiled(emit: Callable[[ir.Module], None]) -> dict[str, int]:
    """Addresses, by name, of the functions that ``emit`` puts into a module."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    module = ir.Module("polydraft")
    module.triple = llvm.get_process_triple()
    emit(module)
    defined = [function.name for function in module.functions if not function.is_declaration]
    parsed = llvm.parse_assembly(str(module))
    parsed.verify()
    cpu, features = llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()
    target = llvm.Target.from_default_triple()
    engine = llvm.create_mcjit_compiler(
        parsed, target.create_target_machine(cpu=cpu, features=features, opt=3, jit=True)
    )
    engine.finalize_object()
    _engines.append(engine)
    return {name: engine.get_function_address(name) for name in defined}
