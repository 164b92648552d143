"""A token bucket of processor time: learning takes at most a share of busy time."""

from __future__ import annotations


class Budget:
    """Earns ``share`` of busy time, spends what learning takes.

    A slice is allowed while the balance is positive and may overdraw it by its own length, so the long-run
    share holds whatever the slices cost. Time spent while idle is free but counted apart.

    Args:
        share: Share of busy time, learning included, in (0, 1).
        cap: Most seconds that can be saved up, so that a quiet hour is not followed by a stall.
    """

    def __init__(self, share: float, cap: float = 0.5) -> None:
        self.rate = share / (1.0 - share)
        self.cap = cap
        self.balance = 0.0
        self.busy = 0.0
        self.spent = 0.0
        self.idle_spent = 0.0

    def earn(self, busy_seconds: float) -> None:
        """Serving took ``busy_seconds``."""
        self.busy += busy_seconds
        self.balance = min(self.cap, self.balance + self.rate * busy_seconds)

    def spend(self, seconds: float, idle: bool = False) -> None:
        """Learning, scoring, embedding or reclustering took ``seconds``."""
        if idle:
            self.idle_spent += seconds
        else:
            self.spent += seconds
            self.balance -= seconds

    @property
    def allows(self) -> bool:
        """Whether another slice may run while requests wait."""
        return self.balance > 0.0

    @property
    def share(self) -> float:
        """Measured share of busy time spent on learning; 0 before any."""
        return self.spent / (self.busy + self.spent) if self.spent else 0.0
