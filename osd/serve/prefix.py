"""The prefix store: keys, values and features of texts that were computed once and are read again.

A system prompt that many requests share, or the earlier turns of a conversation, need not be computed again:
what the target wrote for those tokens is copied into the new row, bit for bit. The unit is a block of
``BLOCK`` tokens whose key is its tokens together with the block before it, so that a block can only be found
behind exactly the text it was computed behind (the idea of RadixAttention, arXiv 2312.07104, section 3, in
blocks). Keys are compared, not only hashed: no collision can hand one text's keys to another.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from drafts.errors import IntegrityError
from osd.serve.cache import SlotCache

BLOCK = 16
"""Tokens a block. Smaller ones find more of a shared text and cost more bookkeeping."""

_START = -1
_Key = tuple[int, tuple[int, ...]]


class PrefixStore:
    """Blocks of committed texts in a pool of fixed size, the least recently used given up first.

    Only committed tokens enter, never a draft's. Features enter with their keys, so a row that begins with
    reused blocks gives drafts and buffers the same hidden states as one that computed them (case A26).

    Args:
        cache: The slot cache that blocks are copied from and to; the pool has its layers, types and device.
            The pool is written once here, so that no request waits for the system to find its memory.
        tokens: Room in tokens, rounded down to whole blocks; 0 keeps nothing.
    """

    def __init__(self, cache: SlotCache, tokens: int) -> None:
        self._cache = cache
        self.blocks = max(tokens, 0) // BLOCK
        room = self.blocks * BLOCK
        texts = [pair.movedim(1, 0) for pair in cache.pairs if room]
        if cache.features is not None and room:
            texts.append(cache.features)
        pools = [text.new_zeros(*text.shape[1:-2], room, text.shape[-1]) for text in texts]
        self.bytes = sum(pool.nbytes for pool in pools)
        """Memory of the pool, which is reserved once and never grows."""
        self._parts = [(_plain(text), _plain(pool)) for text, pool in zip(texts, pools, strict=True)]
        """Of every layer, then of the features: the rows ``[row, ..., place, width]`` and the pool without
        ``row``."""
        self._sliced = cache.pairs[0].device.type == "cpu"
        self._index: dict[_Key, int] = {}
        self._keys: OrderedDict[int, _Key] = OrderedDict()
        self._free = self._all_free()
        self.requests = 0
        self.hits = 0
        self.tokens_reused = 0

    @property
    def tokens(self) -> int:
        """Tokens held now."""
        return len(self._keys) * BLOCK

    def match(self, tokens: Sequence[int]) -> list[int]:
        """Blocks of the longest stored prefix of a prompt, its last token never among them.

        The last token must be processed in any case: its logits are what the first output token comes from.
        """
        return self._chain(tokens, (len(tokens) - 1) // BLOCK)

    def load(self, row: int, blocks: Sequence[int]) -> int:
        """Copy stored blocks into the empty cache row ``row`` and commit them; returns their tokens."""
        self.requests += self.blocks > 0
        if not blocks:
            return 0
        length = len(blocks) * BLOCK
        self._cache.reserve(row, 0, length)
        for rows, pool, place, stored in self._pieces(blocks, 0):
            rows[row, ..., place, :] = pool[..., stored, :]
        self._cache.commit(row, length)
        self._touch(blocks)
        self.hits += 1
        self.tokens_reused += length
        return length

    def keep(self, row: int, tokens: Sequence[int]) -> None:
        """Store the whole blocks of ``tokens``, the committed and processed text of cache row ``row``.

        Raises:
            IntegrityError: The row holds fewer tokens than are to be stored.
        """
        wanted = len(tokens) // BLOCK
        if not self.blocks or not wanted:
            return
        if len(tokens) > self._cache.lengths[row]:
            raise IntegrityError(f"row {row}: {len(tokens)} tokens, {self._cache.lengths[row]} committed")
        chain = self._chain(tokens, wanted)
        self._touch(chain)
        known = len(chain)
        for block in self._claim(min(wanted, self.blocks) - known):
            key = (chain[-1] if chain else _START, _part(tokens, len(chain)))
            self._index[key] = block
            self._keys[block] = key
            chain.append(block)
        if len(chain) > known:
            for rows, pool, place, stored in self._pieces(chain, known):
                pool[..., stored, :] = rows[row, ..., place, :]
            self._touch(chain)

    def clear(self) -> None:
        """Forget everything, for example so that no arm of a comparison reuses what another computed."""
        self._index.clear()
        self._keys.clear()
        self._free = self._all_free()

    def as_dict(self) -> dict[str, int]:
        """Counters for the statistics."""
        return {
            "requests": self.requests,
            "hits": self.hits,
            "tokens_reused": self.tokens_reused,
            "tokens_held": self.tokens,
            "tokens_room": self.blocks * BLOCK,
            "bytes": self.bytes,
        }

    def check(self) -> None:
        """Audit the books.

        Raises:
            IntegrityError: With both sides of the broken equation.
        """
        used, free = len(self._keys), len(self._free)
        if used + free != self.blocks or set(self._keys) & set(self._free) or len(set(self._free)) != free:
            raise IntegrityError(f"prefix store: {used} used + {free} free blocks, {self.blocks} in all")
        if self._index != {key: block for block, key in self._keys.items()}:
            raise IntegrityError(f"prefix store: {len(self._index)} keys lead to {used} blocks")
        age = {block: at for at, block in enumerate(self._keys)}
        for block, (parent, _) in self._keys.items():
            if parent != _START and age.get(parent, -1) < age[block]:
                raise IntegrityError(f"prefix store: block {block} outlives {parent}, which it continues")

    def _chain(self, tokens: Sequence[int], most: int) -> list[int]:
        found: list[int] = []
        parent = _START
        for at in range(most if self._index else 0):
            block = self._index.get((parent, _part(tokens, at)))
            if block is None:
                break
            found.append(block)
            parent = block
        return found

    def _claim(self, count: int) -> list[int]:
        """Blocks to write: free ones, then the least recently used, which the caller's own are not.

        They ascend, as a text is given up from its end: the next one is to lie in fewer pieces, and forward.
        """
        claimed: list[int] = []
        while len(claimed) < count:
            if self._free:
                claimed.append(self._free.pop())
            else:
                oldest, key = self._keys.popitem(last=False)
                del self._index[key]
                claimed.append(oldest)
        return sorted(claimed)

    def _touch(self, chain: Sequence[int]) -> None:
        """Mark as used, ends first: so the oldest block of all is never one that another continues."""
        for block in reversed(chain):
            self._keys.move_to_end(block)

    def _all_free(self) -> list[int]:
        """All blocks, the first one last: they are claimed in order, so that a text lies in few pieces."""
        return list(reversed(range(self.blocks)))

    def _pieces(self, chain: Sequence[int], first: int) -> Iterator[tuple[Any, Any, slice, slice | Tensor]]:
        """Rows, pool, places in a row, places in the pool: what the blocks from ``first`` on are copied by.

        On the processor in slices, each a plain copy; elsewhere all at once, as a call costs more there.
        """
        if self._sliced:
            for at, block, count in _runs(chain, first):
                place = slice(at * BLOCK, (at + count) * BLOCK)
                stored = slice(block * BLOCK, (block + count) * BLOCK)
                for rows, pool in self._parts:
                    yield rows, pool, place, stored
        else:
            every = slice(first * BLOCK, len(chain) * BLOCK)
            places = self._places(chain[first:])
            for rows, pool in self._parts:
                yield rows, pool, every, places

    def _places(self, blocks: Sequence[int]) -> Tensor:
        """int64 ``[tokens]``: where the blocks' tokens lie in the pool."""
        first = torch.tensor(list(blocks), device=self._cache.pairs[0].device)[:, None] * BLOCK
        return (first + torch.arange(BLOCK, device=first.device)).flatten()


def _plain(tensor: Tensor) -> Tensor | npt.NDArray[np.uint8]:
    """The tensor, on the processor as an array of its bytes, which is copied in the calling thread alone.

    Torch would share out every layer's copy among its threads and wait for the slowest every time. That gains
    little on so few bytes, and costs milliseconds a layer where another process has a thread's core.
    """
    return tensor.view(torch.uint8).numpy() if tensor.device.type == "cpu" else tensor


def _runs(chain: Sequence[int], first: int) -> Iterator[tuple[int, int, int]]:
    """Pieces of ``chain`` from ``first`` on whose blocks lie one behind the other: place, block, length."""
    begin = first
    for at in range(first + 1, len(chain) + 1):
        if at == len(chain) or chain[at] != chain[at - 1] + 1:
            yield begin, chain[begin], at - begin
            begin = at


def _part(tokens: Sequence[int], at: int) -> tuple[int, ...]:
    return tuple(tokens[at * BLOCK : (at + 1) * BLOCK])
