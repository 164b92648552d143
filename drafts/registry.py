"""The registry: which version of each domain's draft is served, with lineage; publishing is atomic."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from drafts.checkpoint import checksum
from drafts.errors import CheckpointError, InvalidValueError, UnknownNameError
from drafts.version_checks import check_domain_name, check_finite, check_same_form
from drafts.version_files import VersionFiles

logger = logging.getLogger(__name__)

_EVENTS_KEPT = 1000


@dataclass(frozen=True)
class Version:
    """One immutable version of a domain's expert.

    Attributes:
        domain: The domain it belongs to.
        number: 0 for what the domain was born with, then 1, 2, … in order of publication.
        tensors: The weights by name.
        parent: Number of the version it was trained from, ``None`` at birth.
        reason: Why it was published.
        score: Held-back acceptance it was published with, ``None`` if never scored.
        created: Unix time, seconds.
    """

    domain: str
    number: int
    tensors: dict[str, torch.Tensor]
    parent: int | None
    reason: str
    score: float | None
    created: float


@dataclass(frozen=True)
class Swap:
    """The engine has begun to serve another version of ``domain``'s expert at a step border."""

    domain: str
    old: int
    new: int
    reason: str
    numbers: dict[str, float] = field(default_factory=dict)


class Registry:
    """Versions of every domain, which one is served, and why.

    Safe from any thread: writers take turns, readers never wait (every change replaces whole maps). A
    version is on disk before it is served, so what is served survives a restart.

    Args:
        directory: Where versions persist; ``None`` keeps them in memory only.
        keep: Versions kept per domain, the served one and (from 2) its parent always among them.
    """

    def __init__(self, directory: Path | None = None, keep: int = 5) -> None:
        if keep < 1:
            raise InvalidValueError("keep", keep, "at least 1")
        self.keep = keep
        self._files = VersionFiles(directory)
        self._writing = threading.RLock()
        self._kept: dict[str, dict[int, Version]] = {}
        self._served: dict[str, Version] = {}
        self._next: dict[str, int] = {}
        self._events: list[dict[str, Any]] = []
        self._serial = 0
        self._restore()

    @property
    def serial(self) -> int:
        """Increases with every change, so that a reader sees cheaply whether to look again."""
        return self._serial

    def domains(self) -> list[str]:
        """Domains that have a version, sorted."""
        return sorted(self._served)

    def current(self, domain: str) -> Version | None:
        """The served version, ``None`` before anything was published."""
        return self._served.get(domain)

    def versions(self, domain: str) -> list[Version]:
        """Kept versions, oldest first."""
        return [version for _, version in sorted(self._kept.get(domain, {}).items())]

    def get(self, domain: str, number: int) -> Version:
        """One kept version; :class:`UnknownNameError` lists the others."""
        kept = self._kept.get(domain)
        if kept is None:
            raise UnknownNameError("domain", domain, self.domains())
        if number not in kept:
            raise UnknownNameError(f"{domain}.version", number, [str(n) for n in sorted(kept)])
        return kept[number]

    def publish(
        self,
        domain: str,
        tensors: Mapping[str, torch.Tensor],
        *,
        reason: str,
        score: float | None = None,
        parent: int | None = None,
    ) -> Version:
        """Make ``tensors`` the served version of ``domain``, or change nothing at all.

        Args:
            domain: Lower-case letters, digits, ``_`` and ``-``; it names a folder.
            tensors: Weights by name; copied. Names and shapes must be those of the parent (case A27).
            reason: Why, as a sentence.
            score: Held-back acceptance, if measured.
            parent: Version it was trained from; the served one if not given.

        Raises:
            InvalidValueError: Domain name, tensor names, shapes or non-finite values (case A29).
            UnknownNameError: ``parent`` is not kept.
            CheckpointError: The version cannot be written.
        """
        check_domain_name(domain)
        copies = {name: t.detach().to("cpu", copy=True).contiguous() for name, t in tensors.items()}
        check_finite(f"{domain}.tensors", copies)
        with self._writing:
            base = self.current(domain) if parent is None else self.get(domain, parent)
            if base is not None:
                check_same_form(f"{domain}.tensors", copies, base.tensors)
            number, origin = self._next.get(domain, 0), None if base is None else base.number
            version = Version(domain, number, copies, origin, reason, score, time.time())
            figures = {} if score is None else {"score": score}
            self._adopt(version, "publish", reason, parent=origin, **figures)
            return version

    def rollback(self, domain: str, to: int | None = None, reason: str = "rolled back") -> Version:
        """Serve an earlier version again: ``to``, else the parent of the served one, else the one before.

        Raises:
            UnknownNameError: The domain or version is not kept.
            InvalidValueError: No earlier version is kept.
        """
        with self._writing:
            served = self._known(domain)
            target = self._before(served) if to is None else self.get(domain, to)
            self._commit(
                {**self._served, domain: target}, "rollback", target, reason, rolled_back=served.number
            )
            return target

    def clone(self, parent_domain: str, new_domain: str) -> Version:
        """Give ``new_domain`` the served weights of ``parent_domain`` as its version 0 (birth, split)."""
        check_domain_name(new_domain)
        with self._writing:
            parent = self._known(parent_domain)
            if new_domain in self._served:
                raise InvalidValueError("domain", new_domain, "a domain that has no version yet")
            reason = f"inherited from {parent_domain} v{parent.number}"
            tensors = {name: tensor.clone() for name, tensor in parent.tensors.items()}
            number = self._next.get(new_domain, 0)
            version = Version(new_domain, number, tensors, None, reason, parent.score, time.time())
            self._adopt(version, "clone", reason, parent_domain=parent_domain, parent=parent.number)
            return version

    def drop(self, domain: str) -> None:
        """Forget a domain and delete its files; its events stay."""
        with self._writing:
            version = self._known(domain)
            served = {name: v for name, v in self._served.items() if name != domain}
            self._commit(served, "drop", version, "dropped")
            self._kept = {name: v for name, v in self._kept.items() if name != domain}
            self._files.remove_domain(domain)

    def checksum(self, version: Version) -> str:
        """SHA-256 of a version's tensors; equal for equal weights by whatever path they came."""
        return checksum(version.tensors)

    def events(self) -> list[dict[str, Any]]:
        """What changed, oldest first: ``kind, domain, number, reason, time`` and the kind's own figures."""
        return [dict(event) for event in self._events]

    def lineage(self, domain: str) -> list[dict[str, Any]]:
        """Kept versions as plain values, oldest first."""
        served = self.current(domain)
        return [
            {**_metadata(v), "served": v is served, "checksum": self.checksum(v)}
            for v in self.versions(domain)
        ]

    def _known(self, domain: str) -> Version:
        version = self.current(domain)
        if version is None:
            raise UnknownNameError("domain", domain, self.domains())
        return version

    def _before(self, served: Version) -> Version:
        kept = self._kept[served.domain]
        if served.parent in kept:
            return kept[served.parent]
        earlier = [number for number in kept if number < served.number]
        if not earlier:
            field_name = f"{served.domain}.version"
            raise InvalidValueError(field_name, served.number, "a version with an earlier one still kept")
        return kept[max(earlier)]

    def _adopt(self, version: Version, kind: str, reason: str, **figures: Any) -> None:
        """Write, serve, prune: a failure before the index is written leaves everything as it was."""
        domain, number = version.domain, version.number
        self._files.save(domain, number, version.tensors, _metadata(version))
        kept, following = self._kept, self._next
        self._kept = {**kept, domain: {**kept.get(domain, {}), number: version}}
        self._next = {**following, domain: number + 1}
        try:
            self._commit({**self._served, domain: version}, kind, version, reason, **figures)
        except CheckpointError:
            self._kept, self._next = kept, following
            self._files.remove(domain, number)
            raise
        self._prune(domain)

    def _commit(
        self, served: dict[str, Version], kind: str, version: Version, reason: str, **figures: Any
    ) -> None:
        """The moment of change: the index on disk first, then memory."""
        event = {"kind": kind, "domain": version.domain, "number": version.number, "reason": reason}
        events = [*self._events[1 - _EVENTS_KEPT :], {**event, "time": time.time(), **figures}]
        numbers = {domain: v.number for domain, v in served.items()}
        self._files.save_index({"served": numbers, "next": self._next, "events": events})
        self._served, self._events = served, events
        self._serial += 1

    def _prune(self, domain: str) -> None:
        kept, served = self._kept[domain], self._served[domain]
        needed = {served.number, served.parent} if self.keep > 1 else {served.number}
        others = sorted(number for number in kept if number not in needed)
        gone = others[: max(0, len(kept) - self.keep)]
        self._kept = {**self._kept, domain: {n: v for n, v in kept.items() if n not in gone}}
        for number in gone:
            self._files.remove(domain, number)

    def _restore(self) -> None:
        """Serve what was served before, or the last good version before it (case B26)."""
        index = self._files.load_index()
        wanted: dict[str, int] = {}
        if index is not None:
            self._events, self._next = index["events"], index["next"]
        for domain in self._files.domains():
            if index is not None and domain not in index["served"]:
                logger.warning("removed versions of %s, which is not in the index", domain)
                self._files.remove_domain(domain)
                continue
            loaded = self._files.load_domain(domain)
            versions = {m["number"]: Version(domain, tensors=tensors, **m) for tensors, m in loaded}
            if not versions:
                logger.error("no version of domain %s can be read; it starts anew", domain)
                continue
            self._kept[domain] = versions
            self._next[domain] = max(self._next.get(domain, 0), max(versions) + 1)
            wanted[domain] = max(versions) if index is None else index["served"][domain]
            number = max((n for n in versions if n <= wanted[domain]), default=min(versions))
            self._served[domain] = versions[number]
        for domain, number in wanted.items():
            version = self._served[domain]
            if version.number != number:
                reason = f"version {number} could not be read"
                logger.error("domain %s: %s; serving version %d", domain, reason, version.number)
                self._commit(self._served, "fallback", version, reason, wanted=number)


def _metadata(version: Version) -> dict[str, Any]:
    return {
        "number": version.number,
        "parent": version.parent,
        "reason": version.reason,
        "score": version.score,
        "created": version.created,
    }
