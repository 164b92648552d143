"""The matrix product of a head, chosen by timing: on CPUs the fastest form depends on the row count.

BLAS treats one row as a matrix-vector product, often the slowest of all; padding it to two rows or turning
the product around can halve the time. Nothing is assumed: every form is timed once on the head's own shape.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

Form = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def turned(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``x [n, in] @ weight.T`` computed as ``(weight @ x.T).T``."""
    return (weight @ x.T).T


def padded(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """One row computed as two equal ones."""
    return F.linear(torch.cat((x, x)), weight)[: x.shape[0]]


def padded_turned(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """One row computed as two equal ones, turned around."""
    return (weight @ torch.cat((x, x)).T)[:, : x.shape[0]].T


FORMS: tuple[Form, ...] = (F.linear, turned, padded, padded_turned)
BUCKETS = (1, 2, 4, 8, 16, 32)


class TimedProduct:
    """``product(x, weight)`` by the form that measured fastest for this shape and number of rows.

    Shapes that were not timed, and more rows than the largest bucket, use the plain form.

    Args:
        weights: Matrices to time on: one of every shape that the head multiplies with.
        repeats: The best of this many timings counts.
    """

    def __init__(self, weights: Sequence[torch.Tensor], repeats: int = 3) -> None:
        self.table: dict[torch.Size, list[Form]] = {}
        for weight in weights:
            if weight.device.type == "cpu" and weight.shape not in self.table:
                self.table[weight.shape] = _choose(weight, repeats)

    def __call__(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """``x [n, in] @ weight.T`` -> ``[n, out]``."""
        forms = self.table.get(weight.shape)
        if forms is None or x.shape[0] >= len(forms):
            return F.linear(x, weight)
        return forms[x.shape[0]](x, weight)


def _choose(weight: torch.Tensor, repeats: int) -> list[Form]:
    """The fastest form by number of rows, 0 to the largest bucket."""
    chosen: list[Form] = [F.linear]
    for rows in BUCKETS:
        forms = FORMS if rows == 1 else FORMS[:2]
        x = torch.randn(rows, weight.shape[1], dtype=weight.dtype)
        best = min(forms, key=lambda form: _seconds(form, x, weight, repeats))
        chosen += [best] * (rows + 1 - len(chosen))
    return chosen


def _seconds(form: Form, x: torch.Tensor, weight: torch.Tensor, repeats: int) -> float:
    """Least time of the product, the first call not counted."""
    times: list[float] = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        form(x, weight)
        times.append(time.perf_counter() - start)
    return min(times[1:])
