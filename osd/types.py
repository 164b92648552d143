"""The vocabulary of serving: request, assignment, round, record, completion. Defined once here."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator

BASE_DOMAIN = "base"
"""The generalist: serves whatever fits no domain, and lends its weights to every new one."""


class ResponseFormat(BaseModel):
    """Structured output: the answer is a JSON text, of a schema where one is given."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["json_object", "json_schema"] = Field(description="Any JSON object, or one of the schema.")
    json_schema: dict[str, Any] | None = Field(None, description="JSON schema; needed for json_schema.")

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if (self.kind == "json_schema") != (self.json_schema is not None):
            raise ValueError(
                f"json_schema: a schema goes with kind json_schema and only there, not {self.kind}"
            )
        return self


class SamplingParams(BaseModel):
    """How one request is decoded. All of it shapes the target distribution before verification."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    temperature: float = Field(
        0.0, ge=0.0, le=10.0, allow_inf_nan=False, description="Softmax temperature; 0 is greedy."
    )
    top_p: float = Field(1.0, gt=0.0, le=1.0, description="Nucleus mass kept; 1 keeps all.")
    top_k: int = Field(0, ge=0, le=2**31 - 1, description="Tokens kept by score; 0 keeps all.")
    min_p: float = Field(
        0.0, ge=0.0, le=1.0, description="Least probability kept, as a share of the most probable token's."
    )
    repetition_penalty: float = Field(
        1.0,
        gt=0.0,
        le=10.0,
        allow_inf_nan=False,
        description="Divides positive, multiplies negative logits of tokens in prompt or output; 1 is off.",
    )
    presence_penalty: float = Field(
        0.0, ge=-2.0, le=2.0, description="Subtracted from the logit of every token in the output."
    )
    frequency_penalty: float = Field(
        0.0, ge=-2.0, le=2.0, description="Subtracted from a token's logit for each time it is in the output."
    )
    logit_bias: dict[int, Annotated[float, Field(ge=-100.0, le=100.0)]] = Field(
        default_factory=dict,
        max_length=1024,
        description="Added to the logits of these token ids; -100 forbids a token.",
    )
    seed: int | None = Field(
        None,
        ge=-(2**63),
        lt=2**64,
        description="Seed of the sampling noise; a fresh one when absent.",
    )
    choice: int = Field(0, ge=0, lt=2**31, description="Index of this choice where a prompt has several.")
    max_tokens: int = Field(256, ge=1, le=2**31 - 1, description="Most output tokens.")
    min_tokens: int = Field(0, ge=0, le=2**31 - 1, description="End tokens are forbidden before this many.")
    stop: tuple[str, ...] = Field(
        (), max_length=16, description="Strings that end the output; a special token's text, the token."
    )
    stop_token_ids: tuple[Annotated[int, Field(ge=0)], ...] = Field(
        (), max_length=64, description="Further tokens that end the output, as end tokens do."
    )
    ignore_eos: bool = Field(False, description="Continue past end tokens.")
    logprobs: int | None = Field(
        None,
        ge=0,
        le=20,
        description="Report every token's log-probability and this many alternatives; null reports none.",
    )
    response_format: ResponseFormat | None = Field(None, description="Constrain the output to JSON.")
    k: int | None = Field(
        None, ge=0, le=64, description="Cap on the depth of a proposal; 0 turns speculation off."
    )
    sources: tuple[str, ...] | None = Field(
        None, max_length=16, description="Draft sources to use for this request; null leaves the domain's."
    )
    timeout: float | None = Field(
        None,
        gt=0.0,
        le=86_400.0,
        description="Seconds from arrival after which the request ends with what it has.",
    )

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens: {self.min_tokens} exceeds max_tokens {self.max_tokens}; allowed is at most that"
            )
        return self


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    TIMEOUT = "timeout"
    ERROR = "error"


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probabilities at one emitted position, of the target's raw distribution (before any shaping).

    Attributes:
        token_id: The emitted token.
        logprob: Its natural log-probability.
        top: ``(token id, log-probability)`` of the most probable tokens, best first, as many as asked for.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class GenerationRequest:
    """One prompt to be answered.

    Attributes:
        request_id: Unique among running requests.
        prompt_ids: Token ids of the whole prompt, chat template applied.
        sampling: Decoding parameters.
        routing_text: What the router reads: the user's text, without template.
        domain: Domain named by the client, or ``None`` to let the router decide.
        store: Whether memories and buffers may keep the text.
        arrived: ``time.monotonic()`` at arrival, seconds.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    routing_text: str = ""
    domain: str | None = None
    store: bool = True
    arrived: float = field(default_factory=time.monotonic)


@dataclass(frozen=True)
class Assignment:
    """The router's verdict on one request.

    Attributes:
        domain: The domain that serves the request (``BASE_DOMAIN`` when nothing fits).
        confidence: Score of the chosen domain in [0, 1].
        runner_up: The second best domain, ``None`` when there is none.
        known: False when the request fits no domain and went to the base domain.
        seconds: Processor time the decision took.
    """

    domain: str = BASE_DOMAIN
    confidence: float = 0.0
    runner_up: str | None = None
    known: bool = False
    seconds: float = 0.0


