"""Answers in the shapes of the OpenAI API, whole and in pieces, with what speculation did beside them."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from osd.types import FinishReason
from router.bodies.api import Completion


def usage(completion: Completion) -> dict[str, Any]:
    """Token counts; accepted and rejected draft tokens together are the proposed ones."""
    return {
        "prompt_tokens": completion.prompt_tokens,
        "completion_tokens": len(completion.token_ids),
        "total_tokens": completion.prompt_tokens + len(completion.token_ids),
        "completion_tokens_details": {
            "accepted_prediction_tokens": completion.accepted,
            "rejected_prediction_tokens": completion.proposed - completion.accepted,
        },
    }


def speculation(completion: Completion) -> dict[str, Any]:
    """The ``polydraft`` object: the router's verdict and what the drafts contributed."""
    passes = len(completion.rounds)
    return {
        "domain": completion.domain,
        "confidence": completion.assignment.confidence,
        "runner_up": completion.assignment.runner_up,
        "known": completion.assignment.known,
        "versions": list(completion.versions),
        "rounds": passes,
        "drafted": completion.proposed,
        "accepted": completion.accepted,
        "mean_accepted_length": len(completion.token_ids) / passes if passes else 0.0,
    }


def finish_reason(completion: Completion) -> str:
    """``stop`` or ``length``, taken from the generator on every path."""
    return "length" if completion.finish_reason == FinishReason.LENGTH else "stop"


@dataclass(frozen=True)
class AnswerShape:
    """Builds the objects of one answer.

    Args:
        request_id: Id of the answer.
        model: Name of the target.
        chat: Chat completion, or text completion.
        include_usage: Whether pieces carry a null ``usage`` and a last one the counts.
    """

    request_id: str
    model: str
    chat: bool
    include_usage: bool = False
    created: int = field(default_factory=lambda: int(time.time()))

    def _object(self, kind: str, choices: list[dict[str, Any]], **extra: Any) -> dict[str, Any]:
        head = {"id": self.request_id, "object": kind, "created": self.created, "model": self.model}
        return {**head, "choices": choices, **extra}

    def whole(self, completion: Completion) -> dict[str, Any]:
        """The answer of a request that is not streamed."""
        content: dict[str, Any] = {"text": completion.text}
        if self.chat:
            content = {"message": {"role": "assistant", "content": completion.text, "refusal": None}}
        choice = {"index": 0, **content, "logprobs": None, "finish_reason": finish_reason(completion)}
        kind = "chat.completion" if self.chat else "text_completion"
        return self._object(kind, [choice], usage=usage(completion), polydraft=speculation(completion))

    def _piece(self, choices: list[dict[str, Any]], **extra: Any) -> dict[str, Any]:
        if self.include_usage:
            extra = {"usage": None, **extra}
        return self._object("chat.completion.chunk" if self.chat else "text_completion", choices, **extra)

    def _choice(self, text: str | None, reason: str | None = None, **delta: Any) -> dict[str, Any]:
        content: dict[str, Any]
        if self.chat:
            content = {"delta": {**delta, **({} if text is None else {"content": text})}}
        else:
            content = {"text": text or ""}
        return {"index": 0, **content, "logprobs": None, "finish_reason": reason}

    def first(self) -> dict[str, Any] | None:
        """The piece that names the role; text completions have none."""
        return self._piece([self._choice("", role="assistant")]) if self.chat else None

    def piece(self, text: str) -> dict[str, Any]:
        """A piece of the answer."""
        return self._piece([self._choice(text)])

    def last(self, completion: Completion) -> dict[str, Any]:
        """The piece that says why the answer ended."""
        choice = self._choice(None, finish_reason(completion))
        return self._piece([choice], polydraft=speculation(completion))

    def counts(self, completion: Completion) -> dict[str, Any]:
        """The usage piece, sent only where it was asked for."""
        return self._piece([], usage=usage(completion))
