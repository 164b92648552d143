"""Optimistic updates: the look-ahead weights are served, the weights behind them are trained.

Two sequences (OnlineSpec, arXiv 2603.12617, Opt-Hydra in its paper form): what is served, w = u + h, steps
ahead of the training state u by the hint h of the coming step; the gradient is taken at w and applied to u. A
good hint makes up for the delay of an update, a wrong one costs its error. Here a hint is a step of the
optimiser rather than a raw gradient, so it is preconditioned as the steps are.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from drafts.bank import Expert
from osd.learn.distill import Batch
from osd.learn.learner import ExpertLearner


@dataclass
class HintError:
    """How far hints are from the steps that follow: mean of ||h - s||² over mean of ||s||².

    1 is what no hint at all would give, 0 a perfect one, 2 what steps without any correlation give.
    """

    missed: float = 0.0
    moved: float = 0.0
    steps: int = 0

    def see(self, missed: float, moved: float) -> None:
        """One step: squared distance from its hint, and its squared length."""
        self.missed += missed
        self.moved += moved
        self.steps += 1

    @property
    def value(self) -> float | None:
        """The error; ``None`` before anything moved."""
        return self.missed / self.moved if self.moved > 0.0 else None


@dataclass
class _Ahead:
    """The hint, and the training state while the masters look ahead by it."""

    hint: Expert = field(default_factory=dict)
    behind: Expert | None = None


class OptimisticLearner(ExpertLearner):
    """An :class:`ExpertLearner` that trains one step ahead of itself.

    The hint is the step before. A running mean of steps misses more (0.72 against 0.37 where six batches take
    turns): Adam's steps are running means already.

    Attributes:
        hint_error: Of all steps so far.
    """

    hint_error: HintError

    def restart(self, served: Expert) -> None:
        """Begin again from ``served``, without a hint and with a fresh optimiser."""
        self._ahead = _Ahead()
        self._kept: Expert = {}
        self.hint_error = HintError()
        super().restart(served)

    def keep(self) -> None:
        """Remember this state, its hint included, as the last good one."""
        self._come_back()
        super().keep()
        self._kept = {name: tensor.clone() for name, tensor in self._ahead.hint.items()}

    def restore(self) -> None:
        """Return to the last good state and its hint."""
        super().restore()
        self._ahead = _Ahead({name: tensor.clone() for name, tensor in self._kept.items()})

    def accumulate(self, batch: Batch, share: float = 1.0) -> float | None:
        """See :meth:`ExpertLearner.accumulate`; the gradient is taken at the look-ahead weights."""
        self._look_ahead()
        return super().accumulate(batch, share)

    def apply(self) -> bool:
        """Apply the gradient to the weights behind, and make the step taken the next hint."""
        self._come_back()
        if all(tensor.grad is None for tensor in self.masters.values()):
            return True
        before = {name: tensor.detach().clone() for name, tensor in self.masters.items()}
        if not super().apply():
            return False
        missed = moved = 0.0
        for name, tensor in self.masters.items():
            step = tensor.detach() - before[name]
            hint = self._ahead.hint.get(name)
            missed += float(((step if hint is None else step - hint) ** 2).sum())
            moved += float((step**2).sum())
            self._ahead.hint[name] = step
        self.hint_error.see(missed, moved)
        return True

    def candidate(self) -> Expert:
        """The look-ahead weights with what travels with them."""
        self._come_back()
        found = super().candidate()
        return {
            name: tensor + self._ahead.hint[name] if name in self._ahead.hint else tensor
            for name, tensor in found.items()
        }

    def figures(self) -> dict[str, object]:
        """For the statistics: how far hints are from the steps that follow."""
        error = self.hint_error.value
        return {} if error is None else {"hint_error": error}

    @torch.no_grad()
    def _look_ahead(self) -> None:
        if self._ahead.behind is None:
            self._ahead.behind = {name: tensor.detach().clone() for name, tensor in self.masters.items()}
            for name, hint in self._ahead.hint.items():
                self.masters[name].add_(hint)

    @torch.no_grad()
    def _come_back(self) -> None:
        if self._ahead.behind is not None:
            for name, tensor in self._ahead.behind.items():
                self.masters[name].copy_(tensor)
            self._ahead.behind = None