@dataclass(frozen=True)
class Round:
    """One propose-verify-commit round of one row.

    ``proposed`` counts verified nodes; ``tested`` counts accepted nodes plus the first rejection
    (so ``alpha = accepted / tested``); ``emitted`` counts committed tokens, bonus included.
    """

    proposed: int
    accepted: int
    tested: int
    emitted: int
    source: str
    version: int


@dataclass
class Tally:
    """Counters of acceptance over rounds; every rate of the statistics is derived from these."""

    requests: int = 0
    tokens: int = 0
    seconds: float = 0.0
    target_passes: int = 0
    proposed_tokens: int = 0
    accepted_tokens: int = 0
    tested_tokens: int = 0

    def add_round(self, item: Round, seconds: float = 0.0) -> None:
        """Count one round and its share of step time (seconds)."""
        self.tokens += item.emitted
        self.seconds += seconds
        self.target_passes += 1
        self.proposed_tokens += item.proposed
        self.accepted_tokens += item.accepted
        self.tested_tokens += item.tested

    def add(self, other: Tally) -> None:
        """Add another tally's counters."""
        for name in self.__dataclass_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    @property
    def acceptance_rate(self) -> float:
        """Accepted over proposed tokens, as vLLM counts it; 0 when nothing was proposed."""
        return self.accepted_tokens / self.proposed_tokens if self.proposed_tokens else 0.0

    @property
    def alpha(self) -> float:
        """Accepted over tested positions, first rejections included; 0 when nothing was tested."""
        return self.accepted_tokens / self.tested_tokens if self.tested_tokens else 0.0

    @property
    def mean_accepted_length(self) -> float:
        """Tokens emitted per target pass, bonus included; 0 before the first pass."""
        return self.tokens / self.target_passes if self.target_passes else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Tokens over the step time shared by rows; 0 before the first pass."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @classmethod
    def from_dict(cls, figures: Mapping[str, Any]) -> Tally:
        """The counters behind :meth:`as_dict`; unknown keys are ignored."""
        tally = cls(**{name: figures[name] for name in cls.__dataclass_fields__ if name in figures})
        if "tested_tokens" not in figures and figures.get("alpha"):
            tally.tested_tokens = round(tally.accepted_tokens / figures["alpha"])
        return tally

    def as_dict(self) -> dict[str, float | int]:
        """Counters and derived rates, with the names the replay contract uses."""
        return {
            "requests": self.requests,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second,
            "target_passes": self.target_passes,
            "proposed_tokens": self.proposed_tokens,
            "accepted_tokens": self.accepted_tokens,
            "acceptance_rate": self.acceptance_rate,
            "alpha": self.alpha,
            "mean_accepted_length": self.mean_accepted_length,
        }


@dataclass(frozen=True)
class TargetEvidence:
    """The target's raw distribution (temperature 1, before shaping) at emitted positions.

    Attributes:
        top_ids: int32 ``[positions, K]``, most probable first.
        top_logprobs: float16 ``[positions, K]``.

    The tail mass of a position is ``1 - exp(top_logprobs).sum()``.
    """

    top_ids: torch.Tensor
    top_logprobs: torch.Tensor


@dataclass(frozen=True)
class FinishedRecord:
    """All that learning, routing and statistics need of a finished request.

    Attributes:
        request: The request.
        domain: The domain that served it.
        assignment: The router's verdict (also when the client named the domain).
        output_ids: Emitted tokens.
        finish: Why it ended.
        rounds: Its rounds in order.
        versions: Expert versions that proposed for it, in order of use.
        evidence: Target top-K per emitted position, ``None`` when learning is off.
        logprobs: One a token, where the request asked for them.
        cached_tokens: Prompt tokens whose keys were reused instead of computed.
        features: float16 ``[len(prompt) + len(output) - 1, F]`` hidden states of the processed
            tokens, ``None`` when no source needs them.
        seconds: Share of step time spent on it.
        routing_wait: Seconds it waited for the router after its prefill was complete.
        first_token_seconds: Arrival to first token.
        total_seconds: Arrival to end.
    """

    request: GenerationRequest
    domain: str
    assignment: Assignment
    output_ids: tuple[int, ...]
    finish: FinishReason
    rounds: tuple[Round, ...]
    versions: tuple[int, ...]
    evidence: TargetEvidence | None
    features: torch.Tensor | None
    seconds: float
    routing_wait: float
    first_token_seconds: float
    total_seconds: float
    logprobs: tuple[TokenLogprob, ...] | None = None
    cached_tokens: int = 0


@dataclass(frozen=True)
class Event:
    """Something an operator wants to know: a birth, a swap, a rejection, a rollback.

    Attributes:
        kind: ``birth``, ``publish``, ``swap``, ``update_rejected``, ``rollback``, ...
        domain: The domain concerned.
        reason: One sentence a person understands.
        numbers: The figures behind the reason.
        time: Unix time, seconds.
    """

    kind: str
    domain: str
    reason: str
    numbers: dict[str, Any] = field(default_factory=dict)
    time: float = field(default_factory=time.time)
