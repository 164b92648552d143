"""Tokens to text as they come: no split characters, no part of a stop string, the text of decoding all."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from osd.serve.stopping import Push, StopRule
from osd.types import FinishReason, SamplingParams

_REPLACEMENT = "\ufffd"
_LONGEST_PENDING = 32


class TextStream:
    """Incremental detokenization of one output; joined pieces equal the decoded whole.

    Decoders look at neighbours (leading spaces, bytes of one character), so a token is decoded together with
    the tokens before it back to a point where characters are complete, and what those already showed is
    subtracted. A trailing U+FFFD may be a character whose bytes are still coming and waits. Special tokens
    show nothing.

    One difference to decoding all at once is deliberate: byte-fallback decoders turn a whole run of byte
    tokens into U+FFFD when its last bytes are invalid; here characters that were complete stay.

    Args:
        tokenizer: A transformers tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._decode = _decoder(tokenizer)
        self._special = special_ids(tokenizer)
        self._window: list[int] = []
        self._settled = 0
        self._shown = 0
        self._prefix = ""

    def push(self, token: int) -> str:
        """The text that ``token`` completes."""
        if token in self._special:
            return ""
        self._window.append(token)
        text = self._pending()
        complete = text.rstrip(_REPLACEMENT)
        if len(complete) < len(text) and len(self._window) - self._settled < _LONGEST_PENDING:
            piece = complete[self._shown :]
            self._shown = max(self._shown, len(complete))
            return piece
        return self._settle(text)

    def flush(self) -> str:
        """The text of an end that stopped inside a character (U+FFFD, as decoding the whole gives)."""
        return self._settle(self._pending()) if len(self._window) > self._settled else ""

    def _pending(self) -> str:
        """Text of the tokens behind the settled ones."""
        text = self._decode(self._window)
        if text.startswith(self._prefix):
            return text[len(self._prefix) :]
        del self._window[: self._settled]
        self._settled, self._prefix = 0, ""
        return self._decode(self._window)

    def _settle(self, text: str) -> str:
        piece = text[self._shown :]
        del self._window[: self._settled]
        self._settled, self._shown = len(self._window), 0
        self._prefix = self._decode(self._window)
        return piece


class OutputStream:
    """The output of one request: tokens in, safe text and the verdict of the stop rule out.

    Args:
        tokenizer: A transformers tokenizer.
        params: The request's parameters (``stop``, ``stop_token_ids``, ``max_tokens``, ``ignore_eos``).
        eos_ids: End tokens; may be empty or ``None``.

    Raises:
        InvalidValueError: A stop string is empty.
    """

    def __init__(self, tokenizer: Any, params: SamplingParams, eos_ids: Collection[int] | None) -> None:
        self._rule = StopRule(params, eos_ids, TextStream(tokenizer))
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        """All text shown so far; exactly the joined deltas."""
        return "".join(self._pieces)

    @property
    def finish(self) -> FinishReason | None:
        """Why the output ended, ``None`` while it goes on."""
        return self._rule.finish

    def push(self, tokens: Sequence[int]) -> Push:
        """Commit a block of tokens; at the end the delta includes all that was held back."""
        push = self._rule.accept(tokens)
        self._pieces.append(push.delta)
        return push

    def close(self) -> str:
        """The text still held back when a request ends early (cancelled); empty after a normal end."""
        rest = self._rule.close()
        self._pieces.append(rest)
        return rest


def special_ids(tokenizer: Any) -> frozenset[int]:
    """Ids that decoding with ``skip_special_tokens`` leaves out."""
    added = getattr(tokenizer, "added_tokens_decoder", None)
    if added is None:
        return frozenset(tokenizer.all_special_ids)
    return frozenset(index for index, token in added.items() if token.special)


def _decoder(tokenizer: Any) -> Callable[[list[int]], str]:
    """Plain decoding, past the batch handling and clean-up of transformers where there is a fast backend."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        return lambda ids: str(backend.decode(ids, skip_special_tokens=True))
    return lambda ids: str(
        tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    )
