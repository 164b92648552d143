"""An ensemble of step sizes: the same expert learned at several rates, the served one their weighted mean.

Ens-EAGLE (OnlineSpec, arXiv 2603.12617) in its paper form: independent learners that are never reset to each
other, so that the best rate need not be known; weights by Hedge over what each *would have lost on fresh data
before it learned from it*, a mean per position, so that the rate of Hedge means the same everywhere. A fixed
share of the weights is spread out again at each charge (Herbster & Warmuth 1998), which bounds regret against
learners that take turns: a long calm does not bury the quick one. Averaging weights is safe here, since all
learners begin with one expert and stay near it.
"""

from __future__ import annotations

import math

import torch

from drafts.bank import Expert
from osd.learn.config import LearnConfig
from osd.learn.distill import Batch
from osd.learn.head import TrainableHead
from osd.learn.learner import ExpertLearner
from osd.learn.losses import LOSSES

SHARE = 0.05
"""Share of the weights that is spread out evenly at each charge."""


class EnsembleLearner:
    """Several :class:`ExpertLearner` of one expert, one for each of ``config.ensemble_rates``.

    It has their methods, and trains them on the same batches; an update costs as many times as much.

    Args:
        head: The draft the expert belongs to.
        served: The expert to start from.
        config: Settings; ``rate`` is multiplied by each of ``ensemble_rates``.

    Attributes:
        learners: In the order of the rates.
        weights: What each counts, adding up to 1.
        losses: Sum of what each was charged.
        mean_loss: Sum of their means by the weights of the time.
        charges: How often they were charged.
    """

    wants_fresh = True
    weights: list[float]
    losses: list[float]
    mean_loss: float
    charges: int

    def __init__(self, head: TrainableHead, served: Expert, config: LearnConfig) -> None:
        self.head = head
        self.config = config
        self.learners = [
            ExpertLearner(head, served, config.model_copy(update={"rate": factor * config.rate}))
            for factor in config.ensemble_rates
        ]
        self._uniform()

    def restart(self, served: Expert) -> None:
        """Begin again from ``served``, all learners alike."""
        for learner in self.learners:
            learner.restart(served)
        self._uniform()

    def keep(self) -> None:
        """Remember this state as the last good one."""
        for learner in self.learners:
            learner.keep()

    def restore(self) -> None:
        """Return to the last good state."""
        for learner in self.learners:
            learner.restore()

    def step(self, batch: Batch) -> float | None:
        """One step of every learner; see :meth:`ExpertLearner.step`."""
        loss = self.accumulate(batch)
        return loss if loss is not None and self.apply() else None

    def accumulate(self, batch: Batch, share: float = 1.0) -> float | None:
        """Add a batch's gradient for every learner; the weighted loss, ``None`` if one is not finite."""
        found = [learner.accumulate(batch, share) for learner in self.learners]
        losses = [loss for loss in found if loss is not None]
        if len(losses) < len(found):
            return None
        return sum(weight * loss for weight, loss in zip(self.weights, losses, strict=True))

    def apply(self) -> bool:
        """One optimiser step of every learner; False when one was not finite, then all are restored."""
        applied = [learner.apply() for learner in self.learners]
        if all(applied):
            return True
        self.restore()
        return False

    @torch.no_grad()
    def charge(self, batch: Batch) -> None:
        """Reweigh by what every learner loses on positions that none has learned from; before it does.

        A batch on which some loss is not finite charges nobody.
        """
        if not len(batch.emitted):
            return
        loss = LOSSES[self.config.loss]
        charged = [
            float(loss(self.head.logits(batch.hidden, learner.candidate()), batch.target).mean())
            for learner in self.learners
        ]
        if not all(map(math.isfinite, charged)):
            return
        least = min(charged)
        scaled = [
            weight * math.exp(-self.config.ensemble_sharpness * (value - least))
            for weight, value in zip(self.weights, charged, strict=True)
        ]
        self.mean_loss += sum(w * value for w, value in zip(self.weights, charged, strict=True))
        self.losses = [total + value for total, value in zip(self.losses, charged, strict=True)]
        self.charges += 1
        total, even = sum(scaled), SHARE / len(scaled)
        self.weights = [(1.0 - SHARE) * value / total + even for value in scaled]

    @property
    def is_finite(self) -> bool:
        """Whether every learner's weights are finite."""
        return all(learner.is_finite for learner in self.learners)

    def candidate(self) -> Expert:
        """The weighted mean of the learners' weights, with what travels with them."""
        experts = [learner.candidate() for learner in self.learners]
        return {
            name: _mean(self.weights, [expert[name] for expert in experts])
            if tensor.is_floating_point()
            else tensor
            for name, tensor in experts[0].items()
        }

    def figures(self) -> dict[str, object]:
        """For the statistics: weight by factor, and regret against the best single rate a charge."""
        if not self.charges:
            return {}
        factors = [str(factor) for factor in self.config.ensemble_rates]
        return {
            "ensemble_weights": dict(zip(factors, self.weights, strict=True)),
            "ensemble_regret": (self.mean_loss - min(self.losses)) / self.charges,
        }

    def _uniform(self) -> None:
        count = len(self.learners)
        self.weights = [1.0 / count] * count
        self.losses = [0.0] * count
        self.mean_loss, self.charges = 0.0, 0


def _mean(weights: list[float], tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([w * tensor for w, tensor in zip(weights, tensors, strict=True)]).sum(0)
