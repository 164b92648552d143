"""Runs compiled code on torch's own team of threads.

A second team beside torch's halves both while its idle threads spin. GNU's OpenMP library, which torch's
wheels for Linux carry, lends its team to any C function.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch


class Team:
    """Torch's threads.

    Attributes:
        barrier: Address of a function without arguments that waits for the whole team.
        thread: Address of a function that returns a thread's number, int32.
        size: Address of a function that returns how many threads take part, int32.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._run = library.GOMP_parallel
        self._run.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        self._run.restype = None
        self.barrier = _address(library.GOMP_barrier)
        self.thread = _address(library.omp_get_thread_num)
        self.size = _address(library.omp_get_num_threads)

    def run(self, function: int, argument: int, threads: int) -> None:
        """Call ``void function(void *argument)`` on every thread of a team of ``threads``, and wait.

        The team is smaller where ``OMP_THREAD_LIMIT`` or dynamic teams say so.
        """
        self._run(function, argument, threads, 0)


def _address(function: object) -> int:
    return int(ctypes.cast(function, ctypes.c_void_p).value or 0)  # type: ignore[arg-type]  # a function


@functools.cache
def team() -> Team | None:
    """The team, where torch is built upon a library that can lend it."""
    folders = [Path(torch.__file__).parent / "lib", Path(torch.__file__).parent.parent / "torch.libs"]
    for folder in folders:
        for path in sorted(folder.glob("libgomp*.so*")):
            try:
                return Team(ctypes.CDLL(str(path)))
            except (OSError, AttributeError):
                continue
    return None
