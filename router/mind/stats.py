"""Statistics of serving: acceptance by domain, label, version, source and depth; events; routing."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from osd.types import Event, FinishedRecord, Tally
from router.mind.timeline import Timeline

EVENTS_KEPT = 1000
DEPTHS = 16
"""Depths counted one by one; deeper ones count into the last."""


class Stats:
    """Lifetime figures, fed with finished requests (:class:`osd.ports.Observer`) and with events.

    Thread-safe: the engine feeds it, the service reads it. Every rate is derived from counters when
    it is read, so figures of a restarted process simply go on.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._overall = Tally()
        self._domains: dict[str, Tally] = {}
        self._labels: dict[str, Tally] = {}
        self._versions: dict[str, dict[str, Tally]] = {}
        self._sources: dict[str, dict[str, Tally]] = {}
        self._depths: dict[str, list[list[int]]] = {}
        self._timelines: dict[str, Timeline] = {}
        self._confusion: dict[str, dict[str, int]] = {}
        self._finish: dict[str, int] = {}
        self._routing = {
            "processor_seconds": 0.0,
            "waited_seconds": 0.0,
            "latency_seconds": 0.0,
            "unknown": 0.0,
        }
        self._events: deque[Event] = deque(maxlen=EVENTS_KEPT)

    def take(self, record: FinishedRecord, label: str | None = None) -> None:
        """Count a finished request; ``label`` is an evaluation's own, never the router's."""
        tally = Tally(requests=1)
        for item in record.rounds:
            tally.add_round(item)
        tally.seconds = record.seconds
        with self._lock:
            self._overall.add(tally)
            self._domains.setdefault(record.domain, Tally()).add(tally)
            timeline = self._timelines.setdefault(record.domain, Timeline())
            timeline.add(record, tally, self._overall.requests)
            self._finish[record.finish.value] = self._finish.get(record.finish.value, 0) + 1
            self._count_rounds(record)
            self._count_routing(record)
            if label is not None:
                self._labels.setdefault(label, Tally()).add(tally)
                row = self._confusion.setdefault(label, {})
                row[record.domain] = row.get(record.domain, 0) + 1

    def add_event(self, event: Event) -> None:
        """Note an event; the oldest beyond a thousand are dropped (storage keeps them)."""
        with self._lock:
            self._events.append(event)

    def events(self) -> list[Event]:
        """The latest events, oldest first."""
        with self._lock:
            return list(self._events)

    def snapshot(
        self,
        extras: Mapping[str, Mapping[str, Any]] | None = None,
        domains: Sequence[str] = (),
    ) -> dict[str, Any]:
        """All figures as plain data.

        Args:
            extras: More figures by domain, such as draft version and memory; merged in.
            domains: Domains to list even where nothing was served by them.
        """
        extras = extras or {}
        with self._lock:
            names = dict.fromkeys([*domains, *self._domains, *extras])
            return {
                "overall": self._overall.as_dict(),
                "domains": {name: {**self._domain(name), **extras.get(name, {})} for name in names},
                "labels": {name: tally.as_dict() for name, tally in sorted(self._labels.items())},
                "timeline": {
                    name: self._timelines[name].windows() if name in self._timelines else [] for name in names
                },
                "routing": self._routing_figures(),
                "finish": dict(self._finish),
                "events": [asdict(event) for event in self._events],
            }

    def state(self) -> dict[str, Any]:
        """All counters as JSON."""
        with self._lock:
            return {
                "overall": asdict(self._overall),
                "domains": _plain(self._domains),
                "labels": _plain(self._labels),
                "versions": {name: _plain(group) for name, group in self._versions.items()},
                "sources": {name: _plain(group) for name, group in self._sources.items()},
                "depths": self._depths,
                "timelines": {name: line.state() for name, line in self._timelines.items()},
                "confusion": self._confusion,
                "finish": self._finish,
                "routing": self._routing,
                "events": [asdict(event) for event in self._events],
            }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state` returned."""
        with self._lock:
            self._overall = Tally(**state["overall"])
            self._domains = _tallies(state["domains"])
            self._labels = _tallies(state["labels"])
            self._versions = {name: _tallies(group) for name, group in state["versions"].items()}
            self._sources = {name: _tallies(group) for name, group in state["sources"].items()}
            self._depths = {name: [list(pair) for pair in pairs] for name, pairs in state["depths"].items()}
            self._timelines = {name: Timeline.restored(line) for name, line in state["timelines"].items()}
            self._confusion = {label: dict(row) for label, row in state["confusion"].items()}
            self._finish = dict(state["finish"])
            self._routing = {**self._routing, **state["routing"]}
            self._events = deque((Event(**event) for event in state["events"]), maxlen=EVENTS_KEPT)

    def _count_rounds(self, record: FinishedRecord) -> None:
        versions = self._versions.setdefault(record.domain, {})
        sources = self._sources.setdefault(record.domain, {})
        depths = self._depths.setdefault(record.domain, [[0, 0] for _ in range(DEPTHS)])
        for item in record.rounds:
            versions.setdefault(str(item.version), Tally()).add_round(item)
            if item.proposed:
                sources.setdefault(item.source, Tally()).add_round(item)
            for depth in range(item.tested):
                pair = depths[min(depth, DEPTHS - 1)]
                pair[0] += depth < item.accepted
                pair[1] += 1

    def _count_routing(self, record: FinishedRecord) -> None:
        self._routing["processor_seconds"] += record.assignment.seconds
        self._routing["waited_seconds"] += record.routing_wait
        self._routing["latency_seconds"] += record.total_seconds
        self._routing["unknown"] += not record.assignment.known

    def _domain(self, name: str) -> dict[str, Any]:
        share = self._domains[name].requests / self._overall.requests if name in self._domains else 0.0
        return {
            **self._domains.get(name, Tally()).as_dict(),
            "share_of_requests": share,
            "acceptance_by_depth": [
                accepted / tested for accepted, tested in self._depths.get(name, ()) if tested
            ],
            "versions": {key: tally.as_dict() for key, tally in self._versions.get(name, {}).items()},
            "by_source": {key: tally.as_dict() for key, tally in self._sources.get(name, {}).items()},
        }

    def _routing_figures(self) -> dict[str, Any]:
        latency = self._routing["latency_seconds"]
        return {
            "confusion": {label: dict(row) for label, row in self._confusion.items()},
            "share_of_latency": self._routing["waited_seconds"] / latency if latency else 0.0,
            "waited_seconds": self._routing["waited_seconds"],
            "processor_seconds": self._routing["processor_seconds"],
            "unknown": int(self._routing["unknown"]),
        }


def _plain(group: Mapping[str, Tally]) -> dict[str, Any]:
    return {name: asdict(tally) for name, tally in group.items()}


def _tallies(group: Mapping[str, Any]) -> dict[str, Tally]:
    return {name: Tally(**fields) for name, fields in group.items()}
