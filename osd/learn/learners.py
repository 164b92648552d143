"""The learners by name: one expert trained plainly, optimistically, or at several rates at once."""

from __future__ import annotations

from drafts.bank import Expert
from osd.learn.config import LearnConfig
from osd.learn.ensemble import EnsembleLearner
from osd.learn.head import TrainableHead
from osd.learn.learner import ExpertLearner
from osd.learn.optimistic import OptimisticLearner

Learner = ExpertLearner | EnsembleLearner

LEARNERS: dict[str, type[ExpertLearner] | type[EnsembleLearner]] = {
    "plain": ExpertLearner,
    "optimistic": OptimisticLearner,
    "ensemble": EnsembleLearner,
}


def make_learner(head: TrainableHead, served: Expert, config: LearnConfig) -> Learner:
    """The learner that ``config.learner`` names, starting from ``served``."""
    return LEARNERS[config.learner](head, served, config)
