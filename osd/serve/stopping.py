"""Where a committed block ends: end and stop tokens, stop strings, the token limit, in that order.

A block of accepted tokens is walked one token at a time, so the result is what plain decoding gives, however
the tokens were cut into blocks.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple, Protocol

from drafts.errors import InvalidValueError
from osd.types import FinishReason, SamplingParams


def with_special_stops(params: SamplingParams, tokenizer: Any, vocab_size: int) -> SamplingParams:
    """``params``, the special tokens whose text is one of its ``stop`` strings being ``stop_token_ids`` too.

    A special token shows no text, so the string alone would never be found. Ids at or beyond ``vocab_size``
    are never emitted and left out.
    """
    if not params.stop:
        return params
    added = getattr(tokenizer, "added_tokens_decoder", {})
    named = [
        index
        for index, token in added.items()
        if token.special and token.content in params.stop and index < vocab_size
    ]
    ids = tuple(dict.fromkeys((*params.stop_token_ids, *named)))
    return params if ids == params.stop_token_ids else params.model_copy(update={"stop_token_ids": ids})


class TextSource(Protocol):
    """Turns tokens into text as they come."""

    def push(self, token: int) -> str:
        """The text that ``token`` completes; empty while a character is incomplete."""
        ...

    def flush(self) -> str:
        """The text of an incomplete end."""
        ...


class Push(NamedTuple):
    """What became of a block.

    Attributes:
        kept: Tokens of the block that belong to the output: a prefix of the block, the end token or the
            token that completes a stop string included.
        delta: Text that is now safe to show: it can no longer turn out to begin a stop string.
        finish: Why the output ended in this block, ``None`` while it goes on.
    """

    kept: int
    delta: str
    finish: FinishReason | None


class StopStrings:
    """Finds the first stop string in growing text and holds back whatever may begin one.

    "First" is the one that completes at the earliest character, and among those the one that began first:
    a property of the text alone.

    Raises:
        InvalidValueError: A stop string is empty.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        for index, stop in enumerate(stops):
            if not stop:
                raise InvalidValueError(f"stop[{index}]", stop, "a stop string has at least one character")
        self._stops = tuple(stops)
        self._held = ""
        self.matched = False

    def feed(self, piece: str) -> str:
        """Text that is safe to show after ``piece``; sets ``matched`` and cuts at a stop string."""
        held = self._held + piece
        found = [(at + len(stop), at) for stop in self._stops if (at := held.find(stop)) >= 0]
        if found:
            self.matched = True
            self._held = ""
            return held[: min(found)[1]]
        size = max((_overlap(held, stop) for stop in self._stops), default=0)
        safe = len(held) - size
        self._held = held[safe:]
        return held[:safe]

    def flush(self) -> str:
        """The held tail, which began no stop string after all."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper prefix of ``stop`` that ends ``text``."""
    sizes = range(min(len(text), len(stop) - 1), 0, -1)
    return next((size for size in sizes if text.endswith(stop[:size])), 0)


class StopRule:
    """Decides, for one request, where its output ends.

    For each token in turn: an end token or one of ``stop_token_ids`` ends the output, is counted, and shows
    no text, whatever its text is (what stops is never shown, be it token or string); then a stop string that
    the token completes ends it, the token being kept and the text cut before the string; then ``max_tokens``
    ends it. So a stop wins over the limit where both fall on one token. ``ignore_eos`` concerns the target's
    end tokens only, not ``stop_token_ids``; ``min_tokens`` holds back tokens (in the logits), not strings.

    Args:
        params: ``stop``, ``stop_token_ids``, ``max_tokens`` and ``ignore_eos`` are read.
        eos_ids: End tokens; may be empty or ``None``.
        text: Source of the text of the tokens.
    """

    def __init__(self, params: SamplingParams, eos_ids: Collection[int] | None, text: TextSource) -> None:
        self._max_tokens = params.max_tokens
        ends = () if params.ignore_eos else eos_ids or ()
        self._end_ids = frozenset((*ends, *params.stop_token_ids))
        self._text = text
        self._stops = StopStrings(params.stop)
        self.tokens = 0
        self.finish: FinishReason | None = None

    def accept(self, tokens: Sequence[int]) -> Push:
        """Take a block; after the end nothing more is kept and ``finish`` stays."""
        delta: list[str] = []
        kept = 0
        for token in tokens:
            if self.finish is not None:
                break
            kept += 1
            delta.append(self._take(token))
        return Push(kept, "".join(delta), self.finish)

    def _take(self, token: int) -> str:
        self.tokens += 1
        shown = ""
        if token in self._end_ids:
            self.finish = FinishReason.STOP
        else:
            shown = self._stops.feed(self._text.push(token))
            if self._stops.matched:
                self.finish = FinishReason.STOP
                return shown
            if self.tokens >= self._max_tokens:
                self.finish = FinishReason.LENGTH
        return shown + self.close() if self.finish else shown

    def close(self) -> str:
        """What is still held back: an incomplete character, or what might have begun a stop string."""
        if self._stops.matched:
            return ""
        return self._stops.feed(self._text.flush()) + self._stops.flush()
