"""The draft cache of one request: keys and values of the head, bounded to a window."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from drafts.trunk import Trunk


class HeadCache:
    """Keys and values of one request's pairs, the last ``window`` of them kept.

    ``next_pair`` is the first pair not read yet (absolute); ``length`` counts valid entries. Storage
    ``[G, capacity, D]`` grows by doubling and is shifted down when it holds two windows.
    """

    def __init__(self, trunk: Trunk, window: int) -> None:
        shape = trunk.shape
        self.window = window
        self.next_pair = 0
        self.length = 0
        blank = torch.empty(
            shape.kv_heads, 64, shape.head_dim, dtype=torch.float32, device=trunk.token_ids.device
        )
        self.keys, self.values = blank, blank.clone()

    def write(self, keys: torch.Tensor, values: torch.Tensor, offset: int = 0) -> None:
        """Store ``[n, G, D]`` entries ``offset`` behind the valid ones, without making them valid."""
        start = self.length + offset
        self.reserve(start + len(keys))
        self.keys[:, start : start + len(keys)] = keys.transpose(0, 1)
        self.values[:, start : start + len(keys)] = values.transpose(0, 1)

    def commit(self, count: int) -> None:
        """The ``count`` entries written last are true: make them valid."""
        self.length += count
        self.next_pair += count
        if self.length >= 2 * self.window:
            kept = slice(self.length - self.window, self.length)
            self.keys[:, : self.window] = self.keys[:, kept].clone()
            self.values[:, : self.window] = self.values[:, kept].clone()
            self.length = self.window

    def rewind(self, pair: int) -> None:
        """Forget everything from absolute ``pair`` on, so that it is read again."""
        self.length = max(0, self.length - (self.next_pair - pair))
        self.next_pair = pair

    def attend(self, queries: torch.Tensor, extra: int) -> torch.Tensor:
        """One position's queries ``[A, D]`` over window and ``extra`` speculated entries -> ``[A * D]``."""
        end = self.length + extra
        seen = slice(max(0, end - self.window), end)
        grouped = queries.reshape(1, self.keys.shape[0], -1, self.keys.shape[2])
        out = F.scaled_dot_product_attention(grouped, self.keys[None, :, seen], self.values[None, :, seen])
        return out.flatten()

    def reserve(self, length: int) -> None:
        """Grow the storage so that ``length`` entries fit; it moves where it does."""
        capacity = self.keys.shape[1]
        if length <= capacity:
            return
        grown = self.keys.new_empty(self.keys.shape[0], max(length, 2 * capacity), self.keys.shape[2])
        fresh = grown.clone()
        grown[:, :capacity], fresh[:, :capacity] = self.keys, self.values
        self.keys, self.values = grown, fresh
