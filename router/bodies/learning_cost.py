"""What learning costs in all: experts, memories, evidence, routing. One figure, held to one budget."""

from __future__ import annotations

from typing import Any

from osd.serve.engine import Engine as Core
from router.bodies.parts import DraftParts
from router.mind.router import Router


class LearningCost:
    """Adds up every second that learning and routing take, and charges them to the learner's budget.

    The learner's budget would otherwise hold for its own slices only, and memories, the target's
    probabilities kept as evidence, and embeddings would come on top.

    Args:
        core: The engine, for its busy time.
        parts: Memories and learner.
        router: For the processor time of embedding and reclustering.
    """

    def __init__(self, core: Core, parts: DraftParts, router: Router) -> None:
        self._core = core
        self._parts = parts
        self._router = router
        self._charged = 0.0

    def charge(self) -> None:
        """Charge what has come up since the last call, and let the budget follow what speculation saves."""
        if self._parts.scheduler is None:
            return
        side = self._side_seconds()
        budget = self._parts.scheduler.budget
        budget.follow(self._parts.mixture.control.saved)
        budget.charge(side - self._charged)
        self._charged = side

    def as_dict(self) -> dict[str, Any]:
        """Learning figures for the statistics; ``share_of_busy_time`` counts everything."""
        scheduler = self._parts.scheduler
        figures: dict[str, Any] = (
            {"updates": 0, "published": 0, "rolled_back": 0} if scheduler is None else scheduler.stats()
        )
        own = 0.0 if scheduler is None else scheduler.budget.spent - self._charged
        total = own + self._side_seconds()
        inside = self._parts.mixture.learn_seconds + self._core.evidence_seconds
        serving = max(self._core.busy_seconds - inside, 0.0)
        figures["busy_seconds"] = serving + total
        figures["share_of_busy_time"] = total / (serving + total) if total else 0.0
        figures["budget_share_now"] = None if scheduler is None else scheduler.budget.rate
        figures["seconds_by_part"] = {
            "experts": own,
            "memories": self._parts.mixture.learn_seconds,
            "evidence": self._core.evidence_seconds,
            "routing": self._router.processor_seconds,
        }
        return figures

    def _side_seconds(self) -> float:
        return (
            self._parts.mixture.learn_seconds + self._core.evidence_seconds + self._router.processor_seconds
        )
