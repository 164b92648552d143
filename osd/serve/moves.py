"""Moves the entries of an accepted path together, in all layers by one call.

Torch would be called three times a layer; where a pass takes six milliseconds, that is a tenth of it a row.
"""

from __future__ import annotations

from collections.abc import Sequence

import numba
import numpy as np
from torch import Tensor

from drafts.native.calls import flags, integers
from drafts.native.steps import OPTIONS


@numba.njit(**OPTIONS)
def _move(layers, count, pieces, offsets, line, begin, sources, moved):
    for layer in range(count):
        base = integers(layers)[layer]
        for piece in range(pieces):
            at = base + integers(offsets)[piece]
            for index in range(moved):
                source = flags(at + integers(sources)[index] * line)
                into = flags(at + (begin + index) * line)
                for byte in range(line):
                    into[byte] = source[byte]


class Mover:
    """Moves entries within a row of a slot cache in memory that numba can read.

    Args:
        pairs: Keys and values by layer, ``[2, slots, kv_heads, places, head_dim]``, all of one shape.
    """

    def __init__(self, pairs: Sequence[Tensor]) -> None:
        first = pairs[0]
        size = first.element_size()
        self._pairs = pairs
        self._layers = np.array([pair.data_ptr() for pair in pairs], dtype=np.int64)
        self._line = first.shape[-1] * size
        self._row = first.stride(1) * size
        self._offsets = np.array(
            [
                side * first.stride(0) * size + head * first.stride(2) * size
                for side in range(2)
                for head in range(first.shape[2])
            ],
            dtype=np.int64,
        )

    def __call__(self, row: int, sources: Sequence[int], begin: int) -> None:
        """Move the entries at ``sources``, which ascend from ``begin`` or later, to ``begin`` on."""
        places = np.array(sources, dtype=np.int64)
        offsets = self._offsets + row * self._row
        _move(
            self._layers.ctypes.data,
            len(self._layers),
            len(offsets),
            offsets.ctypes.data,
            self._line,
            begin,
            places.ctypes.data,
            len(places),
        )


def mover(pairs: Sequence[Tensor]) -> Mover | None:
    """A mover, where the cache is in the processor's memory and its layers are alike."""
    first = pairs[0]
    alike = all(pair.shape == first.shape and pair.is_contiguous() for pair in pairs)
    return Mover(pairs) if first.device.type == "cpu" and alike else None
