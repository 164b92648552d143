"""Trains a trunk on the target's own answers: AdamW, cosine rate, a few epochs, unrolled distillation."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from drafts.trunk import Product, Trunk
from osd.learn.fused import mean_loss
from osd.learn.goals import Goals, goals
from osd.learn.losses import SparseTarget
from osd.learn.pretrain_config import PretrainConfig
from osd.learn.pretrain_data import Answer, batches
from osd.learn.pretrain_state import Epoch, identity, load_training, save_training
from osd.learn.simulate import simulate
from osd.learn.unroll import bf16_product, fastest_product, unroll
from osd.lent import Lent

PRODUCTS: dict[str, Product] = {"plain": F.linear, "bfloat16": bf16_product}
"""Matrix products by name; a training goes on with the one it began with."""


@dataclass(frozen=True)
class Step:
    """Report after an optimiser step: its number of all, its loss, and answer tokens seen so far."""

    number: int
    steps: int
    loss: float
    tokens: int


def batch_loss(
    trunk: Trunk,
    embedding: torch.Tensor,
    output: torch.Tensor,
    goal: SparseTarget,
    batch: Sequence[Answer],
    config: PretrainConfig,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Mean loss over the labelled positions of every step, weighted by ``unroll_decay ** i``.

    Args:
        trunk: The head.
        embedding: The target's embedding ``[vocab, H]``.
        output: The target's output rows of the draft vocabulary ``[V, H]``.
        goal: The target's distribution at all output positions of ``batch``.
        batch: Answers.
        config: Settings.
        generator: Of the positions that go deeper.
    """
    result = unroll(
        _working_copy(trunk),
        embedding,
        batch,
        config.unroll,
        deeper=config.deeper_share,
        generator=generator,
    )
    offsets = torch.tensor([0] + [a.output_length for a in batch[:-1]]).cumsum(0)
    total = torch.zeros(())
    for step, hidden in enumerate(result.hidden):
        bases = result.bases[step]
        keep = (result.remaining[bases] > step).nonzero()[:, 0]
        if not len(keep):
            continue
        label = offsets[result.rows[bases[keep]]] + result.positions[bases[keep]] + step
        normed = trunk.norm(hidden[keep], "final_norm")
        loss = mean_loss(config.loss, normed, trunk.tensors["output_bias"], output, goal.rows(label))
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
    lent: Lent,
    answers: Sequence[Answer],
    held: Sequence[Answer],
    config: PretrainConfig,
    report: Callable[[Epoch], None] = lambda epoch: None,
    progress: Callable[[Step], None] = lambda step: None,
    checkpoint: Path | None = None,
) -> list[Epoch]:
    """Train ``trunk``'s tensors in place; returns the reports of all epochs.

    Args:
        trunk: What to train; its float32 tensors are the masters.
        lent: What the target lends.
        answers: What to learn from.
        held: Answers never trained on, for the reports.
        config: Settings.
        report: Called after every epoch, also after those that ``checkpoint`` brought back.
        progress: Called after every step.
        checkpoint: File that keeps the training after every epoch. One that is there is gone on with, and
            the result is the same to the last bit; it stays when training is done.

    Raises:
        InvalidValueError: The target does not allow ``config.support``.
        CheckpointError: ``checkpoint`` is damaged, of another training, or cannot be written.
    """
    goal = goals(trunk, lent, config)
    made_by = "" if checkpoint is None else identity(trunk, answers, held, config)
    optimiser = _optimiser(trunk, config)
    reports: list[Epoch] = []
    if checkpoint is not None and checkpoint.exists():
        name, reports = load_training(checkpoint, made_by, trunk, optimiser)
        trunk.product = PRODUCTS[name]
        for epoch in reports:
            report(epoch)
    else:
        trunk.product = fastest_product(trunk.shape.hidden_size)
    name = next(n for n, product in PRODUCTS.items() if product is trunk.product)
    output = lent.output[trunk.token_ids].contiguous()
    if trunk.product is bf16_product:
        output = output.bfloat16()
    before = reports[-1].seconds if reports else 0.0
    start = time.perf_counter()
    for number in range(len(reports) + 1, config.epochs + 1):
        loss = _epoch(trunk, lent.embedding, output, goal, optimiser, answers, config, number, progress)
        with torch.no_grad():
            labels = simulate(trunk, lent.embedding, output, held)
        reports.append(Epoch(number, loss, before + time.perf_counter() - start, labels))
        if checkpoint is not None:
            save_training(checkpoint, made_by, trunk, optimiser, name, reports)
        report(reports[-1])
    for tensor in trunk.tensors.values():
        tensor.requires_grad_(False)
    return reports


def _optimiser(trunk: Trunk, config: PretrainConfig) -> torch.optim.AdamW:
    """AdamW over all tensors, decay on matrices only."""
    for tensor in trunk.tensors.values():
        tensor.requires_grad_(True)
    matrices = [t for t in trunk.tensors.values() if t.ndim == 2]
    vectors = [t for t in trunk.tensors.values() if t.ndim == 1]
    groups = [{"params": matrices, "weight_decay": config.decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.rate, betas=(0.9, 0.95), foreach=True)


def _epoch(
    trunk: Trunk,
    embedding: torch.Tensor,
    output: torch.Tensor,
    goal: Goals,
    optimiser: torch.optim.AdamW,
    answers: Sequence[Answer],
    config: PretrainConfig,
    number: int,
    progress: Callable[[Step], None],
) -> float:
    """One pass over the answers; returns the mean loss."""
    cut = list(batches(answers, config.batch, config.seed * 1000 + number))
    tokens = (number - 1) * sum(answer.output_length for answer in answers)
    parameters = [tensor for group in optimiser.param_groups for tensor in group["params"]]
    losses: list[float] = []
    for done, batch in enumerate(cut, start=(number - 1) * len(cut)):
        for group in optimiser.param_groups:
            group["lr"] = _rate(config, done, config.epochs * len(cut))
        optimiser.zero_grad()
        draws = torch.Generator().manual_seed((config.seed << 32) + done)
        loss = batch_loss(trunk, embedding, output, goal(batch), batch, config, draws)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(parameters, config.clip)
        optimiser.step()
        losses.append(float(loss.detach()))
        tokens += sum(answer.output_length for answer in batch)
        progress(Step(done + 1, config.epochs * len(cut), losses[-1], tokens))
    return sum(losses) / len(losses)


def _rate(config: PretrainConfig, step: int, steps: int) -> float:
    """Linear warm-up, then a cosine from ``rate`` to ``final_rate``."""
    if step < config.warmup:
        return config.rate * (step + 1) / config.warmup
    part = (step - config.warmup) / max(1, steps - config.warmup)
    return config.final_rate + 0.5 * (config.rate - config.final_rate) * (1 + math.cos(math.pi * part))
