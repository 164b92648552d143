"""Kernels for few rows on a processor: products over weights in the form they were shipped in, attention.

The lowest layer of the project, used by the draft head and by the target's pass. Everything here is made
when a model is loaded, for the machine at hand, by LLVM (llvmlite, numba); where those or the thread team
of torch are missing, callers go on without it.
"""
