"""Answers in the shapes of the OpenAI API, whole and in pieces, with what speculation did beside them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from osd.types import FinishReason
from router.app.choices import Answers
from router.app.logprobs import ChoiceLogprobs, Vocabulary
from router.bodies.api import Completion

REASONS = {FinishReason.LENGTH: "length", FinishReason.TIMEOUT: "timeout"}
"""Reasons but ``stop``. ``timeout`` extends the OpenAI API, which has no time limit and no name for one."""


def usage(answers: Answers) -> dict[str, Any]:
    """Token counts over all choices; accepted and rejected draft tokens together are the proposed ones.

    A prompt counts once, however many choices it has; of it, only what no choice had to compute is cached.
    """
    prompt = sum(group[0].prompt_tokens for group in answers.by_prompt)
    cached = sum(min(choice.cached_tokens for choice in group) for group in answers.by_prompt)
    tokens = sum(len(choice.token_ids) for choice in answers.completions)
    proposed = sum(choice.proposed for choice in answers.completions)
    accepted = sum(choice.accepted for choice in answers.completions)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": tokens,
        "total_tokens": prompt + tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": proposed - accepted,
        },
    }


def speculation(completions: Sequence[Completion]) -> dict[str, Any]:
    """The ``polydraft`` object: the router's verdict and what the drafts contributed.

    Of several choices it has the first one's verdict, the sums, and every choice by itself in ``choices``.
    """
    first = completions[0]
    passes = sum(len(choice.rounds) for choice in completions)
    tokens = sum(len(choice.token_ids) for choice in completions)
    content: dict[str, Any] = {
        "domain": first.domain,
        "confidence": first.assignment.confidence,
        "runner_up": first.assignment.runner_up,
        "known": first.assignment.known,
        "versions": list(dict.fromkeys(version for choice in completions for version in choice.versions)),
        "rounds": passes,
        "drafted": sum(choice.proposed for choice in completions),
        "accepted": sum(choice.accepted for choice in completions),
        "mean_accepted_length": tokens / passes if passes else 0.0,
    }
    if len(completions) > 1:
        content["choices"] = [speculation([choice]) for choice in completions]
    return content


def finish_reason(completion: Completion) -> str:
    """``stop``, ``length`` or ``timeout``, taken from the generator on every path."""
    return REASONS.get(completion.finish_reason, "stop")


@dataclass(frozen=True)
class AnswerShape:
    """Builds the objects of one answer.

    Args:
        request_id: Id of the answer.
        model: Name of the target.
        chat: Chat completion, or text completion.
        vocabulary: Gives the bytes of tokens, where log-probabilities are reported.
        include_usage: Whether pieces carry a null ``usage`` and a last one the counts.
    """

    request_id: str
    model: str
    chat: bool
    vocabulary: Vocabulary
    include_usage: bool = False
    created: int = field(default_factory=lambda: int(time.time()))

    def _object(self, kind: str, choices: list[dict[str, Any]], **extra: Any) -> dict[str, Any]:
        head = {"id": self.request_id, "object": kind, "created": self.created, "model": self.model}
        return {**head, "choices": choices, **extra}

    def logprobs(self) -> ChoiceLogprobs:
        """Shapes the log-probabilities of one choice; only for requests that asked for them."""
        return ChoiceLogprobs(self.vocabulary, self.chat)

    def whole(self, answers: Answers) -> dict[str, Any]:
        """The answer of a request that is not streamed."""
        choices = [self._whole_choice(index, choice) for index, choice in enumerate(answers.completions)]
        kind = "chat.completion" if self.chat else "text_completion"
        return self._object(kind, choices, usage=usage(answers), polydraft=speculation(answers.completions))

    def _whole_choice(self, index: int, completion: Completion) -> dict[str, Any]:
        content: dict[str, Any] = {"text": completion.text}
        if self.chat:
            content = {"message": {"role": "assistant", "content": completion.text, "refusal": None}}
        logprobs = self.logprobs().take(completion.logprobs) if completion.logprobs else None
        reason = finish_reason(completion)
        return {"index": index, **content, "logprobs": logprobs, "finish_reason": reason}

    def _piece(self, choices: list[dict[str, Any]], **extra: Any) -> dict[str, Any]:
        if self.include_usage:
            extra = {"usage": None, **extra}
        return self._object("chat.completion.chunk" if self.chat else "text_completion", choices, **extra)

    def _choice(
        self,
        index: int,
        text: str | None,
        logprobs: dict[str, Any] | None = None,
        reason: str | None = None,
        **delta: Any,
    ) -> dict[str, Any]:
        content: dict[str, Any]
        if self.chat:
            content = {"delta": {**delta, **({} if text is None else {"content": text})}}
        else:
            content = {"text": text or ""}
        return {"index": index, **content, "logprobs": logprobs, "finish_reason": reason}

    def first(self, index: int) -> dict[str, Any] | None:
        """The piece that names the role of a choice; text completions have none."""
        return self._piece([self._choice(index, "", role="assistant")]) if self.chat else None

    def piece(self, index: int, text: str, logprobs: dict[str, Any] | None = None) -> dict[str, Any]:
        """A piece of a choice."""
        return self._piece([self._choice(index, text, logprobs)])

    def last(
        self, index: int, completion: Completion, logprobs: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The piece that says why a choice ended; ``logprobs`` are of tokens that show no text."""
        choice = self._choice(index, None, logprobs, finish_reason(completion))
        return self._piece([choice], polydraft=speculation([completion]))

    def counts(self, answers: Answers) -> dict[str, Any]:
        """The usage piece, sent only where it was asked for."""
        return self._piece([], usage=usage(answers))
