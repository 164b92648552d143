"""What a compiled pass has to know of its products: their kernels, and how rows are cut into chunks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from drafts.native import steps
from drafts.native.codes import Tiles
from drafts.native.tiles import GROUP, OUTPUTS, Format
from drafts.native.vectors import LANES

ROWS_WIDE = (1, 2, 3, 4, 5, 6, 8, 10, 12, 14, 16)
ROWS_NARROW = (1, 2, 3, 4, 5, 6)
"""Rows that a product kernel is made for, by the number of registers."""


def tile_name(fmt: Format, rows: int) -> str:
    """Name of a product's kernel."""
    return f"tile_{fmt.key}_{rows}"


def split_name(fmt: Format, rows: int) -> str:
    """Name of the kernel of a product whose inputs come in parts."""
    return f"split_{fmt.key}_{rows}"


SPLIT_SHIFT = steps.MOST_ROWS + 1
"""Where the kernels for inputs in parts begin in a format's table."""


def kernel_table(
    kernels: Mapping[str, int], fmt: Format, rows: Sequence[int], split: Sequence[int] = ()
) -> np.ndarray:
    """Addresses of a format's kernels, int64 by row count; 0 where there is none.

    Args:
        kernels: Addresses by name.
        fmt: The format.
        rows: Rows that there are kernels for.
        split: The same for inputs in parts.
    """
    table = np.zeros(2 * SPLIT_SHIFT, dtype=np.int64)
    for count in rows:
        table[count] = kernels[tile_name(fmt, count)]
    for count in split:
        table[SPLIT_SHIFT + count] = kernels[split_name(fmt, count)]
    return table


def describe_product(
    line: np.ndarray, tiles: Tiles, kernels: np.ndarray, decoded: np.ndarray | None = None
) -> None:
    """Fill one product's :data:`~drafts.native.steps.SHAPE` entries; the tables have to stay alive."""
    line[steps.KERNELS] = kernels.ctypes.data
    line[steps.TILES] = tiles.data.shape[1]
    line[steps.TILE_BYTES] = tiles.data.shape[2]
    line[steps.GROUPS] = tiles.inputs // GROUP
    line[steps.DECODED] = 0 if decoded is None else decoded.ctypes.data


def chunk_table(count: int, kinds: Sequence[int]) -> tuple[np.ndarray, int]:
    """Rows in chunks of about one size, padded to one of the ``kinds`` that kernels are made for.

    Returns:
        The table that passes read, and all rows with padding.
    """
    number = -(-count // kinds[-1])
    table, first, before = [number], 0, 0
    for chunk in range(number):
        rows = (count - first) // (number - chunk)
        padded = next(kind for kind in kinds if kind >= rows)
        table += [first, rows, padded, before]
        first, before = first + rows, before + padded
    return np.array(table, dtype=np.int64), before


def laid_out(sizes: Mapping[int, int], begin: int) -> tuple[dict[int, int], int]:
    """Offsets of a thread's own buffers, in floats, from ``begin`` on, and the end of the last.

    Each starts on a vector of its own and has one to spare, which some kernels overwrite.
    """
    offsets, end = {}, begin
    for place, size in sizes.items():
        offsets[place] = end
        end += -(-size // LANES) * LANES + LANES
    return offsets, end


def sizes_obstacle(head: int, widths: Sequence[int]) -> str | None:
    """Why heads of a size and products of some widths cannot run in compiled passes."""
    if head % (2 * LANES) or any(width % GROUP for width in widths):
        return f"heads of {head} and widths {tuple(widths)} do not come in whole vectors"
    return None


def interleave(parts: Sequence[Tensor]) -> list[Tensor]:
    """Tiles of the parts in turns: 32 outputs of the first, 32 of the second, and so on."""
    return [
        tile for pair in zip(*(torch.split(part, OUTPUTS) for part in parts), strict=True) for tile in pair
    ]
