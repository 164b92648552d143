"""Scores other domains' experts on requests that were scored already, for the cross-acceptance matrix."""

from __future__ import annotations

from collections.abc import Callable

import torch

from drafts.bank import Expert
from drafts.cross import CrossAcceptance
from osd.learn.distill import Pending, is_right
from osd.learn.head import TrainableHead


class CrossScorer:
    """For every scored request one other domain's served expert, at a few positions, in a slice of its own.

    The hidden states are the trunk's (deltas touch MLP and output only), so they serve every expert.

    Args:
        head: The draft of an expert.
        experts: Names of the domains with a served expert of their own.
        served: The served expert of a domain.
        seed: Seed of the choice of experts and positions.
    """

    def __init__(
        self,
        head: Callable[[str], TrainableHead],
        experts: Callable[[], list[str]],
        served: Callable[[str], Expert],
        seed: int,
    ) -> None:
        self.matrix = CrossAcceptance(seed)
        self._head = head
        self._experts = experts
        self._served = served
        self._waiting: tuple[Pending, torch.Tensor] | None = None

    def take(self, item: Pending, hidden: torch.Tensor, right: torch.Tensor) -> None:
        """Count what the domain's own expert had right, ``[P]``, and have another asked about ``hidden``."""
        self.matrix.add(item.domain, item.domain, int(right.sum()), len(right))
        self._waiting = (item, hidden)

    def work(self) -> bool:
        """Ask another expert about the request taken last; False when that is done."""
        if self._waiting is None:
            return False
        (item, hidden), self._waiting = self._waiting, None
        other = self.matrix.another(item.domain, self._experts())
        if other is not None:
            rows = self.matrix.sample(len(item.positions))
            head = self._head(other)
            logits = head.logits(hidden[rows], self._served(other))
            right = is_right(logits, item.emitted[rows].to(logits.device), head.token_ids)
            self.matrix.add(other, item.domain, int(right.sum()), len(rows))
        return True

    def forget(self, name: str) -> None:
        """A domain is gone."""
        self.matrix.forget(name)
        self.drop_waiting(name)

    def drop_waiting(self, name: str) -> None:
        """Ask nobody about the domain's request taken last."""
        if self._waiting is not None and self._waiting[0].domain == name:
            self._waiting = None
