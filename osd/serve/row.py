"""A running request: everything the engine knows of one row of the batch."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from drafts.errors import PolydraftError
from drafts.kinds.base import DraftRow
from osd.serve.detokenize import OutputStream
from osd.serve.grammar import Grammar
from osd.serve.noise import RequestNoise
from osd.serve.processor import LogitsProcessor
from osd.types import (
    Assignment,
    FinishedRecord,
    FinishReason,
    GenerationRequest,
    Round,
    TargetEvidence,
    TokenLogprob,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outcome:
    """How a request ended: its record and text, or the error it failed with."""

    record: FinishedRecord
    text: str
    error: PolydraftError | None = None


@dataclass
class Submission:
    """A request together with the callbacks of whoever waits for it.

    Callbacks run on the engine's thread and must only hand over (a queue, a future). One that raises ends
    its own request only. ``on_tokens`` gets text, token ids, and a log-probability a token where the request
    asked for them. ``grammar`` is the compiled ``response_format``; the engine compiles it itself, in its own
    time, where it is missing. ``deadline`` (``time.monotonic()`` seconds) is set by the intake.
    """

    request: GenerationRequest
    on_tokens: Callable[[str, tuple[int, ...], tuple[TokenLogprob, ...]], None]
    on_done: Callable[[Outcome], None]
    grammar: Grammar | None = None
    deadline: float = math.inf


@dataclass
class Row:
    """State of one running request; owned by the engine's thread.

    ``slot`` is the row's place in the cache and changes when rows are compacted. ``processed`` counts
    the tokens whose keys the target's cache holds; during prefill it grows by chunks, afterwards it
    is ``len(draft.tokens) - 1``. The first ``cached_tokens`` of them were reused, not computed;
    ``prefix_read`` says that the prefix store has been asked.
    """

    submission: Submission
    slot: int
    draft: DraftRow
    output: OutputStream
    assignment: Future[Assignment]
    noise: RequestNoise | None = None
    processor: LogitsProcessor | None = None
    processed: int = 0
    cached_tokens: int = 0
    prefix_read: bool = False
    rounds: list[Round] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    evidence: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    seconds: float = 0.0
    first_token: float | None = None
    prefilled_at: float | None = None
    routing_wait: float = 0.0
    settled: bool = False
    cancelled: bool = False
    keep_evidence: bool = True
    finish: FinishReason | None = None
    error: PolydraftError | None = None

    @property
    def request(self) -> GenerationRequest:
        """The request being answered."""
        return self.submission.request

    @property
    def decoding(self) -> bool:
        """Whether prefill is complete, so that the row proposes and verifies."""
        return bool(self.rounds)

    @property
    def remaining(self) -> int:
        """Output tokens it may still emit."""
        return self.request.sampling.max_tokens - self.draft.output_length

    def settle_domain(self, served_version: Callable[[str], int]) -> None:
        """Take over the router's verdict once it is there; until then the base domain serves."""
        if self.settled or not self.assignment.done():
            return
        self.settled = True
        try:
            self.assignment.result()
        except Exception:
            log.exception("routing failed for request %s; the base domain serves it", self.draft.request_id)
            self.assignment = Future()
            self.assignment.set_result(Assignment())
        self.draft.domain = self.assignment.result().domain
        if self.prefilled_at is not None:
            self.routing_wait = time.monotonic() - self.prefilled_at
        self.note_version(served_version(self.draft.domain))

    def note_version(self, version: int) -> None:
        """Remember which expert version serves from now on."""
        if not self.versions or self.versions[-1] != version:
            self.versions.append(version)

    def record(self, finish: FinishReason, features: torch.Tensor | None) -> FinishedRecord:
        """The record of the finished request; ``features`` are copied in half precision."""
        now = time.monotonic()
        output = tuple(self.draft.tokens[self.draft.prompt_length :])
        evidence = None
        if self.evidence:
            ids = torch.cat([ids for ids, _ in self.evidence])[: len(output)]
            logprobs = torch.cat([logprobs for _, logprobs in self.evidence])[: len(output)]
            evidence = TargetEvidence(ids, logprobs)
        return FinishedRecord(
            request=self.request,
            domain=self.draft.domain,
            assignment=self.assignment.result() if self.assignment.done() else Assignment(),
            output_ids=output,
            finish=finish,
            rounds=tuple(self.rounds),
            versions=tuple(self.versions),
            evidence=evidence,
            features=features,
            cached_tokens=self.cached_tokens,
            seconds=self.seconds,
            routing_wait=self.routing_wait,
            first_token_seconds=(self.first_token or now) - self.request.arrived,
            total_seconds=now - self.request.arrived,
            logprobs=None if self.request.sampling.logprobs is None else tuple(self.logprobs),
        )
