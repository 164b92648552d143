"""Settings of a trunk's training; the choices that benchmarks compare are among them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from osd.learn.config import LossName


class PretrainConfig(BaseModel):
    """How a trunk is trained: what it reads, how it begins, what it minimises."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    layers: tuple[int, ...] | None = Field(
        default=None,
        min_length=1,
        description="Target layers that the head reads, ascending, of those collected; null is all of them.",
    )
    init: Literal["fresh", "target"] = Field(
        default="fresh",
        description="First weights: fresh ones, or attention, MLP and norms of the target's last layer.",
    )
    draft_vocab: int | None = Field(
        default=None, ge=64, description="Size of the draft vocabulary; null lets coverage decide."
    )
    coverage: float = Field(
        default=0.95,
        gt=0.0,
        le=1.0,
        allow_inf_nan=False,
        description="Share of held-back answer tokens that the smallest sufficient vocabulary covers.",
    )
    loss: LossName = Field(default="forward_kl", description="What is minimised, see osd.learn.losses.")
    support: Literal["top", "full"] = Field(
        default="top",
        description="Where the target's distribution is compared: at the ids collected as evidence, the "
        "rest being one outcome, or at the whole draft vocabulary, computed anew from its last layer.",
    )
    epochs: int = Field(default=5, ge=1, le=1000, description="Passes over the data.")
    batch: int = Field(default=8, ge=1, le=4096, description="Answers per optimiser step.")
    rate: float = Field(default=1e-3, gt=0.0, le=1.0, allow_inf_nan=False, description="Peak learning rate.")
    final_rate: float = Field(
        default=1e-4, ge=0.0, le=1.0, allow_inf_nan=False, description="Rate at the end of the cosine."
    )
    warmup: int = Field(default=30, ge=0, description="Steps of linear warm-up.")
    decay: float = Field(
        default=0.01, ge=0.0, allow_inf_nan=False, description="AdamW weight decay on matrices."
    )
    clip: float = Field(
        default=1.0, gt=0.0, allow_inf_nan=False, description="Norm the gradient is clipped to."
    )
    unroll: int = Field(default=3, ge=1, le=16, description="Steps of the training-time test.")
    deeper_share: float = Field(
        default=0.4,
        gt=0.0,
        le=1.0,
        description="Share of positions that go on to the later steps, drawn anew for every batch; the later "
        "steps cost two thirds of the time and learn from less.",
    )
    unroll_decay: float = Field(
        default=0.8, gt=0.0, le=1.0, description="Weight of step i is unroll_decay ** i (EAGLE-3: 0.8)."
    )
    seed: int = Field(
        default=0, ge=0, lt=2**31, description="Of the order of batches and the initial weights."
    )

    def as_dict(self) -> dict[str, Any]:
        """The settings by name, as JSON has them."""
        return self.model_dump(mode="json")
