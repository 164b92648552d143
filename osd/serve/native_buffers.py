"""Buffers of the target's compiled passes, and the tables that are made for every pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from drafts.native import steps
from drafts.native.matrix_attention import KEYS, TOKENS, block_scratch_bytes
from drafts.native.matrix_tiles import scratch_bytes
from drafts.native.product_tables import laid_out
from drafts.native.split_tiles import INPUT_BYTES, split_scratch_bytes
from drafts.native.tiles import OUTPUTS
from drafts.native.vectors import LANES
from osd.serve import native_entries as entry
from osd.serve.layout import PassLayout, ancestors
from osd.serve.target import PassRow

if TYPE_CHECKING:
    from osd.serve.native import NativeTarget


class PassBuffers:
    """Buffers of a pass: those that the threads share, and those that each has for itself."""

    def __init__(self, target: NativeTarget, threads: int) -> None:
        tiles = target.native.tiles
        wide = tiles["attn_out"].inputs
        room = target.most + 2 * steps.MOST_ROWS
        self.inner = tiles["down"].inputs
        self.qkv_stride, self.out_stride = tiles["qkv"].padded, tiles["down"].padded
        self.vocab_stride = tiles["output"].padded
        hidden = target.hidden_size
        share = target._heads // target._kv_heads
        most = max(tile.inputs for tile in tiles.values())
        widest = INPUT_BYTES // 4 if target.native.split else 1
        self.scores_stride = -(-target.max_positions // LANES) * LANES + target.most + 2 * LANES
        self._buffers = {
            entry.SHARED_X: torch.zeros(room, widest * hidden, dtype=torch.float32),
            entry.SHARED_QKV: torch.zeros(room, self.qkv_stride, dtype=torch.float32),
            entry.SHARED_ATTENDED: torch.zeros(room, widest * wide, dtype=torch.float32),
            entry.SHARED_PROJECTED: torch.zeros(room, self.out_stride, dtype=torch.float32),
            entry.SHARED_ACTIVE: torch.zeros(room, widest * self.inner, dtype=torch.float32),
            entry.SHARED_DOWN: torch.zeros(room, self.out_stride, dtype=torch.float32),
        }
        scratch = max(scratch_bytes(most), split_scratch_bytes(most)) // 4
        sizes = {
            steps.PRIVATE_X: room * widest * hidden,
            steps.PRIVATE_LINE: hidden,
            steps.PRIVATE_GATE: 2 * OUTPUTS * steps.MOST_ROWS,
            steps.PRIVATE_SCRATCH: scratch,
            steps.PRIVATE_SECOND: scratch,
            entry.PRIVATE_HEADS: (share + 2) * target._head_dim,
            entry.PRIVATE_SCORES: share * self.scores_stride,
        }
        if "attend" in target.native.kernels:
            size, places = target._head_dim, self.scores_stride
            block = 6 * TOKENS * size + block_scratch_bytes(size, places)
            sizes |= {
                entry.PRIVATE_TURNED: size * (places + KEYS) // 2,
                entry.PRIVATE_BLOCK: block // 4,
            }
        self._offsets, self._stride = laid_out(sizes, room * hidden)
        self._private = torch.zeros(threads, self._stride, dtype=torch.float32)

    def entries(self) -> dict[int, int]:
        """What the pass's table says of them."""
        return {
            **{place: buffer.data_ptr() for place, buffer in self._buffers.items()},
            **self._offsets,
            steps.PRIVATE: self._private.data_ptr(),
            steps.PRIVATE_STRIDE: self._stride,
            entry.SCORES_STRIDE: self.scores_stride,
        }


def kept_table(layers: int, feature_layers: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Where each layer's hidden states go: nowhere, and to the features in order."""
    nowhere = np.full(layers, -1, dtype=np.int64)
    kept = nowhere.copy()
    for place, layer in enumerate(feature_layers):
        kept[layer - 1] = place
    return nowhere, kept


def row_table(layout: PassLayout, masks: list[np.ndarray]) -> np.ndarray:
    """Slot, start, tokens, first packed token and the address of a tree's mask, a row each.

    Args:
        layout: The pass.
        masks: Takes what has to stay alive.
    """
    found = np.empty((len(layout.rows), 5), dtype=np.int64)
    for index, (row, first) in enumerate(zip(layout.rows, layout.starts, strict=True)):
        found[index] = (row.slot, row.start, len(row.tokens), first, _mask(row, masks))
    return found


def _mask(row: PassRow, masks: list[np.ndarray]) -> int:
    if row.parents is None:
        return 0
    mask: np.ndarray = ancestors(row.parents).numpy()
    masks.append(mask)
    return int(mask.ctypes.data)
