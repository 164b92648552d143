"""Configuration of drafts: which sources propose, and the bounds each keeps."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from drafts import kinds
from drafts.errors import InvalidValueError, UnknownNameError

MIB = 1024 * 1024


class _Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class LookupConfig(_Config):
    """Suffix match in the request's own text (prompt lookup, Saxena 2023; LLMA, arXiv 2304.04487)."""

    min_match: int = Field(
        default=1,
        ge=1,
        le=16,
        description="Shortest suffix, in tokens, that counts as a match. One-token matches are accepted "
        "about 40 % of the time, so they propose with a low confidence rather than not at all.",
    )
    max_match: int = Field(
        default=16,
        ge=1,
        le=64,
        description="Longest suffix, in tokens, that is told apart from a longer one.",
    )
    candidates: int = Field(
        default=8, ge=1, le=256, description="Earlier occurrences compared per proposal, most recent first."
    )

    @model_validator(mode="after")
    def _ordered(self) -> LookupConfig:
        if self.max_match < self.min_match:
            raise InvalidValueError("max_match", self.max_match, f"at least min_match ({self.min_match})")
        return self


class NgramConfig(_Config):
    """A domain's memory of what the target said before."""

    max_order: int = Field(
        default=4,
        ge=1,
        le=12,
        description="Longest context, in tokens. Four measured best; longer ones add only bytes.",
    )
    min_order: int = Field(
        default=1, ge=1, le=12, description="Shortest context, in tokens, that may propose."
    )
    max_bytes: int = Field(
        default=32 * MIB,
        ge=64 * 1024,
        le=16 * 1024 * MIB,
        description="Most memory per domain in bytes; the oldest contexts seen only once go first.",
    )
    max_followers: int = Field(
        default=32, ge=2, le=1024, description="Continuations kept per context; the weakest gives way."
    )
    half_life_tokens: int = Field(
        default=50_000,
        ge=100,
        le=1_000_000_000,
        description="Learned tokens after which an old observation counts half.",
    )
    own_weight: float = Field(
        default=5.0,
        ge=0.0,
        le=1000.0,
        allow_inf_nan=False,
        description="Remembered answers that one occurrence in the own text counts for; 0 ignores it.",
    )
    own_window: int = Field(
        default=4096,
        ge=0,
        le=1_000_000,
        description="Last prompt tokens that are indexed as the request's own text.",
    )
    base_weight: float = Field(
        default=0.1,
        ge=0.0,
        le=1.0,
        allow_inf_nan=False,
        description="What an observation of the base domain's memory counts in a young domain; 0 ignores it.",
    )
    base_until_tokens: int = Field(
        default=4000, ge=0, le=1_000_000_000, description="Learned tokens after which a domain stands alone."
    )
    floor: float = Field(
        default=0.1,
        ge=0.0,
        lt=1.0,
        description="Silent where its best candidate is less probable; further ones down to half of it.",
    )
    width: int = Field(default=3, ge=1, le=16, description="Candidates it may name for one position.")
    shared: bool = Field(
        default=False, description="One memory for all domains, for comparison in benchmarks."
    )

    @model_validator(mode="after")
    def _ordered(self) -> NgramConfig:
        if self.max_order < self.min_order:
            raise InvalidValueError("max_order", self.max_order, f"at least min_order ({self.min_order})")
        return self


class EagleConfig(_Config):
    """A neural head on the target's hidden states (EAGLE-3, arXiv 2503.01840)."""

    trunk: str = Field(
        default="embedded",
        min_length=1,
        description="File of the trunk that all domains share; 'embedded' is the default target's.",
    )
    rank: Annotated[int, Field(ge=1, le=1024)] | Literal["full"] = Field(
        default=16,
        description="Rank of an expert's deltas on MLP and output; with 'full' an expert can be any MLP and "
        "output, as a full copy could, at a full copy's memory.",
    )
    max_depth: int = Field(default=6, ge=1, le=32, description="Longest chain the head unrolls.")
    window: int = Field(default=512, ge=8, le=1_000_000, description="Last positions the head attends to.")


class ModelConfig(_Config):
    """A Hugging Face causal language model as draft; also a domain's ``draft: {kind: model, path: …}``."""

    kind: Literal["model"] = Field(
        default="model", description="Names the kind where a domain brings its own draft."
    )
    path: str = Field(min_length=1, description="Folder or hub name of a model with the target's tokenizer.")
    device: str = Field(
        default="auto", min_length=1, description="Torch device; 'auto' is CUDA when there, else the CPU."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto",
        description="Weights' type; 'auto' is the checkpoint's on CUDA and float32 on the CPU.",
    )
    max_depth: int = Field(default=6, ge=1, le=32, description="Longest chain, in tokens.")
    candidates: int = Field(
        default=256,
        ge=1,
        le=1_000_000,
        description="Most probable tokens that compete under the noise of a sampled request.",
    )
    rank: int = Field(
        default=16,
        ge=0,
        le=1024,
        description="Rank of each domain's LoRA adapter; 0 keeps the model as it is.",
    )


class DraftsConfig(_Config):
    """Everything about who proposes."""

    sources: tuple[str, ...] = Field(
        default=("lookup", "ngram", "eagle"),
        description="Draft kinds that may propose; none turns speculation off.",
    )
    max_depth: int = Field(default=8, ge=1, le=64, description="Deepest proposal, in tokens.")
    trees: bool = Field(
        default=True,
        description="Propose token trees; off, a proposal is one chain as long as pays.",
    )
    max_nodes: int = Field(
        default=24, ge=1, le=256, description="Most nodes of one request's tree in a step."
    )
    lookup: LookupConfig = Field(default_factory=LookupConfig, description="The request's own text.")
    ngram: NgramConfig = Field(default_factory=NgramConfig, description="The domain's memory.")
    eagle: EagleConfig = Field(default_factory=EagleConfig, description="The neural head and its experts.")
    model: ModelConfig | None = Field(
        default=None, description="One draft model for all domains without their own."
    )
    max_resident_bytes: int | None = Field(
        default=None,
        ge=1,
        description="Most memory in bytes of all draft models' weights. Of those that domains brought, the "
        "least recently used wait on the CPU, or in their files where all is on the CPU; null for no bound.",
    )
    keep_versions: int = Field(default=5, ge=1, le=1000, description="Versions kept per domain for rollback.")

    @field_validator("sources")
    @classmethod
    def _known(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for index, name in enumerate(value):
            if name not in kinds.names():
                raise UnknownNameError(f"sources[{index}]", name, kinds.names())
            if name in value[:index]:
                raise InvalidValueError(f"sources[{index}]", name, "each source at most once")
        return value
