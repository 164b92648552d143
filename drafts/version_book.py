"""The registry's book: which versions every domain has and serves, as one value that is replaced whole."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from drafts.version import Version
from drafts.version_files import VersionFiles

logger = logging.getLogger(__name__)

EVENTS_KEPT = 1000

T = TypeVar("T")


@dataclass(frozen=True)
class Book:
    """Never changed in place: readers of any thread see one whole state.

    Attributes:
        kept: Kept versions by domain and number.
        served: The served one by domain.
        following: Next free number by domain, also of domains that are gone, so that none is used twice.
        events: What changed, oldest first.
    """

    kept: dict[str, dict[int, Version]] = field(default_factory=dict)
    served: dict[str, Version] = field(default_factory=dict)
    following: dict[str, int] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)

    def serving(self, version: Version) -> Book:
        """With another kept version served."""
        return replace(self, served={**self.served, version.domain: version})

    def taking(self, versions: Sequence[Version], served: Version, keep: int) -> Book:
        """With new versions of one domain, ``served`` among them; of all, ``keep`` stay.

        Those are the served one, its parent, what was served until now (so that a rollback leads there) and
        then the newest.
        """
        domain = served.domain
        until_now = self.served.get(domain, served)
        needed = [n for n in (served.number, served.parent, until_now.number) if n is not None]
        kept = {**self.kept.get(domain, {}), **{version.number: version for version in versions}}
        following = {**self.following, domain: max(version.number for version in versions) + 1}
        kept = _pruned(kept, list(dict.fromkeys(needed))[:keep], keep)
        return replace(self.serving(served), kept={**self.kept, domain: kept}, following=following)

    def without(self, domain: str) -> Book:
        """With the domain gone."""
        return replace(self, kept=_but(self.kept, domain), served=_but(self.served, domain))

    def noting(self, kind: str, version: Version, reason: str, **figures: Any) -> Book:
        """With one more event."""
        event = {"kind": kind, "domain": version.domain, "number": version.number, "reason": reason}
        events = [*self.events[1 - EVENTS_KEPT :], {**event, "time": time.time(), **figures}]
        return replace(self, events=events)

    def index(self) -> dict[str, Any]:
        """As JSON, for the index on disk."""
        return {
            "served": {domain: version.number for domain, version in self.served.items()},
            "kept": {domain: sorted(versions) for domain, versions in self.kept.items()},
            "next": self.following,
            "events": self.events,
        }


def sweep(files: VersionFiles, before: Book, now: Book) -> None:
    """Delete what ``before`` named and ``now`` no longer does."""
    for domain, versions in before.kept.items():
        if domain not in now.kept:
            files.remove_domain(domain)
            continue
        for number in versions.keys() - now.kept[domain].keys():
            files.remove(domain, number)


def restore(files: VersionFiles) -> tuple[Book, dict[str, int]]:
    """What the files hold, and by domain the version to serve that could not be read, if any (case B26).

    Without an index that can be read, the newest version of each domain is served. Files that the index does
    not name were written or to be deleted when a process died; they are deleted now.
    """
    index = files.load_index()
    book = Book() if index is None else Book(following=index["next"], events=index["events"])
    lost: dict[str, int] = {}
    for domain in files.domains():
        if index is not None and domain not in index["served"]:
            logger.warning("removed versions of %s, which is not in the index", domain)
            files.remove_domain(domain)
            continue
        loaded = {m["number"]: Version(domain, tensors=t, **m) for t, m in files.load_domain(domain)}
        named = set(loaded) if index is None else set(index["kept"].get(domain, loaded))
        for number in loaded.keys() - named:
            logger.warning("removed version %d of %s, which is not in the index", number, domain)
            files.remove(domain, number)
        versions = {number: version for number, version in loaded.items() if number in named}
        if not versions:
            logger.error("no version of domain %s can be read; it starts anew", domain)
            continue
        wanted = max(versions) if index is None else index["served"][domain]
        found = max((n for n in versions if n <= wanted), default=min(versions))
        if found != wanted:
            lost[domain] = wanted
        following = max(book.following.get(domain, 0), max(loaded) + 1)
        book = replace(
            book.serving(versions[found]),
            kept={**book.kept, domain: versions},
            following={**book.following, domain: following},
        )
    return book, lost


def _pruned(kept: dict[int, Version], needed: Sequence[int], keep: int) -> dict[int, Version]:
    others = sorted(number for number in kept if number not in needed)
    gone = others[: max(0, len(kept) - keep)]
    return {number: version for number, version in kept.items() if number not in gone}


def _but(items: dict[str, T], name: str) -> dict[str, T]:
    return {key: value for key, value in items.items() if key != name}
