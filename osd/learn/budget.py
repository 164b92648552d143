"""A token bucket of processor time: learning takes at most a share of busy time."""

from __future__ import annotations

FADE = 0.98
"""How the longest slice of late is forgotten, per slice."""

GAIN_SHARE = 0.5
"""Share of the time that speculation saves which learning may take."""

LEAST_SHARE = 0.005
"""Share of busy time that learning may take in any case, so that it can come back."""


class Budget:
    """Earns ``share`` of busy time, spends what learning takes.

    A slice is allowed while the balance covers one as long as the longest of late, so the share is not
    overdrawn by learning itself, whatever its slices cost. Time spent while idle is free but counted apart.

    Args:
        share: Share of serving time, in (0, 1). Learning itself is not counted as serving, so the share of
            both together is lower still.
        cap: Most seconds that can be saved up, so that a quiet hour is not followed by a stall.
    """

    def __init__(self, share: float, cap: float = 0.5) -> None:
        self.rate = self.most = share
        self.cap = cap
        self.balance = 0.0
        self.busy = 0.0
        self.spent = 0.0
        self.idle_spent = 0.0
        self._slice = 0.0

    def follow(self, saved: float | None) -> None:
        """Live on what speculation saves, so that learning never makes a server slower than plain decoding.

        Args:
            saved: Share of time that speculation saves; ``None`` where it is not known yet.
        """
        self.rate = self.most if saved is None else min(self.most, max(GAIN_SHARE * saved, LEAST_SHARE))

    def earn(self, busy_seconds: float) -> None:
        """Serving took ``busy_seconds``."""
        self.busy += busy_seconds
        self.balance = min(self.cap, self.balance + self.rate * busy_seconds)

    def spend(self, seconds: float, idle: bool = False) -> None:
        """A slice of learning took ``seconds``."""
        if idle:
            self.idle_spent += seconds
        else:
            self.charge(seconds)
            self._slice = min(max(seconds, FADE * self._slice), self.cap / 2)

    def charge(self, seconds: float) -> None:
        """Something that is no slice and cannot wait (evidence, memories, embeddings) took ``seconds``."""
        self.spent += seconds
        self.balance -= seconds

    @property
    def allows(self) -> bool:
        """Whether another slice may run while requests wait."""
        return self.balance > self._slice

    @property
    def share(self) -> float:
        """Learning as a share of serving time; 0 before any."""
        return self.spent / self.busy if self.busy else 0.0
