"""The ports between the mind and a body: what an engine may ask of the parts it does not own.

The mind (routing, drafts, learning, statistics) implements these; an engine body calls them. Neither
imports the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Protocol

from drafts.kinds.base import DraftRow
from drafts.proposal import Price, Proposal
from drafts.version import Swap
from osd.types import Assignment, FinishedRecord, GenerationRequest


class Assigner(Protocol):
    """Assigns requests to domains, off the engine's thread."""

    def assign(self, request: GenerationRequest) -> Future[Assignment]:
        """Start the decision; the engine prefills meanwhile. The future never raises."""
        ...


class Drafter(Protocol):
    """Proposes for a batch of rows and learns which source to trust."""

    @property
    def needs_features(self) -> bool:
        """Whether the engine must keep target hidden states."""
        ...

    def propose(self, rows: Sequence[DraftRow], limits: Sequence[int], price: Price) -> list[Proposal]:
        """One proposal per row, already trimmed to what pays at ``price``."""
        ...

    def observe(
        self, rows: Sequence[DraftRow], proposals: Sequence[Proposal], emitted: Sequence[Sequence[int]]
    ) -> None:
        """The verified outcome of a step; ``emitted[i]`` is already appended to ``rows[i].tokens``."""
        ...

    def finish(self, row: DraftRow) -> None:
        """A request ended (normally or not); release and learn from it."""
        ...

    def swap(self) -> list[Swap]:
        """Adopt newly published versions. Called at a step border only."""
        ...

    def version(self, domain: str) -> int:
        """The version that serves ``domain`` now (0 = what it was born with)."""
        ...


class Observer(Protocol):
    """Takes finished requests: buffers, router, statistics."""

    def take(self, record: FinishedRecord) -> None:
        """Called on the engine's thread at a step border; must be quick."""
        ...


class Worker(Protocol):
    """Background work the engine runs in its gaps, so that it never races with a step."""

    def work(self, busy_seconds: float, idle: bool) -> bool:
        """Do one small slice if the budget allows; ``busy_seconds`` is the last step's time.

        Returns whether anything was done.
        """
        ...
