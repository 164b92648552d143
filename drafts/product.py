"""The matrix product of a head, chosen by timing: on CPUs the fastest form depends on the row count.

BLAS treats one row as a matrix-vector product, often the slowest of all; padding it to two rows or turning
the product around can halve the time. Eight-bit weights read a quarter of the bytes and are several times
faster still where the processor has the instructions: a draft may round, since verification decides.
Nothing is assumed: every form is timed once on the head's own matrices.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

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
"""Exact forms; the last two are tried for one row only."""

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 192)


class TimedProduct:
    """``product(x, weight)`` by the form that measured fastest for this shape and number of rows.

    Weights and shapes that were not timed, more rows than the largest bucket, and inputs that need a
    gradient use the plain form.

    Args:
        weights: The matrices that the head multiplies with; they must not change any more.
        repeats: The best of this many timings counts.
        int8: Also try eight-bit copies of the weights (scale per output, inputs scaled per call).
    """

    def __init__(self, weights: Sequence[torch.Tensor], repeats: int = 3, int8: bool = True) -> None:
        self.table: dict[torch.Size, list[Form]] = {}
        self._packed: dict[tuple[int, torch.Size], Any] = {}
        for weight in weights:
            if weight.device.type != "cpu":
                continue
            packed = pack_int8(weight) if int8 else None
            if packed is not None:
                self._packed[weight.data_ptr(), weight.shape] = packed
            if weight.shape not in self.table:
                self.table[weight.shape] = self._choose(weight, repeats)

    def __call__(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """``x [n, in] @ weight.T`` -> ``[n, out]``."""
        forms = self.table.get(weight.shape)
        if forms is None or x.shape[0] >= len(forms) or x.requires_grad:
            return F.linear(x, weight)
        return forms[x.shape[0]](x, weight)

    def in_int8(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """The product with the eight-bit copy of ``weight``, or plain if there is none."""
        packed = self._packed.get((weight.data_ptr(), weight.shape))
        if packed is None:
            return F.linear(x, weight)
        product: torch.Tensor = torch.ops.quantized.linear_dynamic(x, packed, True)
        return product

    def _choose(self, weight: torch.Tensor, repeats: int) -> list[Form]:
        """The fastest form by number of rows, 0 to the largest bucket."""
        chosen: list[Form] = [F.linear]
        for rows in BUCKETS:
            forms = [*(FORMS if rows == 1 else FORMS[:2])]
            if self._packed:
                forms.append(self.in_int8)
            x = torch.randn(rows, weight.shape[1], dtype=weight.dtype)
            times = [_seconds(form, x, weight, repeats) for form in forms]
            chosen += [forms[times.index(min(times))]] * (rows + 1 - len(chosen))
        return chosen


def pack_int8(weight: torch.Tensor) -> Any:
    """An eight-bit copy of ``weight``, scaled per output row; ``None`` where torch cannot.

    Torch announces that it will remove these operators; then, as on processors without them, the exact
    forms remain.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        try:
            scales = weight.abs().amax(dim=1).clamp_min(1e-8).double() / 127.0
            zeros = torch.zeros(len(scales), dtype=torch.int64)
            quantised = torch.quantize_per_channel(weight.float(), scales, zeros, 0, torch.qint8)
            packed = torch.ops.quantized.linear_prepack(quantised, None)
            torch.ops.quantized.linear_dynamic(torch.zeros(1, weight.shape[1]), packed, True)
        except (AttributeError, NotImplementedError, RuntimeError):
            return None
    return packed


def _seconds(form: Form, x: torch.Tensor, weight: torch.Tensor, repeats: int) -> float:
    """Least time of the product, the first call not counted."""
    times: list[float] = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        form(x, weight)
        times.append(time.perf_counter() - start)
    return min(times[1:])
