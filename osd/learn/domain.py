"""Learning state of one domain: buffer, training state, live agreement per version, watch."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from drafts.bank import Expert
from osd.learn.buffer import DomainBuffer
from osd.learn.guard import Watch
from osd.learn.learners import Learner
from osd.learn.record import BufferRecord

RECENT = 16
"""Records whose agreement tells how much there is to gain."""


@dataclass
class Agreement:
    """Positions that a version had right, counted before they trained anything."""

    right: int = 0
    positions: int = 0
    records: int = 0

    @property
    def mean(self) -> float:
        """Share of positions right; 0 before any."""
        return self.right / self.positions if self.positions else 0.0


@dataclass
class DomainLearning:
    """Everything learning keeps about a domain.

    Attributes:
        buffer: Its distillation buffer.
        learner: Training state, ``None`` before the first update and after one that made things
            clearly worse; an update that merely is not better yet is trained on.
        learner_version: Version that the training state continues.
        watch: Running comparison of the version served now with the one before.
        live: Agreement by version.
        since_update: Records scored since the last update began.
        positions_since_update: Their positions that may be trained on.
        newest: The record scored last.
        charged: Number of the first record that learners were not charged for yet.
        followed: The version taken over from the generalist last; the domain follows it while this is served.
        challenged: Whether the generalist has a version that was not compared with the domain's own yet.
    """

    buffer: DomainBuffer
    learner: Learner | None = None
    learner_version: int = 0
    watch: Watch | None = None
    live: dict[int, Agreement] = field(default_factory=dict)
    since_update: int = 0
    positions_since_update: int = 0
    newest: BufferRecord | None = None
    charged: int = 0
    followed: int = 0
    challenged: bool = False
    _recent: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    _served: tuple[int, Expert] | None = None

    def observe(self, record: BufferRecord) -> bool:
        """Count a scored record and put it in the buffer; whether it was held back."""
        live = self.live.setdefault(record.version, Agreement())
        live.right += int(record.right.sum())
        live.positions += record.size
        live.records += 1
        self.newest = record
        held = self.buffer.add(record)
        self.count(record, held)
        return held

    def count(self, record: BufferRecord, held: bool) -> None:
        """Count a record to learn from, whichever domain's buffer keeps it."""
        self.since_update += 1
        if not held:
            self._recent.append(record.agreement)
            self.positions_since_update += record.size

    def fresh(self, most: int) -> list[BufferRecord]:
        """The newest records that nothing was charged for nor trained on, oldest first; once."""
        found = [record for record in self.buffer.training if record.number >= self.charged]
        self.charged = self.buffer.arrived
        return found[-most:]

    def follow(self, version: int, expert: Expert) -> None:
        """Notice that another version is served, whoever published it, and begin to watch it."""
        if self._served is not None and self._served[0] != version:
            before, weights = self._served
            self.watch = Watch(version, before, weights) if version > before else None
        self._served = (version, expert)

    def is_due(self, update_every: int, min_positions: int, buffers: Sequence[DomainBuffer] = ()) -> bool:
        """Whether enough was scored since the last update and enough is held back to judge one.

        ``buffers`` are what it learns from, its own if none are given.
        """
        if self.since_update < update_every:
            return False
        read = buffers or (self.buffer,)
        held = sum(record.size for buffer in read for record in buffer.held)
        return held >= min_positions and any(buffer.training for buffer in read)

    @property
    def gain(self) -> float:
        """Traffic since the last update times headroom: where an update is expected to pay most."""
        recent = self._recent or [record.agreement for record in self.buffer.training[-RECENT:]]
        agreement = sum(recent) / max(1, len(recent))
        return self.since_update * (1.0 - agreement)

    def live_state(self) -> dict[str, list[int]]:
        """Agreement by version, as JSON."""
        return {str(version): list(vars(seen).values()) for version, seen in self.live.items()}

    def load_live(self, state: Mapping[str, Sequence[int]]) -> None:
        """Restore :meth:`live_state`."""
        self.live = {int(version): Agreement(*seen) for version, seen in state.items()}

    def figures(self) -> dict[str, object]:
        """For the statistics, what the learner tells among them; safe from any thread."""
        return {
            **({} if self.learner is None else self.learner.figures()),
            "buffer_records": len(self.buffer.training),
            "held_back_records": len(self.buffer.held),
            "buffer_positions": self.buffer.positions,
            "buffer_bytes": self.buffer.nbytes,
            "scored_records": self.buffer.arrived,
            "agreement_by_version": {version: live.mean for version, live in dict(self.live).items()},
        }
