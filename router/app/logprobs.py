"""Log-probabilities in the shapes of the OpenAI API: one for chat, an older one for text completions."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any, Protocol

from osd.types import TokenLogprob

LEAST = -9999.0
"""Stands for minus infinity, which JSON has no number for; OpenAI sends the same."""


class Vocabulary(Protocol):
    """What the tokens of an answer are made of; a part of :class:`router.bodies.api.ServingEngine`."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token."""
        ...

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Tokens that an answer's text leaves out."""
        ...


class ChoiceLogprobs:
    """Shapes the log-probabilities of one choice, all at once or a piece at a time.

    A token that is only a part of a character has no text: chat completions write its bytes as escapes, as
    ``\\\\xf0\\\\x9f``, and text completions as ``bytes:\\\\xf0\\\\x9f``.

    Args:
        vocabulary: Gives the bytes of tokens.
        chat: Shape of chat completions, or of text completions.
    """

    def __init__(self, vocabulary: Vocabulary, chat: bool) -> None:
        self._vocabulary = vocabulary
        self._chat = chat
        self._special = vocabulary.special_token_ids
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._characters = 0

    def take(self, entries: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        """The ``logprobs`` object of the next tokens; ``None`` when there are none."""
        if not entries:
            return None
        if self._chat:
            return {"content": [self._position(entry) for entry in entries], "refusal": None}
        return {
            "tokens": [self._text(entry.token_id) for entry in entries],
            "token_logprobs": [_number(entry.logprob) for entry in entries],
            "top_logprobs": self._alternatives(entries),
            "text_offset": [self._offset(entry.token_id) for entry in entries],
        }

    def _position(self, entry: TokenLogprob) -> dict[str, Any]:
        top = [self._token(token, logprob) for token, logprob in entry.top]
        return {**self._token(entry.token_id, entry.logprob), "top_logprobs": top}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        content = list(self._vocabulary.token_bytes(token))
        return {"token": self._text(token), "logprob": _number(logprob), "bytes": content}

    def _alternatives(self, entries: Sequence[TokenLogprob]) -> list[dict[str, float]] | None:
        """The most probable tokens and the emitted one by text; of equal texts the more probable."""
        if not any(entry.top for entry in entries):
            return None
        found: list[dict[str, float]] = []
        for entry in entries:
            texts: dict[str, float] = {}
            for token, logprob in (*entry.top, (entry.token_id, entry.logprob)):
                texts.setdefault(self._text(token), _number(logprob))
            found.append(texts)
        return found

    def _offset(self, token: int) -> int:
        """Where in the choice's text the token begins, in characters; special tokens take no room."""
        start = self._characters
        if token not in self._special:
            self._characters += len(self._decoder.decode(self._vocabulary.token_bytes(token)))
        return start

    def _text(self, token: int) -> str:
        content = self._vocabulary.token_bytes(token)
        try:
            return content.decode()
        except UnicodeDecodeError:
            escapes = "".join(f"\\x{byte:02x}" for byte in content)
            return escapes if self._chat else f"bytes:{escapes}"


def _number(logprob: float) -> float:
    return max(logprob, LEAST)
