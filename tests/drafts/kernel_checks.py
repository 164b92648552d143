"""What holds for every kernel that multiplies several rows in matrix registers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Product = Callable[[Tensor], Tensor]


def check_bits_at_every_place(product: Product, rows_of: Callable[..., Tensor], count: int) -> None:
    """A row's result is the same bits alone and at every place beside other rows."""
    alone = torch.zeros_like(rows_of(count))
    alone[0] = rows_of(1, seed=2)
    expected = product(alone)[0]
    for place in range(count):
        x = 100 * rows_of(count, seed=3 + place)
        x[place] = alone[0]
        assert torch.equal(product(x)[place], expected), place


def check_nan_stays(product: Product, x: Tensor, outputs: int | None = None) -> None:
    """NaN in one row reaches all of its first ``outputs`` results and no other row's."""
    clean = product(x)
    x[7] = float("nan")
    found = product(x)
    assert bool(found[7, :outputs].isnan().all())
    others = torch.arange(len(x)) != 7
    assert torch.equal(found[others], clean[others])
