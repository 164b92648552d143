"""How a domain's acceptance develops: windows of ten requests."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from osd.types import FinishedRecord, Tally

WINDOW = 10
"""Requests per window."""

KEPT = 1000
"""Windows kept per domain; the oldest go first."""


class Timeline:
    """Windows of one domain, the last of them still filling."""

    def __init__(self) -> None:
        self._closed: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self._open = Tally()
        self._version = 0
        self._at = 0

    def add(self, record: FinishedRecord, tally: Tally, at: int) -> None:
        """Count one request; ``at`` is its place among all requests, from 1."""
        self._open.add(tally)
        self._at = at
        self._version = max([self._version, *record.versions])
        if self._open.requests >= WINDOW:
            self._closed.append(self._window())
            self._open = Tally()

    def windows(self) -> list[dict[str, Any]]:
        """All windows, the filling one included, oldest first."""
        return [*self._closed, *([self._window()] if self._open.requests else [])]

    def _window(self) -> dict[str, Any]:
        return {
            "requests": self._open.requests,
            "acceptance_rate": self._open.acceptance_rate,
            "mean_accepted_length": self._open.mean_accepted_length,
            "alpha": self._open.alpha,
            "at": self._at,
            "version": self._version,
        }

    def state(self) -> dict[str, Any]:
        """Everything, as JSON."""
        return {
            "closed": list(self._closed),
            "open": asdict(self._open),
            "version": self._version,
            "at": self._at,
        }

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> Timeline:
        """The timeline that :meth:`state` described."""
        timeline = cls()
        closed: Sequence[dict[str, Any]] = state["closed"]
        timeline._closed.extend(closed)
        timeline._open = Tally(**state["open"])
        timeline._version, timeline._at = state["version"], state["at"]
        return timeline
