"""Trains a trunk on the target's own answers: AdamW, cosine rate, a few epochs, unrolled forward KL."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch

from drafts.trunk import Trunk
from osd.learn.fused import mean_forward_kl
from osd.learn.losses import SparseTarget, draft_index
from osd.learn.pretrain_data import Answer, batches
from osd.learn.simulate import Simulated, simulate
from osd.learn.unroll import bf16_product, fastest_product, unroll


@dataclass(frozen=True)
class PretrainConfig:
    """Settings of a trunk's training.

    Attributes:
        epochs: Passes over the data.
        batch: Answers per optimiser step.
        rate: Peak learning rate.
        final_rate: Rate at the end of the cosine.
        warmup: Steps of linear warm-up.
        decay: AdamW weight decay on matrices.
        clip: Norm the gradient is clipped to.
        unroll: Steps of the training-time test.
        deeper_share: Share of positions that go on to the later steps, drawn anew for every batch; the
            later steps cost two thirds of the time and learn from less.
        unroll_decay: Weight of step i is ``unroll_decay ** i`` (EAGLE-3: 0.8).
        seed: Order of batches and initial weights.
    """

    epochs: int = 4
    batch: int = 8
    rate: float = 1e-3
    final_rate: float = 1e-4
    warmup: int = 30
    decay: float = 0.01
    clip: float = 1.0
    unroll: int = 3
    deeper_share: float = 1.0
    unroll_decay: float = 0.8
    seed: int = 0

    def as_dict(self) -> dict[str, float | int]:
        """The settings by name."""
        return asdict(self)


@dataclass(frozen=True)
class Epoch:
    """Report after an epoch: mean loss, seconds so far, figures per label on held-back answers."""

    number: int
    loss: float
    seconds: float
    labels: dict[str, Simulated]


def batch_loss(
    trunk: Trunk,
    embedding: torch.Tensor,
    output: torch.Tensor,
    to_draft: torch.Tensor,
    batch: Sequence[Answer],
    config: PretrainConfig,
) -> torch.Tensor:
    """Mean forward KL over the labelled positions of every step, weighted by ``unroll_decay ** i``."""
    result = unroll(_working_copy(trunk), embedding, batch, config.unroll, deeper=config.deeper_share)
    offsets = torch.tensor([0] + [a.output_length for a in batch[:-1]]).cumsum(0)
    evidence = SparseTarget.from_evidence(
        torch.cat([a.top_ids for a in batch]), torch.cat([a.top_logprobs for a in batch]), to_draft
    )
    total = torch.zeros(())
    for step, hidden in enumerate(result.hidden):
        bases = result.bases[step]
        keep = (result.remaining[bases] > step).nonzero()[:, 0]
        if not len(keep):
            continue
        label = offsets[result.rows[bases[keep]]] + result.positions[bases[keep]] + step
        normed = trunk.norm(hidden[keep], "final_norm")
        loss = mean_forward_kl(normed, trunk.tensors["output_bias"], output, evidence.rows(label))
        total = total + config.unroll_decay**step * loss
    return total


def _working_copy(trunk: Trunk) -> Trunk:
    """The trunk with matrices cast once for all steps of the unroll, where the product works in bfloat16."""
    if trunk.product is not bf16_product:
        return trunk
    cast = {n: t.bfloat16() if t.ndim == 2 and n != "feature_norm" else t for n, t in trunk.tensors.items()}
    return Trunk(trunk.shape, trunk.token_ids, cast, trunk.product)


def train(
    trunk: Trunk,
    embedding: torch.Tensor,
    output_weight: torch.Tensor,
    answers: Sequence[Answer],
    held: Sequence[Answer],
    config: PretrainConfig,
    report: Callable[[Epoch], None],
    progress: Callable[[int, int, float], None] = lambda step, steps, loss: None,
) -> None:
    """Train ``trunk``'s tensors in place.

    Args:
        trunk: What to train; its float32 tensors are the masters.
        embedding: The target's embedding ``[vocab, H]``.
        output_weight: The target's output matrix ``[vocab, H]``; frozen.
        answers: What to learn from.
        held: Answers never trained on, for the reports.
        config: Settings.
        report: Called after every epoch.
        progress: Called after every step with step, steps in all, and the loss.
    """
    trunk.product = fastest_product(trunk.shape.hidden_size)
    to_draft = draft_index(trunk.token_ids, trunk.shape.vocab_size)
    output = output_weight[trunk.token_ids].contiguous()
    if trunk.product is not torch.nn.functional.linear:
        output = output.bfloat16()
    matrices = [t for t in trunk.tensors.values() if t.ndim == 2]
    vectors = [t for t in trunk.tensors.values() if t.ndim == 1]
    for tensor in trunk.tensors.values():
        tensor.requires_grad_(True)
    groups = [{"params": matrices, "weight_decay": config.decay}, {"params": vectors, "weight_decay": 0.0}]
    optimiser = torch.optim.AdamW(groups, lr=config.rate, betas=(0.9, 0.95), foreach=True)
    steps = config.epochs * math.ceil(len(answers) / config.batch)
    done, start = 0, time.perf_counter()
    for number in range(1, config.epochs + 1):
        losses: list[float] = []
        for batch in batches(answers, config.batch, config.seed * 1000 + number):
            for group in optimiser.param_groups:
                group["lr"] = _rate(config, done, steps)
            optimiser.zero_grad()
            loss = batch_loss(trunk, embedding, output, to_draft, batch, config)
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_([*matrices, *vectors], config.clip)
            optimiser.step()
            losses.append(float(loss.detach()))
            done += 1
            progress(done, steps, losses[-1])
        with torch.no_grad():
            labels = simulate(trunk, embedding, output, held)
        report(Epoch(number, sum(losses) / len(losses), time.perf_counter() - start, labels))
    for tensor in trunk.tensors.values():
        tensor.requires_grad_(False)


def _rate(config: PretrainConfig, step: int, steps: int) -> float:
    """Linear warm-up, then a cosine from ``rate`` to ``final_rate``."""
    if step < config.warmup:
        return config.rate * (step + 1) / config.warmup
    part = (step - config.warmup) / max(1, steps - config.warmup)
    return config.final_rate + 0.5 * (config.rate - config.final_rate) * (1 + math.cos(math.pi * part))
