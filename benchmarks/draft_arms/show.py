"""The result as tables on a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def show(result: Mapping[str, Any]) -> None:
    """Print what there is of domains, arms and matrix."""
    for count, entry in result.get("domains", {}).items():
        times = ", ".join(f"{head} {ms:.2f} ms" for head, ms in entry["step_ms"].items())
        sizes = ", ".join(f"{form} {size}" for form, size in entry["bytes_per_expert"].items())
        print(f"{count:>3} domains: {times}; bytes of an expert: {sizes}")
    arms = result.get("arms", {})
    if arms:
        _arms(arms)
    for name, entry in result.get("ratios", {}).items():
        row = entry["all"]
        print(f"{name}: {row['median']:.3f} times as fast ({row['low']:.3f} … {row['high']:.3f})")
    for label, row in result.get("routed_minus_shared", {}).items():
        print(f"routed minus shared, {label}: τ {row['gain']:+.3f} ({row['low']:+.3f} … {row['high']:+.3f})")
    matrix = result.get("matrix") or {}
    for part in ("experts", "memories"):
        if part in matrix:
            _table(f"acceptance of {part} (row) on requests of (column)", matrix[part])
            own = matrix["own_best"][part]
            print(
                f"own best or within {own['within']:g}: {own['count']} of {own['of']}, "
                f"strictly best of all: {own['strict']} of {own['of']}"
            )
            spread = ", ".join(f"{label} {value:.3f}" for label, value in own["spread"].items())
            print(f"best minus worst of each column: {spread}")


def _arms(arms: Mapping[str, Any]) -> None:
    for figure, digits in (
        ("mean_accepted_length", 2),
        ("acceptance_rate", 3),
        ("tokens_per_second", 1),
        ("nodes_per_pass", 2),
        ("most_nodes", 0),
    ):
        rows = {name: {x: row[figure] for x, row in arm["labels"].items()} for name, arm in arms.items()}
        _table(figure, rows, digits)


def _table(title: str, rows: Mapping[str, Mapping[str, float]], digits: int = 3) -> None:
    columns = list(next(iter(rows.values())))
    print(f"\n{title}\n{'':16}" + "".join(f"{column[:11]:>12}" for column in columns))
    for name, row in rows.items():
        print(f"{name[:15]:16}" + "".join(f"{row[column]:12.{digits}f}" for column in columns))
