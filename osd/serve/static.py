"""The lean forward with static shapes: a decode pass as a pure function of buffers that never move.

A GPU finishes the kernels of a small pass faster than Python can launch them. A recorded pass (CUDA
graph) needs no launches, but every shape and address in it is fixed. So rows are padded to a bucket, and
what differs from pass to pass (tokens, positions, places, who sees whom) is data in one table, copied to
the device at once.

Shape letters: R rows, W tokens per row, L cache entries per row, all of the bucket; N = R * W.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from osd.serve.cache import SlotCache
from osd.serve.facts import checked_length
from osd.serve.layout import check_rows, depths
from osd.serve.lean import LeanTarget
from osd.serve.target import PassRow

WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Tokens per row that buckets have; a row with more takes the packed forward."""

GRAIN = 256
"""Least cache entries that a bucket reads; longer ones double."""

MOST_TOKENS = 256
"""Largest R * W: beyond it padding costs arithmetic, and launches hide behind the work."""

PLANES = 7
"""Planes of a table: tokens, positions, slots, places, starts, seen, wanted."""

_TOKENS, _POSITIONS, _SLOTS, _PLACES, _STARTS, _SEEN, _WANTED = range(PLANES)
_LAST_BIT = 62


class Bucket(NamedTuple):
    """The shape of a pass: R rows (the cache's first ones) of W tokens that read L entries each."""

    rows: int
    width: int
    length: int

    @property
    def tokens(self) -> int:
        """N, padding included."""
        return self.rows * self.width

    def covers(self, other: Bucket) -> bool:
        """Whether a pass that fits ``other`` also fits this bucket."""
        return self.rows >= other.rows and self.width >= other.width and self.length >= other.length


def spare_places(max_length: int) -> int:
    """Places to allocate behind each row: up to a whole number of grains, and a scratch place.

    Padding writes its keys to the last place, which no bucket reads.
    """
    return -max_length % GRAIN + 1


def scratch_place(cache: SlotCache) -> int:
    """Where padding writes."""
    return cache.max_length + cache.spare - 1


def row_counts(slots: int) -> list[int]:
    """Rows that buckets over a cache of ``slots`` have: powers of two, and all of them."""
    return sorted({min(1 << i, slots) for i in range(slots.bit_length() + 1)})


