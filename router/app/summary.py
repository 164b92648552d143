"""The JSON result of a replay: acceptance overall, by domain and by label, and how it developed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from typing import Any

from drafts.ledger import COUNTS, source_figures
from drafts.speculation import Speculated
from osd.types import Tally
from router.app.inflight import Served
from router.bodies.api import Completion

WINDOW = 10
"""Requests per point of a timeline."""

LEARNING_COUNTERS = ("updates", "published", "rolled_back")


def tally(completions: Iterable[Completion]) -> Tally:
    """Acceptance counters over answers; ``seconds`` is step time shared by rows."""
    total = Tally()
    for completion in completions:
        total.requests += 1
        total.seconds += completion.seconds
        for item in completion.rounds:
            total.add_round(item)
    return total


def by_domain(completions: Iterable[Completion]) -> dict[str, list[Completion]]:
    """Answers grouped by the domain that served them, in order of completion."""
    groups: dict[str, list[Completion]] = {}
    for completion in completions:
        groups.setdefault(completion.domain, []).append(completion)
    return groups


def timeline(completions: Sequence[Completion]) -> dict[str, list[dict[str, Any]]]:
    """Windows of :data:`WINDOW` requests by domain, the last one possibly shorter.

    ``at`` is the number of requests that the whole run had answered when the window closed, so that
    curves of different domains share an axis; ``version`` is the newest that served in the window.
    """
    windows: dict[str, list[dict[str, Any]]] = {}
    places: dict[str, list[tuple[int, Completion]]] = {}
    for place, completion in enumerate(completions, start=1):
        places.setdefault(completion.domain, []).append((place, completion))
    for domain, members in places.items():
        windows[domain] = []
        for start in range(0, len(members), WINDOW):
            part = members[start : start + WINDOW]
            counters = tally(completion for _, completion in part)
            windows[domain].append(
                {
                    "requests": counters.requests,
                    "acceptance_rate": counters.acceptance_rate,
                    "mean_accepted_length": counters.mean_accepted_length,
                    "alpha": counters.alpha,
                    "at": part[-1][0],
                    "version": max((v for _, c in part for v in c.versions), default=0),
                }
            )
    return windows


def confusion(served: Sequence[Served]) -> dict[str, dict[str, int]]:
    """How often requests of each label were served by each domain."""
    table: dict[str, dict[str, int]] = {}
    for item in served:
        if item.item.label is not None and item.completion is not None:
            row = table.setdefault(item.item.label, {})
            row[item.completion.domain] = row.get(item.completion.domain, 0) + 1
    return table


def routing(served: Sequence[Served]) -> dict[str, Any]:
    """The ``routing`` part: where labels went, and what routing cost the requests in waiting."""
    done = [s.completion for s in served if s.completion is not None]
    latency = sum(c.total_seconds for c in done)
    waited = sum(c.routing_wait for c in done)
    return {
        "confusion": confusion(served),
        "share_of_latency": waited / latency if latency else 0.0,
        "waited_seconds": waited,
        "processor_seconds": sum(c.assignment.seconds for c in done),
        "unknown": sum(not c.assignment.known for c in done),
    }


@dataclass
class LearningShare:
    """Learning's share of busy time over the speculating run alone.

    The engine's own figure also covers the time it spent as a baseline of a comparison, in which
    nothing is learned: that would make the share look smaller than it is.
    """

    learning: float = 0.0
    busy: float = 0.0

    def add(self, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
        """Count what the engine's learning figures gained between two looks."""
        for name, amount in after.get("seconds_by_part", {}).items():
            self.learning += amount - before.get("seconds_by_part", {}).get(name, 0.0)
        self.busy += after.get("busy_seconds", 0.0) - before.get("busy_seconds", 0.0)


def learning(
    before: Mapping[str, Any], after: Mapping[str, Any], share: LearningShare | None = None
) -> dict[str, Any]:
    """The ``learning`` part: counters of this run only, also when the state is older than it."""
    result = {**after, "share_of_busy_time": float(after.get("share_of_busy_time", 0.0))}
    if share is not None and share.busy > 0:
        result["share_of_busy_time"] = share.learning / share.busy
        result["busy_seconds"] = share.busy
    for name in LEARNING_COUNTERS:
        result[name] = int(after.get(name, 0)) - int(before.get(name, 0))
    return result


