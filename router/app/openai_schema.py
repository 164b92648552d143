"""Requests of the OpenAI API as this service takes them; what it cannot do is refused by name.

A field that is silently ignored changes an answer behind the client's back. So every field is one of:
implemented here; harmless (:data:`IGNORED`); or accepted only at the value that means "off"
(:data:`NEUTRAL`). Anything else is answered with status 400.
"""

from __future__ import annotations

from dataclasses import asdict, is_dataclass
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from drafts.config import ModelConfig
from drafts.errors import InvalidValueError, PolydraftError
from osd.types import SamplingParams
from router.app.response_format import response_format

IGNORED = frozenset({"user", "metadata", "safety_identifier", "prompt_cache_key"})
"""Fields about the client, not about the answer: taken and not used."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "modalities": (["text"],),
    "service_tier": ("auto", "default"),
    "echo": (False,),
    "suffix": ("",),
    "top_logprobs": (0,),
}
"""Fields that are not implemented, with the values that ask for nothing; null always does."""

MOST_CHOICES = 128
"""Most answers of one request: prompts times ``n``."""

DIRECT = (
    *("top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed"),
    *("min_tokens", "ignore_eos", "k", "timeout"),
)
"""Fields that reach :class:`SamplingParams` under their own name and unchanged."""


class UnsupportedFieldError(PolydraftError):
    """A field, or a value of it, that this server does not implement."""

    status = 400
    code = "unsupported_parameter"

    def __init__(self, field: str, value: object, allowed: str) -> None:
        self.field = field
        super().__init__(f"{field}: {value!r:.100} is not supported; {allowed}")


def decoding_field(name: str) -> Any:
    """A field of :class:`SamplingParams` that a request may leave out; its range stands there alone."""
    source = SamplingParams.model_fields[name]
    limits: dict[str, Any] = {}
    for item in source.metadata:
        limits |= asdict(item) if is_dataclass(item) and not isinstance(item, type) else vars(item)
    return Field(None, description=source.description, **limits)


class StreamOptions(BaseModel):
    """Options of a streamed answer."""

    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool | None = Field(None, description="Send token counts in a last chunk of their own.")


class CompletionFields(BaseModel):
    """What both endpoints share.

    These extend the OpenAI API: ``domain``, ``top_k``, ``min_p``, ``repetition_penalty``, ``min_tokens``,
    ``stop_token_ids``, ``ignore_eos``, ``k``, ``sources`` and ``timeout``.
    """

    model_config = ConfigDict(extra="allow", strict=True)

    default_max_tokens: ClassVar[int] = SamplingParams.model_fields["max_tokens"].default

    model: str | None = Field(None, description="Name of the target, as /v1/models lists it.")
    stream: bool | None = Field(None, description="Send the answer in pieces as server-sent events.")
    stream_options: StreamOptions | None = Field(None, description="Only together with stream.")
    n: int | None = Field(None, ge=1, le=16, description="Answers to every prompt.")
    best_of: int | None = Field(None, ge=1, le=16, description="Only the same as n: none is thrown away.")
    max_tokens: int | None = decoding_field("max_tokens")
    max_completion_tokens: int | None = decoding_field("max_tokens")
    min_tokens: int | None = decoding_field("min_tokens")
    temperature: float | None = decoding_field("temperature")
    top_p: float | None = decoding_field("top_p")
    top_k: int | None = decoding_field("top_k")
    min_p: float | None = decoding_field("min_p")
    repetition_penalty: float | None = decoding_field("repetition_penalty")
    presence_penalty: float | None = decoding_field("presence_penalty")
    frequency_penalty: float | None = decoding_field("frequency_penalty")
    logit_bias: dict[str, float] | None = Field(None, description="Token ids as strings, with -100..100.")
    seed: int | None = decoding_field("seed")
    stop: str | list[str] | None = Field(
        None,
        description="Up to 16 strings that end the answer; the text of a special token ends it there too.",
    )
    stop_token_ids: list[int] | None = decoding_field("stop_token_ids")
    ignore_eos: bool | None = decoding_field("ignore_eos")
    response_format: dict[str, Any] | None = Field(None, description="text, json_object or json_schema.")
    k: int | None = decoding_field("k")
    sources: list[str] | None = decoding_field("sources")
    timeout: float | None = decoding_field("timeout")
    domain: str | None = Field(None, description="Name the domain instead of letting the router decide.")
    store: bool | None = Field(None, description="False keeps the text out of memories and buffers.")

    def refuse_unsupported(self) -> None:
        """Raise for the first field that asks for more than there is, or that contradicts another.

        Raises:
            UnsupportedFieldError: A field, or a value of one, that is not implemented.
            InvalidValueError: Fields that do not go together.
        """
        for name, value in (self.model_extra or {}).items():
            if value is None or name in IGNORED:
                continue
            if name not in NEUTRAL:
                raise UnsupportedFieldError(name, value, "this server does not know the field")
            if not any(
                value == ok and isinstance(value, bool) == isinstance(ok, bool) for ok in NEUTRAL[name]
            ):
                allowed = " or ".join(repr(ok) for ok in NEUTRAL[name])
                raise UnsupportedFieldError(name, value, f"only {allowed} (or leave it out)")
        if self.stream_options is not None and not self.stream:
            raise InvalidValueError(
                "stream_options", self.stream_options.model_dump(), "only together with stream: true"
            )
        if self.best_of is not None and self.best_of != self.choices:
            raise InvalidValueError(
                "best_of", self.best_of, f"the same as n ({self.choices}), or leave it out"
            )
        limit = self.limit
        if self.min_tokens is not None and self.min_tokens > limit:
            raise InvalidValueError(
                "min_tokens", self.min_tokens, f"0..{limit}: at most max_tokens ({limit})"
            )
        if self.ignore_eos and response_format(self.response_format) is not None:
            raise InvalidValueError(
                "ignore_eos", True, "not with response_format: a complete JSON text has to end the answer"
            )

    def sampling(self) -> dict[str, Any]:
        """The decoding parameters for ``engine.submit``; absent ones are left to the engine."""
        fields: dict[str, Any] = {
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "max_tokens": self.limit,
            "stop": self._stop(),
            "stop_token_ids": None if self.stop_token_ids is None else tuple(self.stop_token_ids),
            "sources": None if self.sources is None else tuple(self.sources),
            "logit_bias": self._logit_bias(),
            "logprobs": self.wanted_logprobs,
            "response_format": response_format(self.response_format),
            **{name: getattr(self, name) for name in DIRECT},
        }
        return {name: value for name, value in fields.items() if value is not None}

    @property
    def limit(self) -> int:
        """Most tokens of the answer, by either name.

        Raises:
            InvalidValueError: Both names, with different values.
        """
        both = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(both) > 1:
            raise InvalidValueError(
                "max_completion_tokens", self.max_completion_tokens, "the same as max_tokens, or one of them"
            )
        return both.pop() or 0 if both else self.default_max_tokens

    @property
    def choices(self) -> int:
        """Answers to every prompt."""
        return 1 if self.n is None else self.n

    @property
    def wanted_logprobs(self) -> int | None:
        """Alternatives reported beside every token's log-probability; ``None`` reports none at all."""
        raise NotImplementedError

    @property
    def include_usage(self) -> bool:
        """Whether a streamed answer ends with a usage chunk."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def _stop(self) -> tuple[str, ...] | None:
        if self.stop is None:
            return None
        strings = [self.stop] if isinstance(self.stop, str) else self.stop
        if len(strings) > 16 or not all(strings):
            raise InvalidValueError("stop", self.stop, "up to 16 strings, none of them empty")
        return tuple(strings)

    def _logit_bias(self) -> dict[int, float] | None:
        if self.logit_bias is None:
            return None
        for key, bias in self.logit_bias.items():
            if not (key.isascii() and key.isdigit() and len(key) < 12):
                raise InvalidValueError(f"logit_bias.{key}", key, "a token id as the name, such as '50256'")
            if key != str(int(key)):
                allowed = f"a token id without leading zeros: '{int(key)}'"
                raise InvalidValueError(f"logit_bias.{key}", key, allowed)
            if not -100 <= bias <= 100:
                raise InvalidValueError(f"logit_bias.{key}", bias, "a number in -100..100")
        return {int(key): bias for key, bias in self.logit_bias.items()}


class ChatRequest(CompletionFields):
    """Body of ``POST /v1/chat/completions``."""

    messages: list[dict[str, Any]] = Field(min_length=1, description="The conversation so far.")
    logprobs: bool | None = Field(None, description="Report the log-probability of every token.")
    top_logprobs: int | None = Field(
        None, ge=0, le=20, description="Most probable tokens to report at every position; needs logprobs."
    )

    def refuse_unsupported(self) -> None:
        """Refuse also alternatives without log-probabilities."""
        super().refuse_unsupported()
        if self.top_logprobs and not self.logprobs:
            raise InvalidValueError("top_logprobs", self.top_logprobs, "only together with logprobs: true")

    @property
    def wanted_logprobs(self) -> int | None:
        """Alternatives beside every token, where log-probabilities are asked for."""
        return (self.top_logprobs or 0) if self.logprobs else None


class TextRequest(CompletionFields):
    """Body of ``POST /v1/completions``: the prompt is continued verbatim, without chat template."""

    default_max_tokens: ClassVar[int] = 16

    prompt: str | list[str] | list[int] | list[list[int]] = Field(
        description="A prompt or several, each a string or a list of token ids."
    )
    logprobs: int | None = Field(
        None, ge=0, le=20, description="Report log-probabilities, with this many alternatives a position."
    )

    @property
    def wanted_logprobs(self) -> int | None:
        """Alternatives beside every token, where log-probabilities are asked for."""
        return self.logprobs

    def prompts(self) -> list[str | list[int]]:
        """The prompts in order.

        Raises:
            InvalidValueError: None, or more answers than one request may ask for.
        """
        prompts: list[str | list[int]] = []
        ids: list[int] = []
        for item in [self.prompt] if isinstance(self.prompt, str) else self.prompt:
            ids.append(item) if isinstance(item, int) else prompts.append(item)
        prompts = [ids] if ids else prompts
        if not prompts:
            raise InvalidValueError("prompt", self.prompt, "at least one prompt")
        if len(prompts) * self.choices > MOST_CHOICES:
            raise InvalidValueError(
                "prompt", f"{len(prompts)} prompts", f"prompts times n ({self.choices}) up to {MOST_CHOICES}"
            )
        return prompts


class DomainRequest(BaseModel):
    """Body of ``POST /v1/domains``."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: str = Field(min_length=1, max_length=64, description="Name of the new domain.")
    description: str = Field("", max_length=2000, description="One sentence on what belongs to it.")
    examples: list[str] = Field(default_factory=list, max_length=1000, description="A few typical prompts.")
    draft: ModelConfig | None = Field(
        None, description="A draft model of its own with the target's tokenizer: {kind: model, path: …}."
    )
