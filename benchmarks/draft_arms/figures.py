"""From served requests to figures: by arm, label and stretch of the run, and paired between arms."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from osd.types import Tally
from router.app.paired import median_interval, ratio_gain

if TYPE_CHECKING:
    from draft_arms.engine import Served

STRETCHES = ((1, 60), (61, 300))
"""First and last request of a label: after 60 and after 300 requests of it."""

CUMULATIVE = ("lookup", "memory", "trunk", "experts", "trees")
OTHERS = (("trees", "lookup"), ("trees", "trees_frozen"), ("trees", "shared"), ("experts", "shared"))
ROUTED, SHARED = "trees", "shared"
FIGURES = ("acceptance_rate", "mean_accepted_length", "tokens_per_second", "requests", "tokens")
NODES = ("nodes_per_pass", "most_nodes")


def merged(served: Iterable[Served]) -> Tally:
    """Counters over requests."""
    total = Tally()
    for item in served:
        total.add(item.tally)
    return total


def arm_figures(served: Sequence[Served]) -> dict[str, dict[str, Any]]:
    """Figures by label and for ``all``, each also by stretch (as many requests as there are)."""
    labels = sorted({item.asked.label for item in served})
    groups = {label: [item for item in served if item.asked.label == label] for label in labels}
    groups["all"] = list(served)
    return {label: _group_figures(group) for label, group in groups.items()}


def _group_figures(group: Sequence[Served]) -> dict[str, Any]:
    found = _figures(group)
    for low, high in STRETCHES:
        part = [item for item in group if low <= item.asked.place <= high]
        if part:
            found[f"{low}-{high}"] = _figures(part)
    return found


def _figures(group: Sequence[Served]) -> dict[str, Any]:
    """What the tally tells, and the mean and the most nodes that a pass verified of a request."""
    tally = merged(group)
    nodes = tally.proposed_tokens / tally.target_passes if tally.target_passes else 0.0
    most = max((item.most_nodes for item in group), default=0)
    return {
        **{name: getattr(tally, name) for name in FIGURES},
        **dict(zip(NODES, (nodes, most), strict=True)),
    }


def ratios(served: Mapping[str, Sequence[Served]], seed: int) -> dict[str, dict[str, Any]]:
    """``{a}/{b}``: tokens per second of an arm over another's, by label and for ``all``.

    The median of the ratios within blocks and its 95 % bootstrap interval; a label counts in the blocks
    that hold it.
    """
    present = [name for name in CUMULATIVE if name in served]
    pairs = [*zip(present[1:], present, strict=False), *OTHERS]
    return {
        f"{a}/{b}": _paired_speeds(served[a], served[b], seed)
        for a, b in dict.fromkeys(pairs)
        if a in served and b in served
    }


def _paired_speeds(one: Sequence[Served], other: Sequence[Served], seed: int) -> dict[str, Any]:
    speeds = [_block_speeds(one), _block_speeds(other)]
    found: dict[str, Any] = {}
    for label in sorted({label for label, _ in speeds[0]}):
        blocks = [key for key in speeds[0] if key[0] == label and key in speeds[1]]
        values = [speeds[0][key] / speeds[1][key] for key in blocks]
        median, low, high = median_interval(values, seed)
        found[label] = {"median": median, "low": low, "high": high, "blocks": len(values)}
    return found


def _block_speeds(served: Sequence[Served]) -> dict[tuple[str, int], float]:
    """Tokens per second by label (and ``all``) and block."""
    tallies: dict[tuple[str, int], Tally] = {}
    for item in served:
        for label in (item.asked.label, "all"):
            tallies.setdefault((label, item.block), Tally()).add(item.tally)
    return {key: tally.tokens_per_second for key, tally in tallies.items()}


def length_gains(served: Mapping[str, Sequence[Served]], seed: int) -> dict[str, dict[str, Any]]:
    """Mean accepted length of the routed arm minus the shared one's, by label and for ``all``.

    The interval is a bootstrap over requests, in pairs; also by stretch. Empty without both arms.
    """
    if ROUTED not in served or SHARED not in served:
        return {}
    shared = {item.asked.index: item for item in served[SHARED]}
    pairs = [(item, shared[item.asked.index]) for item in served[ROUTED] if item.asked.index in shared]
    found: dict[str, dict[str, Any]] = {}
    for label in [*sorted({item.asked.label for item, _ in pairs}), "all"]:
        mine = [pair for pair in pairs if label in (pair[0].asked.label, "all")]
        found[label] = _gain(mine, seed)
        for low, high in STRETCHES:
            part = [pair for pair in mine if low <= pair[0].asked.place <= high]
            if part:
                found[label][f"{low}-{high}"] = _gain(part, seed)
    return found


def _gain(pairs: Sequence[tuple[Served, Served]], seed: int) -> dict[str, Any]:
    routed, shared = (
        [(side.tally.tokens, side.tally.target_passes) for side in sides]
        for sides in zip(*pairs, strict=True)
    )
    gain, low, high = ratio_gain(routed, shared, seed)
    return {"gain": gain, "low": low, "high": high, "requests": len(pairs)}


def routing(served: Sequence[Served]) -> dict[str, dict[str, int]]:
    """How often requests of each label were served by each domain."""
    found: dict[str, dict[str, int]] = {}
    for item in served:
        row = found.setdefault(item.asked.label, {})
        row[item.domain] = row.get(item.domain, 0) + 1
    return found


def differing(served: Mapping[str, Sequence[Served]]) -> int:
    """Requests that not all arms answered alike (near ties)."""
    answers: dict[int, set[tuple[int, ...]]] = {}
    for group in served.values():
        for item in group:
            answers.setdefault(item.asked.index, set()).add(item.answer)
    return sum(len(found) > 1 for found in answers.values())
