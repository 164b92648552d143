"""What target passes cost by the rows in them, and where a pass spends its time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch.profiler import ProfilerActivity, profile

from osd.serve.target import PassRow, TargetModel

COUNTS = (1, 2, 4, 8, 16)
CONTEXT = 150
"""Committed tokens of each row while measuring."""

GROUPS: dict[str, tuple[str, ...]] = {
    "attention": ("scaled_dot_product", "softmax", "bmm", "baddbmm", "masked_fill", "flash"),
    "norms": ("rms_norm", "layer_norm", "rsqrt", "pow", "mean"),
    "rope": ("roll", "addcmul", "cos", "sin"),
    "activation": ("silu", "gelu"),
    "copies": (
        "copy_",
        "cat",
        "clone",
        "contiguous",
        "index",
        "gather",
        "scatter",
        "embedding",
        "_to_copy",
        "pad",
    ),
    "views": ("view", "slice", "select", "transpose", "narrow", "as_strided", "reshape", "expand", "chunk"),
    "elementwise": ("add", "mul", "sub", "div"),
}
"""Groups by what an operator's name contains, the first that matches. Matrix products go by their weight."""


def pass_costs(target: TargetModel, seconds: float = 6.0) -> dict[str, dict[int, dict[str, float]]]:
    """Milliseconds (least and median) of a pass over n rows: of one request, and of n requests.

    All counts take turns, so that a slow moment of the machine falls on each of them alike.
    """
    cache = filled_cache(target, max(COUNTS))
    shapes = {
        "one request": {n: [PassRow(0, CONTEXT, [7] * n)] for n in COUNTS},
        "n requests": {n: [PassRow(slot, CONTEXT, [7]) for slot in range(n)] for n in COUNTS},
    }
    taken: dict[str, dict[int, list[float]]] = {kind: {n: [] for n in COUNTS} for kind in shapes}
    deadline = time.perf_counter() + seconds
    rounds = 0
    while rounds < 4 or time.perf_counter() < deadline:
        rounds += 1
        for kind, by_count in shapes.items():
            for count, rows in by_count.items():
                begin = time.perf_counter()
                target.forward(cache, rows)
                taken[kind][count].append(1e3 * (time.perf_counter() - begin))
    return {
        kind: {n: {"least": min(ms[1:]), "median": statistics.median(ms[1:])} for n, ms in by_count.items()}
        for kind, by_count in taken.items()
    }


def filled_cache(target: TargetModel, slots: int) -> Any:
    """A cache with :data:`CONTEXT` committed tokens in every row."""
    cache = target.make_cache(slots, CONTEXT + max(COUNTS) + 1, keep_features=True)
    for _ in range(slots):
        row = cache.acquire()
        cache.reserve(row, 0, CONTEXT)
        cache.commit(row, CONTEXT)
    return cache


def profile_pass(
    target: TargetModel, weights: Mapping[str, Sequence[Any]], rows: int, repeats: int = 20
) -> Any:
    """Milliseconds a pass by group and by operator, from the profiler's own times of each operator.

    Matrix products are told apart by the shape of the weight among their arguments. ``python`` is what no
    operator accounts for: the interpreter and the profiler itself. ``profiled_ms``, whose parts these are, is
    longer than ``pass_ms``, the pass without the profiler.
    """
    cache = filled_cache(target, 1)
    batch = [PassRow(0, CONTEXT, [7] * rows)]
    for _ in range(3):
        target.forward(cache, batch)
    begin = time.perf_counter()
    for _ in range(repeats):
        target.forward(cache, batch)
    plain = 1e3 * (time.perf_counter() - begin) / repeats
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
        begin = time.perf_counter()
        for _ in range(repeats):
            target.forward(cache, batch)
        profiled = 1e3 * (time.perf_counter() - begin) / repeats
    roles = {frozenset(matrix.plain.shape): role for role, group in weights.items() for matrix in group}
    groups: dict[str, float] = {}
    operators: dict[str, float] = {}
    for event in seen.key_averages(group_by_input_shape=True):
        ms = event.self_cpu_time_total / 1e3 / repeats
        group = group_of(event.key, event.input_shapes or (), roles)
        groups[group] = groups.get(group, 0.0) + ms
        operators[event.key] = operators.get(event.key, 0.0) + ms
    groups["python"] = profiled - sum(groups.values())
    top = sorted(operators.items(), key=lambda item: -item[1])[:20]
    return {
        "rows": rows,
        "pass_ms": plain,
        "profiled_ms": profiled,
        "groups": _sorted(groups),
        "operators": dict(top),
    }


def group_of(name: str, shapes: Iterable[Sequence[Any]], roles: Mapping[frozenset[int], str]) -> str:
    """The group of an operator: the role of the weight it multiplies, or what its name tells."""
    multiplies = any(part in name for part in ("mm", "linear", "matmul", "gemm", "mv"))
    if multiplies:
        for shape in shapes:
            sizes = (
                [size for size in shape if isinstance(size, int)] if isinstance(shape, (list, tuple)) else []
            )
            if len(sizes) == 2 and frozenset(sizes) in roles:
                return f"product: {roles[frozenset(sizes)]}"
    for group, parts in GROUPS.items():
        if any(part in name for part in parts):
            return group
    return "attention" if multiplies else "rest"


def _sorted(groups: Mapping[str, float]) -> dict[str, float]:
    return dict(sorted(groups.items(), key=lambda item: -item[1]))
