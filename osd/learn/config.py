"""Configuration of online learning: buffer, loss, updates, guard and budget."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat

MIB = 1024 * 1024

LossName = Literal["forward_kl", "reverse_kl", "jensen_shannon", "total_variation", "acceptance"]
"""A name in :data:`osd.learn.losses.LOSSES`."""


class _Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class BufferConfig(_Config):
    """The distillation buffer of one domain."""

    max_bytes: int = Field(default=32 * MIB, ge=64 * 1024, description="Most memory per domain in bytes.")
    max_age_seconds: float = Field(
        default=30 * 86400.0,
        gt=0.0,
        allow_inf_nan=False,
        description="Records older than this are dropped, in seconds.",
    )
    policy: Literal["recency", "fifo", "reservoir"] = Field(
        default="recency",
        description="What is kept and drawn: recency and fifo drop the oldest, reservoir keeps a uniform "
        "sample of all traffic; recency also draws newer records more often.",
    )
    recency_half_life: int = Field(
        default=64, ge=1, description="With recency, a record this many records old is drawn half as often."
    )
    window: int = Field(default=192, ge=8, le=65536, description="Last positions of a record that are read.")
    positions_per_record: int = Field(
        default=64,
        ge=1,
        le=4096,
        description="Output positions kept per record, spread evenly over its window.",
    )
    hold_back: int = Field(
        default=5,
        ge=2,
        le=1000,
        description="Every n-th record is held back for the guard and never trained on.",
    )
    held_records: int = Field(default=16, ge=1, le=10_000, description="Newest held-back records kept.")


class GuardConfig(_Config):
    """When an update is published, and when a published one is taken back."""

    min_positions: int = Field(
        default=96, ge=1, description="Held-back positions needed before any update is judged."
    )
    margin: float = Field(
        default=0.0,
        ge=-1.0,
        le=1.0,
        description="Least gain in held-back overlap for an update to be published.",
    )
    watch_records: int = Field(
        default=24,
        ge=0,
        le=10_000,
        description="Records after a swap on which the new version is compared with the old.",
    )
    min_watch_records: int = Field(default=6, ge=2, description="Records before a rollback may be decided.")
    rollback_z: float = Field(
        default=2.5,
        gt=0.0,
        le=10.0,
        description="Standard errors of fall in live agreement that roll a version back.",
    )


class LearnConfig(_Config):
    """How experts learn while serving."""

    enabled: bool = Field(default=True, description="Learn at all; off freezes every expert.")
    budget_share: float = Field(
        default=0.05,
        gt=0.0,
        lt=1.0,
        description="Most of busy time that learning may take; under load it takes at most half of what "
        "speculation saves. Idle time is free.",
    )
    queue_records: int = Field(
        default=64,
        ge=1,
        le=100_000,
        description="Finished requests waiting to be scored; the oldest gives way.",
    )
    update_every: int = Field(
        default=8, ge=1, description="Newly scored records of a domain that make it due for an update."
    )
    steps: int = Field(default=32, ge=1, le=100_000, description="Most optimiser steps per update.")
    passes: float = Field(
        default=1.0,
        gt=0.0,
        le=1000.0,
        description="Positions drawn per update, as a multiple of those that arrived since the last one. "
        "More than about one pass over few records learns them by heart.",
    )
    positions_per_step: int = Field(default=128, ge=1, le=65536, description="Positions per optimiser step.")
    positions_per_slice: int = Field(
        default=32,
        ge=1,
        le=65536,
        description="Positions whose gradient is computed between two engine steps, so that none waits long.",
    )
    learner: Literal["plain", "optimistic", "ensemble"] = Field(
        default="plain",
        description="plain serves the trained weights; optimistic serves them one hinted step ahead; "
        "ensemble trains one copy for each of ensemble_rates and serves their weighted mean (OnlineSpec, "
        "arXiv 2603.12617).",
    )
    ensemble_rates: tuple[PositiveFloat, ...] = Field(
        default=(0.25, 1.0, 4.0),
        min_length=2,
        max_length=8,
        description="With learner ensemble, the rates as multiples of rate; an update costs as many times.",
    )
    ensemble_sharpness: float = Field(
        default=4.0,
        gt=0.0,
        le=1000.0,
        allow_inf_nan=False,
        description="With learner ensemble, by how much weights follow a nat of loss on fresh positions.",
    )
    generalist: bool = Field(
        default=True,
        description="The base domain's expert learns from all domains' requests, and serves each domain "
        "until an expert of its own is better on what the domain holds back.",
    )
    loss: LossName = Field(default="forward_kl", description="Distillation loss.")
    focus: Literal["wrong", "weighted", "all", "rounds"] = Field(
        default="weighted",
        description="Positions that count: those where this expert was wrong; those, with the right ones "
        "polished by right_loss; all alike; or the last of each round, as OSD has it (whatever drafted it).",
    )
    right_share: float = Field(
        default=0.9,
        ge=0.0,
        le=1.0,
        allow_inf_nan=False,
        description="With focus weighted, share of the loss that positions the expert had right make up.",
    )
    right_loss: LossName = Field(
        default="total_variation",
        description="With focus weighted, the loss of positions the expert had right.",
    )
    rate: float = Field(
        default=5e-4,
        gt=0.0,
        le=1.0,
        allow_inf_nan=False,
        description="AdamW learning rate of the output deltas.",
    )
    inner_factor: float = Field(
        default=0.2, ge=0.0, le=100.0, description="Rate of the MLP deltas, as a multiple of rate."
    )
    bias_factor: float = Field(
        default=6.0, ge=0.0, le=100.0, description="Rate of the output bias, as a multiple of rate."
    )
    clip: float = Field(
        default=1.0, gt=0.0, allow_inf_nan=False, description="Norm the gradient is clipped to."
    )
    seed: int = Field(default=0, ge=0, description="Seed of the draws from the buffer.")
    buffer: BufferConfig = Field(default_factory=BufferConfig, description="The distillation buffer.")
    guard: GuardConfig = Field(default_factory=GuardConfig, description="The guard.")
