"""Attention of packed rows over the slot cache, without copying or expanding keys."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from osd.serve.cache import SlotCache
from osd.serve.layout import Group, PassLayout


class Attention:
    """The attention of one pass: what depends on the rows is prepared once for all layers.

    Query heads that share a key-value head are folded into the query length, so that keys are read
    as they lie: queries ``[B, kv_heads, width * group, head_dim]``, keys ``[B, kv_heads, length, head_dim]``.

    Args:
        cache: The slot cache.
        layout: The pass.
        heads: Query heads.
        kv_heads: Key-value heads.
        scaling: Factor on the scores.
        dtype: Of the queries.
    """

    def __init__(
        self,
        cache: SlotCache,
        layout: PassLayout,
        heads: int,
        kv_heads: int,
        scaling: float,
        dtype: torch.dtype,
    ) -> None:
        self._cache = cache
        self._layout = layout
        self._heads = heads
        self._kv_heads = kv_heads
        self._scaling = scaling
        device = layout.tokens.device
        self._parts = [_Part(group, heads // kv_heads, dtype, device) for group in layout.groups()]
        only = layout.rows[0] if len(layout.rows) == 1 else None
        self._span = None if only is None else (only.slot, only.start, only.start + layout.count)

    def attend(self, layer: int, qkv: Tensor) -> Tensor:
        """Write this layer's new keys and values, then attend.

        Args:
            layer: Index of the layer.
            qkv: ``[N, heads + 2 * kv_heads, head_dim]``, queries and keys already rotated.

        Returns:
            ``[N, heads * head_dim]``.
        """
        count, _, head_dim = qkv.shape
        pair = self._cache.pairs[layer]
        new = qkv[:, self._heads :].view(count, 2, self._kv_heads, head_dim)
        if self._span is not None:
            slot, begin, end = self._span
            pair[:, slot, :, begin:end] = new.permute(1, 2, 0, 3)
        else:
            pair[:, self._layout.slots, :, self._layout.places] = new
        queries = qkv[:, : self._heads]
        if len(self._parts) == 1 and self._parts[0].is_dense_in_order:
            return self._parts[0].attend(queries, pair, self._kv_heads, self._scaling)
        attended = queries.new_empty(count, self._heads * head_dim)
        for part in self._parts:
            out = part.attend(part.pick(queries), pair, self._kv_heads, self._scaling)
            part.put(attended, out)
        return attended


class _Part:
    """One group of rows, with its mask and its places among the packed tokens."""

    def __init__(self, group: Group, share: int, dtype: torch.dtype, device: torch.device) -> None:
        self._slots = slice(group.slot, group.slot + len(group.rows))
        self._batch = len(group.rows)
        self._width = group.width
        self._length = group.length
        self._share = share
        self._mask: Tensor | None = None
        if not group.is_plain:
            seen = group.mask()
            additive = torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, float("-inf"))
            self._mask = additive.repeat_interleave(share, dim=1)[:, None].to(device)
        self.is_dense_in_order = group.is_dense
        self._block = slice(group.packed[0], group.packed[0] + self._batch * self._width)
        if not group.is_dense:
            self._gather = group.gather.to(device)
            packed, padded = group.places
            self._packed, self._padded = packed.to(device), padded.to(device)

    def pick(self, queries: Tensor) -> Tensor:
        """The group's queries ``[B * width, heads, head_dim]``."""
        return queries[self._block] if self.is_dense_in_order else queries[self._gather]

    def put(self, packed: Tensor, out: Tensor) -> None:
        """Write the group's result to its packed places."""
        if self.is_dense_in_order:
            packed[self._block] = out
        else:
            packed[self._packed] = out[self._padded]

    def attend(self, queries: Tensor, pair: Tensor, kv_heads: int, scaling: float) -> Tensor:
        """``[B * width, heads, head_dim]`` to ``[B * width, heads * head_dim]``."""
        batch, width, share = self._batch, self._width, self._share
        head_dim = queries.shape[-1]
        folded = queries.view(batch, width, kv_heads, share, head_dim).permute(0, 2, 1, 3, 4)
        folded = folded.reshape(batch, kv_heads, width * share, head_dim)
        keys, values = pair[:, self._slots, :, : self._length]
        out = F.scaled_dot_product_attention(folded, keys, values, self._mask, scale=scaling)
        out = out.view(batch, kv_heads, width, share, head_dim).permute(0, 2, 1, 3, 4)
        return out.reshape(batch * width, kv_heads * share * head_dim)
