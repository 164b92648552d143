"""One update of one expert, cut into slices of a few milliseconds: train, then judge."""

from __future__ import annotations

import torch

from drafts.bank import Expert
from osd.learn.buffer import DomainBuffer
from osd.learn.config import LearnConfig
from osd.learn.distill import collate, score
from osd.learn.domain import DomainLearning
from osd.learn.guard import Comparison, Verdict
from osd.learn.head import TrainableHead
from osd.learn.learners import make_learner

FRESH = 8
"""Most records that an ensemble is charged for before an update trains on them."""


class Update:
    """At most ``config.steps`` optimiser steps in slices, then the guard's comparison record by record.

    Args:
        head: The draft.
        name: The domain.
        domain: Its learning state; the learner is made on its first update and kept between updates.
        served: The served expert, against which the candidate is judged.
        version: Its number.
        config: Settings.
        to_draft: Map from target id to draft index.
        buffer: What is learned from, the domain's own if not given.
        rival: Another expert, compared with the served one beside the candidate.
    """

    def __init__(
        self,
        head: TrainableHead,
        name: str,
        domain: DomainLearning,
        served: Expert,
        version: int,
        config: LearnConfig,
        to_draft: torch.Tensor,
        buffer: DomainBuffer | None = None,
        rival: Expert | None = None,
    ) -> None:
        self.head = head
        self.name = name
        self.domain = domain
        self.served = served
        self.version = version
        self.config = config
        self.failures = 0
        self.candidate: Expert = {}
        self.rival = rival
        self._buffer = domain.buffer if buffer is None else buffer
        self._to_draft = to_draft
        drawn = config.passes * domain.positions_since_update
        steps = min(config.steps, max(1, round(drawn / config.positions_per_step)))
        self._slices = -(-config.positions_per_step // config.positions_per_slice)
        self._slices_left = steps * self._slices
        self._comparison, self._rivalry = Comparison(), Comparison()
        self._held = list(self._buffer.held)
        domain.since_update = domain.positions_since_update = 0
        if domain.learner is None or domain.learner_version != version:
            domain.learner = make_learner(head, served, config)
            domain.learner_version = version
        domain.learner.keep()
        self._learner = domain.learner
        self._fresh = domain.fresh(FRESH) if domain.learner.wants_fresh else []

    def advance(self) -> bool:
        """Do one slice; False when nothing is left."""
        if self._fresh:
            record = self._fresh.pop(0)
            self._learner.charge(collate([(record, row) for row in range(record.size)], self._to_draft))
            return True
        if self._slices_left > 0:
            self._slices_left -= 1
            if not self._train():
                self.failures += 1
                self._learner.restore()
                self._slices_left, self._held = 0, []
            return True
        if not self.candidate:
            self.domain.charged = self.domain.buffer.arrived
            self.candidate = self._learner.candidate()
        if not self._held:
            return False
        record = self._held.pop()
        served = score(self.head, record, self.served, self._to_draft)
        mine = score(self.head, record, self.candidate, self._to_draft)
        self._comparison.add(served, mine)
        if self.rival is not None:
            self._rivalry.add(served, score(self.head, record, self.rival, self._to_draft))
        return True

    def _train(self) -> bool:
        """One slice of a step, the last of which applies it; False when something was not finite."""
        config = self.config
        drawn = self._buffer.draw(-(-config.positions_per_step // self._slices), self.head.together)
        if drawn and self._learner.accumulate(collate(drawn, self._to_draft), 1.0 / self._slices) is None:
            return False
        return self._slices_left % self._slices > 0 or self._learner.apply()

    def verdict(self) -> Verdict:
        """The guard's verdict on what was compared."""
        return self._comparison.verdict(self.config.guard.margin)

    def rival_verdict(self) -> Verdict | None:
        """The same of the rival, if there is one."""
        return None if self.rival is None else self._rivalry.verdict(self.config.guard.margin)
