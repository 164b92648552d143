"""How fast this machine reads the target's own weights, and how fast it multiplies."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

ONE_LINER = """python -c '
import time, torch
from osd.serve.load import load_target
target, _ = load_target("embedded", "cpu", "{dtype}")
weights = [m.plain for group in target.weights().values() for m in group]
flat = [w.view(-1).view(torch.int32) for w in weights]
size = sum(w.numel() * w.element_size() for w in weights)
def read():
    begin = time.perf_counter()
    for w in flat: w.max()
    return time.perf_counter() - begin
print(size / min(read() for _ in range(30)) / 1e9, "GB/s")'"""
"""Repeats the reading by ``max`` outside of this benchmark; ``{dtype}`` is the number type."""


def weight_bytes(weights: Sequence[Tensor]) -> int:
    """Bytes that a pass must read, each weight once."""
    return sum(weight.numel() * weight.element_size() for weight in weights)


def readers(weights: Sequence[Tensor]) -> dict[str, Callable[[], Any]]:
    """Ways to touch every byte of ``weights`` once, by name; what they compute is of no interest.

    ``matvec`` is the product that a plain pass makes, without anything between the products.
    """
    as_int = [weight.view(-1).view(torch.int32) for weight in weights]
    as_long = [weight.view(-1).view(torch.int64) for weight in weights]
    vectors = {w.shape[1]: torch.randn(1, w.shape[1]).to(w.dtype) for w in weights}
    found: dict[str, Callable[[], Any]] = {
        "max of int32": lambda: [part.max() for part in as_int],
        "sum of int64": lambda: [part.sum() for part in as_long],
        "matvec": lambda: [F.linear(vectors[w.shape[1]], w) for w in weights],
    }
    if weights[0].dtype == torch.float32:
        flat = [weight.view(-1) for weight in weights]
        found["sum of float32"] = lambda: [part.sum() for part in flat]
        found["dot of float32"] = lambda: [torch.dot(part, part) for part in flat]
    return found


@torch.inference_mode()
def bandwidth(weights: Sequence[Tensor], seconds: float = 3.0) -> dict[str, float]:
    """GB/s of each reader, all in turn until ``seconds`` are over; the fastest round counts."""
    ways = readers(weights)
    least = dict.fromkeys(ways, float("inf"))
    deadline = time.perf_counter() + seconds
    rounds = 0
    while rounds < 3 or time.perf_counter() < deadline:
        rounds += 1
        for name, read in ways.items():
            begin = time.perf_counter()
            read()
            least[name] = min(least[name], time.perf_counter() - begin)
    size = weight_bytes(weights)
    return {name: size / took / 1e9 for name, took in least.items()}


@torch.inference_mode()
def flops(dtype: torch.dtype, size: int = 1536, repeats: int = 5) -> float:
    """GFLOP/s of a square product, the fastest of some."""
    a, b = (torch.randn(size, size).to(dtype) for _ in range(2))
    took = []
    for _ in range(repeats):
        begin = time.perf_counter()
        a @ b
        took.append(time.perf_counter() - begin)
    return 2 * size**3 / min(took) / 1e9
