"""The cross-acceptance matrix laid out: rows are drafts, columns domains; for the terminal and the report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.markup import escape
from rich.table import Table

LEAST_POSITIONS = 48
"""Positions from which on a cell is shown: the standard error is 0.07 at most then."""

UNKNOWN = "–"


@dataclass(frozen=True)
class Cell:
    """One draft on one domain's text.

    Attributes:
        own: Whether it is the domain's own draft.
        share: Of positions it had right; ``None`` where too few were asked.
        positions: Positions asked, faded.
    """

    own: bool
    share: float | None
    positions: float

    @property
    def text(self) -> str:
        """The share with two digits, or a dash."""
        return UNKNOWN if self.share is None else f"{self.share:.2f}"


@dataclass(frozen=True)
class Row:
    """One domain's draft on every domain."""

    name: str
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class Grid:
    """A whole matrix; drafts and domains come in one order, so that the diagonal is one."""

    columns: tuple[str, ...]
    rows: tuple[Row, ...]


def grid(figures: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> Grid:
    """The figures of one kind of draft (``stats()["matrix"]["experts"]``, for example) as a grid."""
    columns = tuple(sorted({domain for row in figures.values() for domain in row}))
    drafts = [*(name for name in columns if name in figures), *sorted(set(figures) - set(columns))]
    rows = []
    for name in drafts:
        cells = []
        for domain in columns:
            found = figures[name].get(domain, {})
            positions = float(found.get("positions", 0.0))
            share = float(found["agreement"]) if positions >= LEAST_POSITIONS else None
            cells.append(Cell(name == domain, share, positions))
        rows.append(Row(name, tuple(cells)))
    return Grid(columns, tuple(rows))


def matrix_table(kind: str, figures: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> Table:
    """The grid as a table for the terminal, the diagonal bold."""
    laid = grid(figures)
    table = Table(title=f"{kind}: right on each domain's text", title_justify="left")
    table.add_column("draft of", no_wrap=True)
    for domain in laid.columns:
        table.add_column(escape(domain), justify="right")
    for row in laid.rows:
        cells = [f"[bold]{cell.text}[/bold]" if cell.own else cell.text for cell in row.cells]
        table.add_row(escape(row.name), *cells)
    return table
