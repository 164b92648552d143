"""Requests in the order of serving: labels mixed or in turns; the last quarter of each comes last."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from router.app.traffic import TrafficItem


@dataclass(frozen=True)
class Asked:
    """A request to be served by every arm.

    Attributes:
        index: Place in the order of serving, from 0.
        label: Its label.
        place: How many of its label have been served with it, from 1.
        last: Whether it belongs to the last quarter of its label.
        item: The traffic's line.
    """

    index: int
    label: str
    place: int
    last: bool
    item: TrafficItem


def in_order(
    groups: Mapping[str, Sequence[TrafficItem]], quarter: float = 0.75, turn: int = 1
) -> list[Asked]:
    """All requests, each label spread evenly over the whole run, in turns of ``turn`` requests.

    Those before ``quarter`` of their label come before all others, since a request's place in the run is
    that of its turn within its label.
    """
    placed = [
        (((place - 1) // turn + 0.5) / -(-len(items) // turn), label, place, item)
        for label, items in groups.items()
        for place, item in enumerate(items, start=1)
    ]
    placed.sort(key=lambda entry: entry[:3])
    return [
        Asked(index, label, place, share >= quarter, item)
        for index, (share, label, place, item) in enumerate(placed)
    ]


def in_blocks(asked: Sequence[Asked], size: int) -> list[list[Asked]]:
    """Blocks of ``size`` requests; none holds requests from both sides of the last quarter's border."""
    parts = [[a for a in asked if not a.last], [a for a in asked if a.last]]
    return [part[at : at + size] for part in parts for at in range(0, len(part), size)]