def speculation(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """What was speculated in this run by domain: chosen k, expected and realised gain, why it was plain.

    Args:
        before: ``stats()["domains"]`` at the start of the run; ``after`` at its end.
    """
    found: dict[str, dict[str, Any]] = {}
    for name, row in after.items():
        if not (now := row.get("speculation")):
            continue
        earlier = (before.get(name, {}).get("speculation") or {}).get("counters", {})
        added = Speculated.from_dict(now["counters"]).since(Speculated.from_dict(earlier))
        found[name] = {**now, **added.figures()}
    return found


def sources(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, dict[str, dict[str, Any]]]:
    """What each draft source earned in this run, by domain and source; sources that never spoke are left out.

    Args:
        before: ``stats()["domains"]`` at the start of the run; ``after`` at its end.
    """
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for domain, row in after.items():
        for name, now in (row.get("sources") or {}).items():
            earlier = (before.get(domain, {}).get("sources") or {}).get(name, {})
            counts = {key: int(now.get(key, 0)) - int(earlier.get(key, 0)) for key in COUNTS}
            if counts["spoke"] > 0:
                found.setdefault(domain, {})[name] = {**counts, **source_figures(counts)}
    return found


def event_dict(event: Any) -> dict[str, Any]:
    """An event as JSON, whether the engine hands out dataclasses or dictionaries."""
    if is_dataclass(event) and not isinstance(event, type):
        return asdict(event)
    return dict(event)


def summarise(
    served: Sequence[Served],
    *,
    domains: Sequence[str],
    stats_before: Mapping[str, Any],
    stats_after: Mapping[str, Any],
    share: LearningShare,
    started: float,
    compare: Mapping[str, Any],
    verify: Mapping[str, Any],
    provenance: Mapping[str, Any],
) -> dict[str, Any]:
    """The whole result, with every key of the replay contract present.

    Args:
        served: Results of the speculating run in order of completion.
        domains: Registered domains, listed also when nothing was served by them.
        stats_before: ``engine.stats()`` at the start of the run; ``stats_after`` at its end.
        share: Learning's share of the speculating run.
        started: Unix time of the start: earlier events belong to an older run.
        compare: Result of the comparison, empty without one.
        verify: Result of the lossless check; ``branch_nodes`` joins it, the nodes off the main chain that
            the target verified in the whole run.
        provenance: Where the result comes from.
    """
    completions = [s.completion for s in served if s.completion is not None]
    groups = by_domain(completions)
    labels: dict[str, list[Completion]] = {}
    for item in served:
        if item.item.label is not None and item.completion is not None:
            labels.setdefault(item.item.label, []).append(item.completion)
    events = [event_dict(event) for event in stats_after.get("events", ())]
    failed = sorted((s for s in served if s.completion is None), key=lambda s: s.item.index)
    names = dict.fromkeys([*domains, *groups])
    curves = timeline(completions)
    speculated = speculation(stats_before.get("domains", {}), stats_after.get("domains", {}))
    branch_nodes = sum(row["counters"]["branch_nodes"] for row in speculated.values())
    return {
        "overall": tally(completions).as_dict(),
        "domains": {name: tally(groups.get(name, ())).as_dict() for name in names},
        "labels": {name: tally(group).as_dict() for name, group in sorted(labels.items())},
        "compare": dict(compare),
        "verify": {**verify, "branch_nodes": branch_nodes},
        "routing": routing(served),
        "speculation": speculated,
        "sources": sources(stats_before.get("domains", {}), stats_after.get("domains", {})),
        "matrix": dict(stats_after.get("matrix", {})),
        "learning": learning(stats_before.get("learning", {}), stats_after.get("learning", {}), share),
        "events": [event for event in events if event.get("time", started) >= started],
        "timeline": {name: curves.get(name, []) for name in names},
        "failed": [
            {"index": s.item.index, "line": s.item.line, "error": s.error, "refused": s.refused}
            for s in failed
        ],
        "provenance": dict(provenance),
    }


def output_line(served: Served) -> dict[str, Any]:
    """One line of ``--outputs``."""
    line: dict[str, Any] = {"index": served.item.index, "seed": served.seed, "label": served.item.label}
    completion = served.completion
    if completion is None:
        return {**line, "error": served.error}
    return {
        **line,
        "token_ids": list(completion.token_ids),
        "domain": completion.domain,
        "versions": list(completion.versions),
        "rounds": [asdict(item) for item in completion.rounds],
        "text": completion.text,
        "finish_reason": completion.finish_reason.value,
        "prompt_tokens": completion.prompt_tokens,
        "seconds": completion.seconds,
        "total_seconds": completion.total_seconds,
        "first_token_seconds": completion.first_token_seconds,
        "confidence": completion.assignment.confidence,
        "assigned": completion.assignment.domain,
    }
