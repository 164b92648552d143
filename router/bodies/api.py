"""What every body offers to the applications above it: submit, generate, inspect."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from drafts.config import ModelConfig
from osd.types import Assignment, FinishReason, Round, TokenLogprob
from router.bodies.buffers import DomainBuffers
from router.bodies.versions import DomainVersions

Message = Mapping[str, Any]
"""A chat message with ``role`` and ``content``, as the OpenAI API has it."""


@dataclass(frozen=True)
class Completion:
    """A finished answer and how it came about.

    Attributes:
        request_id: The id given at submission.
        text: The answer, stop strings and special tokens removed.
        token_ids: Every emitted token, the one that ended the answer included.
        prompt_tokens: Length of the prompt in tokens.
        finish_reason: Why it ended.
        domain: The domain that served it.
        assignment: The router's verdict.
        rounds: Its propose-verify-commit rounds in order; prefill's own token is the first.
        versions: Expert versions that served it, in order.
        seconds: Its share of step time; ``total_seconds`` is wall time from arrival to end.
        first_token_seconds: Wall time from arrival to the first token.
        routing_wait: Seconds it waited for the router after prefill.
        error: Why it failed, ``None`` unless ``finish_reason`` is ``error``.
        logprobs: One a token of ``token_ids``, where they were asked for.
        cached_tokens: Prompt tokens that were reused instead of computed.
    """

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    finish_reason: FinishReason
    domain: str
    assignment: Assignment
    rounds: tuple[Round, ...] = ()
    versions: tuple[int, ...] = ()
    seconds: float = 0.0
    total_seconds: float = 0.0
    first_token_seconds: float = 0.0
    routing_wait: float = 0.0
    error: str | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    cached_tokens: int = 0

    @property
    def proposed(self) -> int:
        """Draft tokens verified for this answer."""
        return sum(r.proposed for r in self.rounds)

    @property
    def accepted(self) -> int:
        """Draft tokens accepted for this answer."""
        return sum(r.accepted for r in self.rounds)


@dataclass(frozen=True)
class Delta:
    """A piece of an answer as it is generated; ``completion`` is set on the last one only.

    ``logprobs`` holds one entry a token of ``token_ids``, where they were asked for.
    """

    text: str
    token_ids: tuple[int, ...] = ()
    completion: Completion | None = None
    logprobs: tuple[TokenLogprob, ...] = ()


class Handle(Protocol):
    """A submitted request."""

    request_id: str

    def result(self, timeout: float | None = None) -> Completion:
        """Wait for the answer (seconds); ``TimeoutError`` if it takes longer.

        An answer that failed raises the :class:`~drafts.errors.PolydraftError` it failed with.
        """
        ...

    def stream(self) -> Iterator[Delta]:
        """Pieces as they come; joined texts equal ``result().text``."""
        ...

    def cancel(self) -> None:
        """Stop at the next step border and free the slot; harmless when already finished."""
        ...


@dataclass(frozen=True)
class EngineOptions:
    """Overrides of the config for one run, as the command line offers them.

    Attributes:
        learn: False freezes memories, experts and domains.
        k: Fixed speculation length; ``None`` takes the config's.
        nodes: Verify trees of this many nodes a request and step whatever they cost; ``None`` verifies
            what pays.
        sources: Draft sources instead of the configured ones; ``()`` is plain decoding.
        state_dir: State folder instead of the configured one; ``None`` takes the config's.
        keep_state: False neither reads nor writes a state folder.
        slots: Batch rows instead of the configured number.
        seed: Seed of unseeded choices instead of the configured one.
    """

    learn: bool = True
    k: int | None = None
    nodes: int | None = None
    sources: tuple[str, ...] | None = None
    state_dir: str | None = None
    keep_state: bool = True
    slots: int | None = None
    seed: int | None = None


class ServingEngine(Protocol):
    """The facade that command line, HTTP service and replay stand on."""

    @property
    def model_name(self) -> str:
        """Name of the target model, as ``/v1/models`` lists it."""
        ...

    @property
    def ready(self) -> bool:
        """Whether the engine is warm and its loop alive."""
        ...

    def submit(
        self,
        prompt: str | Sequence[int] | None = None,
        *,
        messages: Sequence[Message] | None = None,
        domain: str | None = None,
        store: bool = True,
        request_id: str | None = None,
        **sampling: Any,
    ) -> Handle:
        """Queue one request; ``sampling`` are the fields of :class:`osd.types.SamplingParams`.

        A plain ``prompt`` is wrapped as one user message by ``template=True`` (the default of
        :meth:`generate` and of the service's chat endpoint) or taken verbatim by ``template=False``.
        A prompt of token ids is taken as it is.

        Raises:
            InvalidValueError: a bad parameter, an empty or over-long prompt.
            UnknownNameError: ``domain`` or one of ``sources`` is not known; lists the known ones.
            BusyError: the queue is full.
        """
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token of the target; a special token gives its name."""
        ...

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Tokens that an answer's text leaves out."""
        ...

    @property
    def versions(self) -> DomainVersions:
        """Versions of the domains' experts."""
        ...

    @property
    def buffers(self) -> DomainBuffers:
        """What is kept of the domains' answers to learn from."""
        ...

    def stats(self) -> dict[str, Any]:
        """Statistics: ``overall``, ``domains``, ``routing``, ``learning``, ``matrix``, ``events``, …"""
        ...

    def domains(self) -> list[dict[str, Any]]:
        """Registered domains with name, description, sources, draft version, buffer and counters."""
        ...

    def add_domain(
        self,
        name: str,
        *,
        description: str = "",
        examples: Sequence[str] = (),
        draft: ModelConfig | None = None,
    ) -> None:
        """Register a domain while serving."""
        ...

    def remove_domain(self, name: str) -> None:
        """Forget a domain; running requests finish on what they began with."""
        ...

    def close(self) -> None:
        """Finish running requests, save the state and stop. Idempotent."""
        ...
