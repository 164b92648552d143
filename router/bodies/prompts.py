"""From what a client sends to what the target reads: template, tokens, and the router's text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from drafts.errors import ContextLengthError, InvalidValueError
from router.bodies.api import Message
from router.bodies.chat import normalise_messages


class PromptBuilder:
    """Makes prompt tokens and routing text of one request, from the same messages.

    Args:
        tokenizer: The target's tokenizer; its chat template is used where it has one.
        limit: Most tokens of prompt and answer together.
    """

    def __init__(self, tokenizer: Any, limit: int) -> None:
        self._tokenizer = tokenizer
        self.limit = limit

    def build(
        self,
        prompt: str | Sequence[int] | None,
        messages: Sequence[Message] | None,
        template: bool,
    ) -> tuple[tuple[int, ...], str]:
        """Token ids of the prompt and the text the router reads.

        A plain prompt is one user message when ``template`` is set, and verbatim text otherwise. Token ids
        are taken as they are, and the router reads their text.

        Raises:
            InvalidValueError: Neither or both given, an empty prompt, or messages that are not text.
            ContextLengthError: No room for an answer; names both lengths.
        """
        if (prompt is None) == (messages is None):
            raise InvalidValueError("prompt", prompt, "either a prompt or messages, not both")
        if messages is None:
            assert prompt is not None
            if not isinstance(prompt, str):
                return self._given(prompt)
            _check_text("prompt", prompt)
            messages = [{"role": "user", "content": prompt}]
            if not template or self._tokenizer.chat_template is None:
                return self._checked(self._tokenizer(prompt)["input_ids"]), prompt
        messages = normalise_messages(list(messages))
        for index, message in enumerate(messages):
            _check_text(f"messages[{index}].content", str(message["content"]))
        if self._tokenizer.chat_template is None:
            text = "\n".join(str(message["content"]) for message in messages)
            return self._checked(self._tokenizer(text)["input_ids"]), routing_text(messages)
        ids = self._tokenizer.apply_chat_template(
            [dict(message) for message in messages], add_generation_prompt=True, return_dict=True
        )["input_ids"]
        return self._checked(ids), routing_text(messages)

    def _given(self, ids: Sequence[int]) -> tuple[tuple[int, ...], str]:
        size = len(self._tokenizer)
        for index, token in enumerate(ids):
            if not 0 <= token < size:
                raise InvalidValueError(f"prompt[{index}]", token, f"a token id in 0..{size - 1}")
        return self._checked(ids), str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def _checked(self, ids: Sequence[int]) -> tuple[int, ...]:
        if not ids:
            raise InvalidValueError("prompt", "", "at least one token")
        if len(ids) >= self.limit:
            raise ContextLengthError(len(ids), self.limit)
        return tuple(ids)


def _check_text(field: str, text: str) -> None:
    """Refuse text that is no text: half of a surrogate pair cannot be encoded."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidValueError(field, ascii(text[error.start]), "text without lone surrogates") from error


def routing_text(messages: Sequence[Message]) -> str:
    """What the router reads: the last user message (the system prompt says nothing of the request)."""
    for message in reversed(messages):
        if message.get("role") == "user":
            return str(message.get("content") or "")
    return ""
