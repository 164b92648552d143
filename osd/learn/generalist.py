"""One expert that learns from everybody's requests, and serves where no expert of a domain's own is better.

A domain sees a fraction of the traffic, and so its expert learns a fraction as fast: with the same budget one
draft shared by all gained more in 600 requests than seven of a domain each. What target and deployment have
in common is learned once, by the base domain's expert; a domain's own takes it over, goes on from there, and
is served once it beats it on what the domain holds back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace

from drafts.expert_key import expert_key, split_key
from osd.learn.buffer import DomainBuffer
from osd.learn.domain import DomainLearning
from osd.learn.record import BufferRecord


class Generalist:
    """Who follows the generalist's versions, and who has yet to.

    Args:
        base: Domain whose expert it is.
    """

    def __init__(self, base: str) -> None:
        self.base = base
        self._behind: deque[str] = deque()

    def of(self, key: str) -> str:
        """Key of the generalist among experts of ``key``'s kind."""
        return expert_key(self.base, split_key(key)[1])

    def owns(self, key: str) -> bool:
        """Whether ``key`` is the generalist itself."""
        return split_key(key)[0] == self.base

    def changed(self, key: str, served: Mapping[str, int], domains: Mapping[str, DomainLearning]) -> None:
        """The generalist ``key`` serves another version: followers will take it over, others compare.

        Args:
            key: Its key.
            served: Number of the version that is served, by key.
            domains: Learning states by key.
        """
        kind = split_key(key)[1]
        for other, number in served.items():
            if other == key or split_key(other)[1] != kind:
                continue
            domain = domains.get(other)
            if number == (0 if domain is None else domain.followed):
                if other not in self._behind:
                    self._behind.append(other)
            elif domain is not None:
                domain.challenged = True

    def next_behind(self) -> str | None:
        """A follower that has not taken over the newest version yet; each is told once."""
        return self._behind.popleft() if self._behind else None

    def forget(self, name: str) -> None:
        """A domain is gone."""
        self._behind = deque(key for key in self._behind if split_key(key)[0] != name)


def joined(buffers: Sequence[DomainBuffer]) -> DomainBuffer:
    """A buffer with the records of all, by age; what is held back stays so, as many as one holds.

    The first gives settings and the order of draws; none of them is changed.
    """
    first = buffers[0]
    found = first.copy()
    found.training = _numbered([record for buffer in buffers for record in buffer.training])
    held = _numbered([record for buffer in buffers for record in buffer.held], len(found.training))
    found.held = held[-first.config.held_records :]
    found.arrived = sum(buffer.arrived for buffer in buffers)
    return found


def _numbered(records: list[BufferRecord], start: int = 0) -> list[BufferRecord]:
    records.sort(key=lambda record: record.created)
    return [replace(record, number=number) for number, record in enumerate(records, start)]
