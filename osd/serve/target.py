"""The target model as the engine sees it: rows of tokens in, logits and hidden states out."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from drafts.errors import InvalidValueError
from osd.serve.cache import SlotCache

ROUNDS, CALM_ROUNDS = 12, 6
"""Most readings of a count's cost, and those that are enough where its two least agree."""

ALIKE = 1.25
"""Ratio up to which two readings agree."""

"""Most readings of a cost."""


@dataclass(frozen=True)
class PassRow:
    """One request's part of a target pass.

    Attributes:
        slot: Compact row index in the cache.
        start: Committed length; the new keys go to ``start``, ``start + 1``, ...
        tokens: Tokens to process, at least one.
        parents: For a tree, the parent of each of ``tokens[1:]`` as an index into ``tokens[1:]``,
            -1 for a child of ``tokens[0]``. ``None`` is a chain.
        logits_from: Logits are returned for ``tokens[logits_from:]``; ``len(tokens)`` asks for none
            and spares the output matrix.
    """

    slot: int
    start: int
    tokens: list[int]
    parents: tuple[int, ...] | None = None
    logits_from: int = 0


@dataclass(frozen=True)
class PassOutput:
    """What a target pass returns.

    Attributes:
        logits: float32 ``[logit rows, vocab]``, the rows' logits one after the other.
        offsets: The first logit row of each ``PassRow``.
    """

    logits: Tensor
    offsets: list[int]


class TargetModel(ABC):
    """A causal language model over a :class:`SlotCache`.

    Attributes:
        name: What it was loaded from.
        forward_kind: Which forward runs it.
        vocab_size: Columns of the logits.
        hidden_size: Width of the residual stream.
        max_positions: Longest text it was made for, tokens.
        eos_token_ids: Tokens that end a text; may be empty.
        feature_layers: Decoder layers passed (1-based) at which hidden states are kept: the residual
            stream, before any final norm.
        feature_width: Width of the kept hidden states, ``len(feature_layers) * hidden_size``.
        embedding: ``[vocab, hidden]`` input embedding.
        output_weight: ``[vocab, hidden]`` output matrix; may be ``embedding`` itself.
        reference: The Hugging Face model of the same weights, sharing their storage.
        most_tokens: Most tokens of one pass, all rows together; ``None`` for no bound.
    """

    name: str
    forward_kind: Literal["native", "lean", "generic"]
    vocab_size: int
    hidden_size: int
    max_positions: int
    eos_token_ids: frozenset[int]
    feature_layers: tuple[int, ...]
    feature_width: int
    device: torch.device
    dtype: torch.dtype
    embedding: Tensor
    output_weight: Tensor
    reference: Any
    most_tokens: int | None = None

    @abstractmethod
    def make_cache(self, slots: int, max_length: int, keep_features: bool) -> SlotCache:
        """A cache of ``slots`` rows of ``max_length`` tokens, with features if they are to be kept.

        Raises:
            InvalidValueError: ``max_length`` exceeds ``max_positions``.
        """

    @abstractmethod
    def forward(self, cache: SlotCache, rows: Sequence[PassRow]) -> PassOutput:
        """Process every row's tokens in one pass.

        Keys, values and features are written behind the committed length of each row; the lengths
        themselves do not change. Rows may come in any order, each slot at most once.

        Raises:
            IntegrityError: A row does not start at its committed length or does not fit.
        """

    def prepare(self, cache: SlotCache) -> None:  # noqa: B027
        """Do what makes later passes over ``cache`` faster; called once, before the first pass."""

    def measure_costs(
        self, counts: Sequence[int], *, context: int = 128, budget: float = 4.0
    ) -> dict[int, float]:
        """Milliseconds of a target pass by the number of tokens in it.

        Real passes on a scratch cache, all counts in turn and the whole round repeated, so that a
        slow moment of the machine falls on every count alike. A disturbance only ever adds time, so
        the fastest reading counts, and no count costs more than a larger one.

        Args:
            counts: Token counts to measure, each spread over at most 8 rows.
            context: Committed tokens per row while measuring.
            budget: Seconds after which no further round begins where the two least readings of every count
                agree; two rounds are always made, as the first call of a kernel prepares it. Where they
                disagree something else is running, and up to four times as long is spent.
        """
        wanted = sorted(set(counts))
        if not wanted or wanted[0] < 1:
            raise InvalidValueError("counts", list(counts), "token counts of at least 1")
        widest = max(count if count <= 8 else -(-count // 8) for count in wanted)
        context = max(0, min(context, self.max_positions - widest))
        cache = self.make_cache(min(8, wanted[-1]), context + widest, keep_features=False)
        for _ in range(cache.slots):
            row = cache.acquire()
            cache.reserve(row, 0, context)
            cache.commit(row, context)
        passes = {count: spread(count, context, self.vocab_size, 1 if count <= 8 else 8) for count in wanted}
        taken: dict[int, list[float]] = {count: [] for count in wanted}
        begin = time.perf_counter()
        for turn in range(ROUNDS):
            for count in wanted:
                taken[count].append(1e3 * timed(partial(self.forward, cache, passes[count]), self.device))
            agreed = turn > 0 and all(_agree(readings) for readings in taken.values())
            late = time.perf_counter() - begin > (budget if agreed else 4 * budget)
            if turn and (late or (agreed and turn + 1 >= CALM_ROUNDS)):
                break
        costs: dict[int, float] = {}
        ceiling = float("inf")
        for count in reversed(wanted):
            costs[count] = ceiling = min(ceiling, *taken[count])
        return dict(sorted(costs.items()))


def _agree(readings: Sequence[float]) -> bool:
    """Whether the two least readings are alike."""
    first, second, *_ = sorted(readings)
    return second <= ALIKE * first


def timed(work: Callable[[], object], device: torch.device) -> float:
    """Seconds that ``work`` takes, the device's queue drained before and after."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin


def spread(count: int, start: int, vocab_size: int, most: int) -> list[PassRow]:
    """``count`` arbitrary tokens over at most ``most`` rows, as evenly as it goes."""
    rows = min(most, count)
    sizes = [count // rows + (1 if row < count % rows else 0) for row in range(rows)]
    return [
        PassRow(row, start, [(7 * row + 13 * i) % vocab_size for i in range(size)])
        for row, size in enumerate(sizes)
    ]
