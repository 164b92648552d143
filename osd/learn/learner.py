"""Trains a copy of one expert: AdamW on float32 masters, loss where this expert is wrong."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch

from drafts.bank import TABLE, Expert
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

    Args:
        head: The draft the expert belongs to.
        served: The expert to start from, with its id table.
        config: Rate, clip, loss and focus.
    """

    def __init__(self, head: TrainableHead, served: Expert, config: LearnConfig) -> None:
        self.head = head
        self.config = config
        self.table = served[TABLE]
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

    def step(self, batch: Batch) -> float | None:
        """One optimiser step; the loss, or ``None`` when something was not finite and nothing changed.

        A batch whose positions all weigh nothing is a no-op with loss 0. The mean is over the weight, so the
        rate does not depend on how many positions were wrong (ALGORITHMS.md, 5.4).
        """
        with torch.enable_grad():
            logits = self.head.logits(batch.hidden, self.masters)
            weight = self._weights(logits.detach(), batch)
            total = weight.sum()
            if float(total) <= 0.0:
                return 0.0
            loss = (LOSSES[self.config.loss](logits, batch.target) * weight).sum() / total
            self.optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(list(self.masters.values()), self.config.clip)
        if not bool(torch.isfinite(norm) & torch.isfinite(loss)):
            self.optimiser.zero_grad()
            return None
        self.optimiser.step()
        if not self.is_finite:
            self.restore()
            return None
        return float(loss.detach())

    @property
    def is_finite(self) -> bool:
        """Whether every master weight is finite."""
        return all(bool(torch.isfinite(tensor).all()) for tensor in self.masters.values())

    def candidate(self) -> Expert:
        """A copy of the masters with the id table, as the bank loads it."""
        weights = {name: tensor.detach().clone() for name, tensor in self.masters.items()}
        return {**weights, TABLE: self.table}

    def _rate(self, name: str) -> float:
        """Rate of one tensor: with few records the output learns best, the MLP slower, the bias faster."""
        if name == "output_bias":
            return self.config.rate * self.config.bias_factor
        return self.config.rate * (1.0 if name.startswith("output") else self.config.inner_factor)

    def _weights(self, logits: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Weight of each position by the configured focus, float ``[N]``."""
        if self.config.focus == "all":
            return torch.ones(len(batch.emitted), device=logits.device)
        right = is_right(logits, batch.emitted, self.head.token_ids)
        low = self.config.right_weight if self.config.focus == "weighted" else 0.0
        return torch.where(right, low, 1.0)
