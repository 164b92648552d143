"""The cross-acceptance matrix: how often each domain's draft is right on the text of every domain.

A draft that has specialised is better on its own domain than the others' drafts are: the diagonal stands out.
Two domains whose drafts do equally well on each other's text are one domain, however far apart they lie.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

HALF_LIFE = 2000.0
"""Positions of a cell after which an observation counts half: drafts change, and so does traffic."""

MOST_CELLS = 4096
"""Cells kept, those of 64 domains; beyond it the one with fewest positions goes."""

POSITIONS = 16
"""Positions at which another domain's draft is asked about a finished request."""


class CrossAcceptance:
    """Faded counts by expert and domain: positions asked, and those where the best guess was the token.

    Read from any thread, written by one.

    Args:
        seed: Seed of the choice of drafts and positions.
        most: Most cells kept.
    """

    def __init__(self, seed: int = 0, most: int = MOST_CELLS) -> None:
        self.most = most
        self._cells: dict[tuple[str, str], tuple[float, float]] = {}
        self._random = random.Random(seed)

    def add(self, expert: str, domain: str, right: int, positions: int) -> None:
        """The draft of ``expert`` was right at ``right`` of ``positions`` positions of ``domain``."""
        old_right, old_positions = self._cells.get((expert, domain), (0.0, 0.0))
        left = 0.5 ** (positions / HALF_LIFE)
        self._cells[expert, domain] = left * old_right + right, left * old_positions + positions
        if len(self._cells) > self.most:
            others = (cell for cell in self._cells if cell != (expert, domain))
            del self._cells[min(others, key=lambda cell: self._cells[cell][1])]

    def another(self, domain: str, names: Sequence[str]) -> str | None:
        """One of ``names`` at random that is not ``domain`` itself."""
        others = [name for name in names if name != domain]
        return self._random.choice(others) if others else None

    def sample(self, positions: int) -> list[int]:
        """At most :data:`POSITIONS` of ``range(positions)``, ascending."""
        return sorted(self._random.sample(range(positions), min(POSITIONS, positions)))

    def figures(self) -> dict[str, dict[str, dict[str, float]]]:
        """By expert and domain: ``agreement``, the share of positions it had right, and ``positions``."""
        rows: dict[str, dict[str, dict[str, float]]] = {}
        for (expert, domain), (right, positions) in sorted(self._cells.copy().items()):
            cell = {"agreement": right / positions if positions else 0.0, "positions": positions}
            rows.setdefault(expert, {})[domain] = cell
        return rows

    def forget(self, name: str) -> None:
        """A domain is gone, as a row and as a column."""
        self._cells = {cell: counts for cell, counts in self._cells.items() if name not in cell}

    def state(self) -> dict[str, Any]:
        """All counts, as JSON."""
        return {"cells": [[*cell, *counts] for cell, counts in self._cells.items()]}

    def load_state(self, state: Mapping[str, Any], known: Sequence[str]) -> None:
        """Restore :meth:`state`; cells of names that are not ``known`` are left out."""
        self._cells = {
            (str(expert), str(domain)): (float(right), float(positions))
            for expert, domain, right, positions in state.get("cells", ())
            if expert in known and domain in known
        }
