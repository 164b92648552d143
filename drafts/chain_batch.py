"""Chains of one draft model over rows of unequal length, in one pass a depth.

Every row feeds equally many of its last tokens, what it holds of the rest is padded on the left: so the
library's own masks and windows serve any model family. Entries of speculated tokens are kept with a row
and cropped where they turn out wrong, so a row always holds what reading its text from scratch would give
(case A23).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

READ_ALONE = 16
"""A row that lags by more tokens than this is read alone first, so that the others need not read along."""

Layers = list[tuple[torch.Tensor, torch.Tensor]]
"""Keys and values ``[rows, heads, entries, D]`` of every layer."""


class Forward(Protocol):
    """A pass of the model over ``ids [R, n]`` behind ``held``; logits ``[R, vocab]`` of each next token."""

    def __call__(  # noqa: D102
        self, ids: torch.Tensor, held: Any, mask: torch.Tensor | None, names: Sequence[str]
    ) -> torch.Tensor: ...


@dataclass
class RowState:
    """One request's entries: the tokens they belong to, the first ``committed`` of them known to be final.

    Attributes:
        serves: Model, adapter and its stamp that the entries were made with.
        name: What peft calls the adapter.
    """

    serves: tuple[Any, ...]
    name: str
    held: list[int] = field(default_factory=list)
    committed: int = 0
    layers: Layers = field(default_factory=list)

    def forget_wrong(self, tokens: Sequence[int]) -> int:
        """Drop entries that ``tokens`` do not confirm, and the last one's; how many tokens are to be read."""
        unread = self.unread(tokens)
        self.crop(len(tokens) - unread)
        return unread

    def unread(self, tokens: Sequence[int]) -> int:
        """How many of ``tokens`` are to be read: what the entries do not confirm, and always the last."""
        limit = min(len(self.held), len(tokens) - 1)
        same = min(self.committed, limit)
        while same < limit and self.held[same] == tokens[same]:
            same += 1
        return len(tokens) - same

    def crop(self, length: int) -> None:
        """Keep the first ``length`` entries."""
        del self.held[length:]
        self.layers = [(k[:, :, :length], v[:, :, :length]) for k, v in self.layers] if length else []


class ChainBatch:
    """Rows that draft together.

    Args:
        states: Per row what it holds.
        texts: Per row its committed tokens.
        forward: The model.
        cache: Makes an empty cache of the library's.
    """

    def __init__(
        self, states: Sequence[RowState], texts: Sequence[Sequence[int]], forward: Forward, cache: Any
    ) -> None:
        self.states = list(states)
        self.texts = [list(text) for text in texts]
        self._forward = forward
        self._make_cache = cache
        self._device: Any = None

    def read(self, device: Any) -> torch.Tensor:
        """Read what was committed since the last chain; logits ``[R, vocab]`` after each row's last token."""
        self._device = device
        lags = [state.forget_wrong(text) for state, text in zip(self.states, self.texts, strict=True)]
        if len(lags) > 1:
            most = min(READ_ALONE, *map(len, self.texts))
            for index, lag in enumerate(lags):
                if lag > most:
                    self._read_alone(self.states[index], self.texts[index][:-1])
                    lags[index] = 1
        width = max(lags)
        for state, text in zip(self.states, self.texts, strict=True):
            state.crop(len(text) - width)
            state.committed = len(text)
        logits = self._pass([text[len(text) - width :] for text in self.texts], self._gathered())
        for state, text in zip(self.states, self.texts, strict=True):
            state.held = list(text)
        return logits

    def feed(self, tokens: Sequence[int]) -> torch.Tensor:
        """Append a drafted token to every row; logits ``[R, vocab]`` after it."""
        logits = self._pass([[token] for token in tokens], self._cache)
        for state, token in zip(self.states, tokens, strict=True):
            state.held.append(token)
        return logits

    def keep(self, chosen: Sequence[int]) -> None:
        """Go on with some rows only; every row takes its entries along."""
        self.leave()
        self.states = [self.states[i] for i in chosen]
        if self.states:
            self._cache = self._gathered()

    def leave(self) -> None:
        """Give every row its entries."""
        for index, state in enumerate(self.states):
            own = slice(index, index + 1)
            parts = [(layer.keys[own], layer.values[own]) for layer in self._cache.layers]
            pad = parts[0][0].shape[2] - len(state.held)
            state.layers = [(k[:, :, pad:].clone(), v[:, :, pad:].clone()) for k, v in parts]

    def _read_alone(self, state: RowState, tokens: Sequence[int]) -> None:
        alone = ChainBatch([state], [tokens], self._forward, self._make_cache)
        alone.read(self._device)
        alone.leave()

    def _gathered(self) -> Any:
        """A cache over all rows' entries, padded on the left."""
        cache = self._make_cache()
        longest = max(len(state.held) for state in self.states)
        model = next((state.layers for state in self.states if state.layers), [])
        for index, (like, _) in enumerate(model):
            blank = like.new_zeros(1, like.shape[1], longest, like.shape[3])
            both = []
            for part in (0, 1):
                rows = []
                for state in self.states:
                    own = state.layers[index][part] if state.layers else blank[:, :, :0]
                    rows.append(torch.cat((blank[:, :, : longest - own.shape[2]], own), dim=2))
                both.append(torch.cat(rows))
            cache.update(*both, index)
        return cache

    def _pass(self, ids: list[list[int]], cache: Any) -> torch.Tensor:
        self._cache = cache
        lengths = [len(state.held) + len(ids[0]) for state in self.states]
        mask = None
        if min(lengths) < max(lengths):
            pads = torch.tensor([max(lengths) - length for length in lengths], device=self._device)
            mask = (torch.arange(max(lengths), device=self._device)[None] >= pads[:, None]).long()
        names = [state.name for state in self.states]
        return self._forward(torch.tensor(ids, device=self._device), cache, mask, names)