def lengths(cache: SlotCache) -> list[int]:
    """Entries that buckets over ``cache`` read: ``GRAIN`` and its doublings, and all."""
    most = scratch_place(cache)
    return sorted({min(GRAIN << i, most) for i in range((most // GRAIN).bit_length() + 1)})


def bucket_for(cache: SlotCache, rows: Sequence[PassRow]) -> Bucket | None:
    """The smallest bucket that holds the pass; ``None`` if it is better packed.

    A long prompt chunk is, because every other row would be padded to it.
    """
    widest = max(len(row.tokens) for row in rows)
    if not cache.spare or widest > WIDTHS[-1]:
        return None
    slots = max(row.slot for row in rows) + 1
    end = max(row.start + len(row.tokens) for row in rows)
    if slots > cache.slots or end > cache.max_length:
        return None
    bucket = Bucket(
        next(count for count in row_counts(cache.slots) if count >= slots),
        next(width for width in WIDTHS if width >= widest),
        next(length for length in lengths(cache) if length >= end),
    )
    return bucket if bucket.tokens <= MOST_TOKENS else None


def seen_bits(row: PassRow) -> list[int]:
    """For each of a row's tokens, as bits, which of them it sees: its ancestors and itself."""
    if row.parents is None:
        return [(2 << index) - 1 for index in range(len(row.tokens))]
    seen = [1]
    for index, parent in enumerate(row.parents, start=1):
        seen.append(seen[parent + 1] | 1 << index)
    return seen


class StaticTable:
    """What differs from pass to pass, for one bucket: int64 ``[7, N]`` on the host.

    Padding is a token 0 at position 0 that sees its row's first entry only, so that it stays finite,
    and writes to the scratch place.

    Args:
        cache: The cache; ``reserve`` is called for every row.
        rows: The pass.
        bucket: A bucket that holds it.

    Attributes:
        values: The table.
        offsets: First logit row of each pass row.
        wanted: How many logit rows there are; their places are the last plane's first entries.

    Raises:
        IntegrityError: As :meth:`TargetModel.forward`.
    """

    def __init__(self, cache: SlotCache, rows: Sequence[PassRow], bucket: Bucket) -> None:
        check_rows(rows)
        self.values = padding(cache, bucket)
        planes = self.values.reshape(PLANES, bucket.rows, bucket.width)
        self.offsets: list[int] = []
        wanted: list[int] = []
        for row in rows:
            count = len(row.tokens)
            cache.reserve(row.slot, row.start, count)
            planes[_TOKENS, row.slot, :count] = row.tokens
            planes[_POSITIONS, row.slot, :count] = depths(row)
            planes[_POSITIONS, row.slot, :count] += row.start
            planes[_PLACES, row.slot, :count] = range(row.start, row.start + count)
            planes[_STARTS, row.slot, :count] = row.start
            planes[_SEEN, row.slot, :count] = seen_bits(row)
            self.offsets.append(len(wanted))
            first = row.slot * bucket.width
            wanted.extend(range(first + row.logits_from, first + count))
        self.values[_WANTED, : len(wanted)] = wanted
        self.wanted = len(wanted)


def padding(cache: SlotCache, bucket: Bucket) -> npt.NDArray[np.int64]:
    """A table without any row: running it changes nothing that is ever read."""
    values = np.zeros((PLANES, bucket.tokens), dtype=np.int64)
    values[_SLOTS] = np.arange(bucket.rows).repeat(bucket.width)
    values[_PLACES] = scratch_place(cache)
    values[_SEEN] = 1
    return values


class StaticAttention:
    """Attention of a bucket's rows over the first R cache rows; keys are read as they lie.

    Heads that share a key-value head are folded into the query length, as in
    :class:`osd.serve.attention.Attention`.

    Args:
        table: int64 ``[7, N]`` on the device.
        bucket: Its bucket.
        heads: Query heads; ``kv_heads`` key-value heads.
        scaling: Factor on the scores.
        dtype: Of the queries.
    """

    def __init__(
        self, table: Tensor, bucket: Bucket, heads: int, kv_heads: int, scaling: float, dtype: torch.dtype
    ) -> None:
        self._bucket = bucket
        self._slots, self._places = table[_SLOTS], table[_PLACES]
        self._heads = heads
        self._kv_heads = kv_heads
        self._share = heads // kv_heads
        self._scaling = scaling
        rows, width, length = bucket
        seen = visible_bits(table[_STARTS], table[_SEEN], length)
        additive = torch.zeros(seen.shape, dtype=dtype, device=table.device)
        additive = additive.masked_fill(~seen, float("-inf")).view(rows, 1, width, 1, length)
        self._mask = additive.expand(-1, -1, -1, self._share, -1).reshape(rows, 1, -1, length)

    def attend(self, pair: Tensor, qkv: Tensor) -> Tensor:
        """Write a layer's keys and values, then attend: ``[N, heads + 2 kv_heads, D] -> [N, heads * D]``."""
        rows, width, length = self._bucket
        head_dim = qkv.shape[-1]
        new = qkv[:, self._heads :].view(-1, 2, self._kv_heads, head_dim)
        pair[:, self._slots, :, self._places] = new
        queries = qkv[:, : self._heads].reshape(rows, width, self._kv_heads, self._share, head_dim)
        folded = queries.permute(0, 2, 1, 3, 4).reshape(rows, self._kv_heads, -1, head_dim)
        keys, values = pair[0, :rows, :, :length], pair[1, :rows, :, :length]
        out = F.scaled_dot_product_attention(folded, keys, values, self._mask, scale=self._scaling)
        out = out.view(rows, self._kv_heads, width, self._share, head_dim).permute(0, 2, 1, 3, 4)
        return out.reshape(rows * width, -1)


def visible_bits(starts: Tensor, seen: Tensor, length: int) -> Tensor:
    """bool ``[N, length]``: :func:`osd.serve.layout.visible` from starts and ancestor bits, on the device."""
    offsets = torch.arange(length, device=starts.device) - starts[:, None]
    bits = (seen[:, None] >> offsets.clamp(0, _LAST_BIT)) & 1
    return (offsets < 0) | (bits == 1)


class StaticLean(LeanTarget):
    """A lean target that can also run a bucket's static pass.

    Its caches have a scratch place behind every row, see :func:`spare_places`.
    """

    def make_cache(self, slots: int, max_length: int, keep_features: bool) -> SlotCache:
        """See :meth:`TargetModel.make_cache`."""
        length = checked_length(max_length, self.max_positions)
        return SlotCache(
            layers=len(self._layers),
            slots=slots,
            kv_heads=self._kv_heads,
            max_length=length,
            head_dim=self._head_dim,
            feature_width=self.feature_width if keep_features else 0,
            dtype=self.dtype,
            device=self.device,
            spare=spare_places(length),
        )

    def static_pass(
        self, bucket: Bucket, table: Tensor, pairs: Sequence[Tensor], features: Tensor | None
    ) -> Tensor:
        """The layers over one table; writes keys, values and features, and nothing depends on the host.

        Args:
            bucket: Shape of the pass.
            table: int64 ``[7, N]``.
            pairs: The cache's keys and values, see :attr:`SlotCache.pairs`.
            features: The cache's features.

        Returns:
            Normed hidden states ``[N, hidden]``, ready for the output matrix.
        """
        count = bucket.tokens
        product = self.plan.product
        qkv_product, attn_product = product("qkv", count), product("attn_out", count)
        gate_product, down_product = product("gate_up", count), product("down", count)
        cos, sin = self._rotation(table[_POSITIONS])
        attention = StaticAttention(table, bucket, self._heads, self._kv_heads, self._scaling, self.dtype)
        rotated = self._heads + self._kv_heads
        half = self._head_dim // 2
        kept: list[Tensor] = []

        h = F.embedding(table[_TOKENS], self.embedding)
        if self._embed_scale is not None:
            h = h * self._embed_scale
        for index, (layer, pair) in enumerate(zip(self._layers, pairs, strict=True)):
            qkv = qkv_product(self._norm(h, layer.input_norm), layer.qkv)
            if layer.qkv_bias is not None:
                qkv = qkv + layer.qkv_bias
            qkv = qkv.view(count, -1, self._head_dim)
            qk = qkv[:, :rotated]
            if layer.head_norm is not None:
                qk.copy_(self._norm(qk, layer.head_norm))
            turned = qk.roll(half, -1)
            qk.mul_(cos).addcmul_(turned, sin)
            attended = attn_product(attention.attend(pair, qkv), layer.attn_out)
            h = h + (attended if layer.attn_out_bias is None else attended + layer.attn_out_bias)
            gate_up = gate_product(self._norm(h, layer.mlp_norm), layer.gate_up)
            if layer.gate_up_bias is not None:
                gate_up = gate_up + layer.gate_up_bias
            gate, up = gate_up.chunk(2, -1)
            down = down_product(self._activation(gate).mul_(up), layer.down)
            h = h + (down if layer.down_bias is None else down + layer.down_bias)
            if features is not None and index + 1 in self.feature_layers:
                kept.append(h)
        if features is not None:
            features[table[_SLOTS], table[_PLACES]] = torch.cat(kept, -1)
        return self._norm(h, self._final_norm)

    def wanted_logits(self, table: Tensor, hidden: Tensor, count: int) -> Tensor:
        """float32 ``[count, vocab]`` of the table's wanted tokens; never a view of ``hidden``."""
        if not count:
            return hidden.new_empty(0, self.vocab_size, dtype=torch.float32)
        chosen = hidden[table[_WANTED, :count]]
        return self.plan.product("output", count)(chosen, self._output).float()
