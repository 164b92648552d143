"""Trains a copy of one expert: AdamW on float32 masters; wrong positions distilled, right ones polished."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch

from drafts.bank import Expert
from osd.learn.config import LearnConfig
from osd.learn.distill import Batch, is_right
from osd.learn.head import TrainableHead, weights_of
from osd.learn.losses import LOSSES


@dataclass
class _Good:
    """A state to return to: weights and optimiser."""

    weights: Expert
    optimiser: dict[str, Any] = field(default_factory=dict)


class ExpertLearner:
    """The training state of one domain's expert. What is served is never touched, only copied.

    Optimistic and ensemble learners have the same methods.

    Args:
        head: The draft the expert belongs to.
        served: The expert to start from, with what travels with it.
        config: Rate, clip, loss and focus.
    """

    wants_fresh = False
    """Whether :meth:`charge` makes use of data that was not learned from yet."""

    def __init__(self, head: TrainableHead, served: Expert, config: LearnConfig) -> None:
        self.head = head
        self.config = config
        self.fixed = {name: t for name, t in served.items() if not t.is_floating_point()}
        self.masters: Expert = {}
        self.restart(served)

    def restart(self, served: Expert) -> None:
        """Begin again from ``served`` with a fresh optimiser."""
        self.masters = {
            n: t.detach().float().clone().requires_grad_(True) for n, t in weights_of(served).items()
        }
        groups = [{"params": [tensor], "lr": self._rate(name)} for name, tensor in self.masters.items()]
        self.optimiser = torch.optim.AdamW(
            groups, lr=self.config.rate, betas=(0.9, 0.95), weight_decay=0.0, foreach=True
        )
        self.keep()

    def keep(self) -> None:
        """Remember this state as the last good one."""
        weights = {name: tensor.detach().clone() for name, tensor in self.masters.items()}
        self._good = _Good(weights, copy.deepcopy(self.optimiser.state_dict()))

    def restore(self) -> None:
        """Return to the last good state, optimiser included (case A29)."""
        with torch.no_grad():
            for name, tensor in self.masters.items():
                tensor.copy_(self._good.weights[name])
        self.optimiser.load_state_dict(copy.deepcopy(self._good.optimiser))

    def charge(self, batch: Batch) -> None:
        """See :meth:`osd.learn.ensemble.EnsembleLearner.charge`; one learner alone has nothing to weigh."""

    def figures(self) -> dict[str, object]:
        """What it tells of itself for the statistics."""
        return {}

    def step(self, batch: Batch) -> float | None:
        """One optimiser step on one batch; see :meth:`accumulate` and :meth:`apply`."""
        loss = self.accumulate(batch)
        return loss if loss is not None and self.apply() else None

    def accumulate(self, batch: Batch, share: float = 1.0) -> float | None:
        """Add ``share`` of a batch's gradient; the loss, or ``None`` when it is not finite.

        A batch whose positions all weigh nothing is a no-op with loss 0. Means are over the weight, so the
        rate does not depend on how many positions were wrong (ALGORITHMS.md, 5.4).
        """
        with torch.enable_grad():
            logits = self.head.logits(batch.hidden, {**self.masters, **self.fixed})
            loss = self._loss(logits, batch)
            if loss is None:
                return 0.0
            if not bool(torch.isfinite(loss)):
                self.optimiser.zero_grad()
                return None
            (share * loss).backward()  # type: ignore[no-untyped-call]
        return float(loss.detach())

    def apply(self) -> bool:
        """One optimiser step by what was accumulated; False when it is not finite and nothing changed."""
        if all(tensor.grad is None for tensor in self.masters.values()):
            return True
        norm = torch.nn.utils.clip_grad_norm_(list(self.masters.values()), self.config.clip)
        if not bool(torch.isfinite(norm)):
            self.optimiser.zero_grad()
            return False
        self.optimiser.step()
        self.optimiser.zero_grad()
        if not self.is_finite:
            self.restore()
            return False
        return True

    @property
    def is_finite(self) -> bool:
        """Whether every master weight is finite."""
        return all(bool(torch.isfinite(tensor).all()) for tensor in self.masters.values())

    def candidate(self) -> Expert:
        """A copy of the masters with what travels with them, as the bank loads it."""
        weights = {name: tensor.detach().clone() for name, tensor in self.masters.items()}
        return {**weights, **self.fixed}

    def _rate(self, name: str) -> float:
        """Rate of one tensor: with few records the output learns best, the MLP slower, the bias faster."""
        if name == "output_bias":
            return self.config.rate * self.config.bias_factor
        return self.config.rate * (1.0 if name.startswith("output") else self.config.inner_factor)

    def _loss(self, logits: torch.Tensor, batch: Batch) -> torch.Tensor | None:
        """The configured loss where this expert is wrong, and what keeps and sharpens what it has right.

        ``None`` when no position counts. Distilling wrong positions alone lowers agreement on later
        requests, since the few records are learned by heart; polishing the right ones by total variation,
        which has no gradient where the head is far off, raises it (docs/decisions.md). The means are those
        of the positions given, hence of a slice where a step is cut into slices.
        """
        config = self.config
        if config.focus == "all":
            return LOSSES[config.loss](logits, batch.target).mean()
        if config.focus == "rounds":
            found = LOSSES[config.loss](logits, batch.target)[batch.ends]
            return found.mean() if len(found) else None
        right = is_right(logits.detach(), batch.emitted, self.head.token_ids)
        share = config.right_share if config.focus == "weighted" else 0.0
        terms = (
            (LOSSES[config.loss], (~right).float(), 1.0 - share),
            (LOSSES[config.right_loss], right.float(), share),
        )
        parts = [
            weight * (loss(logits, batch.target) * counts).sum() / counts.sum()
            for loss, counts, weight in terms
            if weight > 0.0 and float(counts.sum()) > 0.0
        ]
        return torch.stack(parts).sum() if parts else None
