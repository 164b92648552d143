"""Requests of the OpenAI API as this service takes them; what it cannot do is refused by name.

A field that is silently ignored changes an answer behind the client's back. So every field is one of:
implemented here; harmless (:data:`IGNORED`); or accepted only at the value that means "off"
(:data:`NEUTRAL`). Anything else is answered with status 400.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from drafts.errors import InvalidValueError, PolydraftError

IGNORED = frozenset({"user", "metadata", "safety_identifier", "prompt_cache_key"})
"""Fields about the client, not about the answer: taken and not used."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "response_format": ({"type": "text"},),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "modalities": (["text"],),
    "service_tier": ("auto", "default"),
    "echo": (False,),
    "suffix": ("",),
}
"""Fields that are not implemented, with the values that ask for nothing; null always does."""


class UnsupportedFieldError(PolydraftError):
    """A field, or a value of it, that this server does not implement."""

    status = 400
    code = "unsupported_parameter"

    def __init__(self, field: str, value: object, allowed: str) -> None:
        self.field = field
        super().__init__(f"{field}: {value!r:.100} is not supported; {allowed}")


class StreamOptions(BaseModel):
    """Options of a streamed answer."""

    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool | None = Field(None, description="Send token counts in a last chunk of their own.")


class CompletionFields(BaseModel):
    """What both endpoints share. ``domain``, ``top_k``, ``k`` and ``ignore_eos`` extend the OpenAI API."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: str | None = Field(None, description="Name of the target, as /v1/models lists it.")
    stream: bool | None = Field(None, description="Send the answer in pieces as server-sent events.")
    stream_options: StreamOptions | None = Field(None, description="Only together with stream.")
    max_tokens: int | None = Field(None, ge=1, description="Most tokens of the answer.")
    temperature: float | None = Field(
        None, ge=0, le=10, allow_inf_nan=False, description="0 is greedy; 1 when absent, as OpenAI has it."
    )
    top_p: float | None = Field(None, gt=0, le=1, description="Nucleus mass kept; 1 keeps all.")
    top_k: int | None = Field(None, ge=0, description="Tokens kept by score; 0 keeps all.")
    seed: int | None = Field(None, ge=-(2**63), lt=2**64, description="Same seed, same answer.")
    stop: str | list[str] | None = Field(None, description="Up to 16 strings that end the answer.")
    ignore_eos: bool | None = Field(None, description="Continue past end tokens.")
    k: int | None = Field(None, ge=0, le=64, description="Cap on the depth of a proposal; 0 turns it off.")
    domain: str | None = Field(None, description="Name the domain instead of letting the router decide.")
    store: bool | None = Field(None, description="False keeps the text out of memories and buffers.")

    def refuse_unsupported(self) -> None:
        """Raise :class:`UnsupportedFieldError` for the first field that asks for more than there is."""
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

    def sampling(self) -> dict[str, Any]:
        """The decoding parameters for ``engine.submit``; absent ones are left to the engine."""
        fields: dict[str, Any] = {
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "seed": self.seed,
            "max_tokens": self.max_tokens,
            "stop": self._stop(),
            "ignore_eos": self.ignore_eos,
            "k": self.k,
        }
        return {name: value for name, value in fields.items() if value is not None}

    def _stop(self) -> tuple[str, ...] | None:
        if self.stop is None:
            return None
        strings = [self.stop] if isinstance(self.stop, str) else self.stop
        if len(strings) > 16 or not all(strings):
            raise InvalidValueError("stop", self.stop, "up to 16 strings, none of them empty")
        return tuple(strings)

    @property
    def include_usage(self) -> bool:
        """Whether a streamed answer ends with a usage chunk."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class ChatRequest(CompletionFields):
    """Body of ``POST /v1/chat/completions``."""

    messages: list[dict[str, Any]] = Field(min_length=1, description="The conversation so far.")
    max_completion_tokens: int | None = Field(None, ge=1, description="Newer name of max_tokens.")

    def sampling(self) -> dict[str, Any]:
        """Decoding parameters, either name of the length limit honoured."""
        both = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(both) > 1:
            raise InvalidValueError(
                "max_completion_tokens", self.max_completion_tokens, "the same as max_tokens, or one of them"
            )
        limit = {"max_tokens": both.pop()} if both else {}
        return {**super().sampling(), **limit}


class TextRequest(CompletionFields):
    """Body of ``POST /v1/completions``: the prompt is continued verbatim, without chat template."""

    prompt: str | list[str] = Field(description="One prompt.")
    max_tokens: int | None = Field(16, ge=1, description="Most tokens of the answer; 16 as OpenAI has it.")

    def text(self) -> str:
        """The single prompt."""
        prompts = [self.prompt] if isinstance(self.prompt, str) else self.prompt
        if len(prompts) != 1:
            raise InvalidValueError("prompt", self.prompt, "exactly one prompt a request")
        return prompts[0]


class DomainRequest(BaseModel):
    """Body of ``POST /v1/domains``."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: str = Field(min_length=1, max_length=64, description="Name of the new domain.")
    description: str = Field("", max_length=2000, description="One sentence on what belongs to it.")
    examples: list[str] = Field(default_factory=list, max_length=1000, description="A few typical prompts.")
