"""A bounded, decaying memory of n-gram counts: what followed each context in earlier answers."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import chain

import numpy as np
import torch

from drafts.errors import CheckpointError

KEY_MASK = 2**63 - 1
_MULTIPLIER = 0x9E3779B97F4A7C15 | 1
_POWERS = [pow(_MULTIPLIER, order + 1, 2**64) for order in range(16)]

CONTEXT_BYTES = 230
"""Measured bytes of a context with up to five followers: key, dict slot, small dict, queue slot."""
FOLLOWER_BYTES = 50
"""Measured bytes of a follower: its weight and token id, and dict slots of large contexts."""
_SPARED = 8
_RESCALE_ABOVE = 2.0**64


def context_keys(tokens: Sequence[int], end: int, max_order: int) -> Iterator[int]:
    """Keys (63 bits) of the contexts of order 1, 2, … that end just before ``tokens[end]``.

    Polynomial hashes, so that one more token costs one product. Two contexts of a memory share a key
    with a chance below 1e-7 at a million contexts; it costs one wrong guess, never a wrong output.
    """
    key = 0
    for order in range(min(max_order, end)):
        key = (key + (tokens[end - 1 - order] + 1) * _POWERS[order]) & KEY_MASK
        yield key


class Memory:
    """Weighted counts of (context, next token) over contexts of 1 to ``max_order`` tokens.

    An answer counts each (context, follower) once, however often it repeats it: what many answers say
    predicts the next one better than what one answer said often (tokens per pass on SQL 2.67 → 2.73).

    Decay is *forward* (Cormode et al. 2009): new observations weigh ever more, ``unit``, and readers
    divide by it, so that old ones fade without being touched. Bytes are bounded: the oldest context
    goes first, one that is still strong is spared and moves to the back of the queue.

    Args:
        max_order: Longest context, in tokens.
        max_bytes: Bound on the estimated size, in bytes.
        max_followers: Continuations kept per context.
        half_life_tokens: Learned tokens after which an observation counts half.
    """

    def __init__(self, *, max_order: int, max_bytes: int, max_followers: int, half_life_tokens: int) -> None:
        self.max_order = max_order
        self.max_bytes = max_bytes
        self.max_followers = max_followers
        self.half_life_tokens = half_life_tokens
        self.contexts: dict[int, dict[int, float]] = {}
        self.unit = 1.0
        self.tokens = 0
        self.followers = 0
        self._oldest: deque[int] = deque()

    @property
    def bytes(self) -> int:
        """Estimated size in bytes."""
        return len(self.contexts) * CONTEXT_BYTES + self.followers * FOLLOWER_BYTES

    def learn(self, tokens: Sequence[int], prompt_length: int) -> None:
        """Count the answer ``tokens[prompt_length:]``; earlier tokens only give context."""
        seen: set[tuple[int, int]] = set()
        contexts, unit = self.contexts, self.unit
        for end in range(max(prompt_length, 1), len(tokens)):
            token = tokens[end]
            for key in context_keys(tokens, end, self.max_order):
                pair = (key, token)
                if pair in seen:
                    continue
                seen.add(pair)
                followers = contexts.get(key)
                if followers is None:
                    contexts[key] = {token: unit}
                    self._oldest.append(key)
                    self.followers += 1
                elif token in followers:
                    followers[token] += unit
                else:
                    self._add_follower(followers, token)
        self._advance(max(0, len(tokens) - prompt_length))
        self._evict()

    def state(self) -> dict[str, torch.Tensor]:
        """All of it as tensors, contexts in order of age."""
        count, total = len(self.contexts), self.followers
        in_order = [self.contexts[key] for key in self._oldest]
        tokens = np.fromiter(chain.from_iterable(in_order), np.int32, total)
        weights = np.fromiter(chain.from_iterable(map(dict.values, in_order)), np.float64, total)
        return {
            "keys": torch.from_numpy(np.fromiter(self._oldest, np.int64, count)),
            "sizes": torch.from_numpy(np.fromiter(map(len, in_order), np.int32, count)),
            "followers": torch.from_numpy(tokens),
            "weights": torch.from_numpy(weights),
            "unit": torch.tensor([self.unit], dtype=torch.float64),
            "tokens": torch.tensor([self.tokens], dtype=torch.int64),
        }

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        """Become what :meth:`state` described (then trimmed if the byte bound is tighter now)."""
        missing = {"keys", "sizes", "followers", "weights", "unit", "tokens"} - set(state)
        if missing:
            raise CheckpointError(f"memory state lacks {', '.join(sorted(missing))}")
        keys, sizes = state["keys"].tolist(), state["sizes"].tolist()
        pairs = list(zip(state["followers"].tolist(), state["weights"].tolist(), strict=True))
        if len(keys) != len(sizes) or sum(sizes) != len(pairs):
            raise CheckpointError(
                f"memory state: {len(keys)} keys, {len(sizes)} sizes that add up to {sum(sizes)}, "
                f"{len(pairs)} followers"
            )
        contexts: dict[int, dict[int, float]] = {}
        at = 0
        for key, size in zip(keys, sizes, strict=True):
            contexts[key] = dict(pairs[at : at + size])
            at += size
        self.contexts = contexts
        self._oldest = deque(keys)
        self.followers = len(pairs)
        self.unit, self.tokens = float(state["unit"]), int(state["tokens"])
        self._evict()

    def _add_follower(self, followers: dict[int, float], token: int) -> None:
        if len(followers) >= self.max_followers:
            del followers[min(followers, key=followers.__getitem__)]
        else:
            self.followers += 1
        followers[token] = self.unit

    def _advance(self, count: int) -> None:
        self.tokens += count
        self.unit *= 2.0 ** (count / self.half_life_tokens)
        if self.unit > _RESCALE_ABOVE:
            for followers in self.contexts.values():
                for token in followers:
                    followers[token] /= self.unit
            self.unit = 1.0

    def _evict(self) -> None:
        spared = 0
        while self.bytes > self.max_bytes and self._oldest:
            key = self._oldest.popleft()
            if spared < _SPARED and max(self.contexts[key].values()) > 1.5 * self.unit:
                self._oldest.append(key)
                spared += 1
                continue
            self.followers -= len(self.contexts.pop(key))
            spared = 0
