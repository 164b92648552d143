"""The registry: which version of each domain's draft is served, with lineage; publishing is atomic."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from drafts.checkpoint import checksum
from drafts.errors import CheckpointError, InvalidValueError, UnflushedError, UnknownNameError
from drafts.expert_key import FIRST_KIND, split_key
from drafts.version import Version
from drafts.version_book import Book, restore, sweep
from drafts.version_checks import (
    check_domain_name,
    check_finite,
    check_same_form,
    check_same_tables,
    check_share,
)
from drafts.version_files import VersionFiles
from drafts.version_transfer import continued, read_export, write_export

logger = logging.getLogger(__name__)


class Registry:
    """Versions of every domain, which one is served, and why.

    Safe from any thread: writers take turns, readers never wait (every change replaces whole maps). A
    version is on disk before it is served, so what is served survives a restart. Every change is one
    replacement of the index, which names all there is; files that it does not name are swept away.

    Args:
        directory: Where versions persist; ``None`` keeps them in memory only.
        keep: Versions kept per domain, the served one, its parent (from 2) and the one served before (from
            3) always among them.
        trunk: Fingerprint of the trunk of this deployment, noted in versions of the first kind.
    """

    def __init__(self, directory: Path | None = None, keep: int = 5, trunk: str | None = None) -> None:
        if keep < 1:
            raise InvalidValueError("keep", keep, "at least 1")
        self.keep = keep
        self.trunk = trunk
        self._files = VersionFiles(directory)
        self._writing = threading.RLock()
        self._book = Book()
        self._serial = 0
        self._restore()

    @property
    def serial(self) -> int:
        """Increases with every change, so that a reader sees cheaply whether to look again."""
        return self._serial

    def domains(self) -> list[str]:
        """Domains that have a version, sorted."""
        return sorted(self._book.served)

    def current(self, domain: str) -> Version | None:
        """The served version, ``None`` before anything was published."""
        return self._book.served.get(domain)

    def versions(self, domain: str) -> list[Version]:
        """Kept versions, oldest first."""
        return [version for _, version in sorted(self._book.kept.get(domain, {}).items())]

    def get(self, domain: str, number: int) -> Version:
        """One kept version; :class:`UnknownNameError` lists the others."""
        kept = self._book.kept.get(domain)
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
            number, origin = self._book.following.get(domain, 0), None if base is None else base.number
            trunk = self.trunk if split_key(domain)[1] == FIRST_KIND else None
            version = Version(domain, number, copies, origin, reason, score, time.time(), trunk)
            figures: dict[str, Any] = {"parent": origin, **({} if score is None else {"score": score})}
            book = self._book.taking([version], version, self.keep)
            self._adopt([version], book.noting("publish", version, reason, **figures))
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
            book = self._book.serving(target)
            self._commit(book.noting("rollback", target, reason, rolled_back=served.number))
            return target

    def clone(self, parent_domain: str, new_domain: str) -> Version:
        """Give ``new_domain`` the served weights of ``parent_domain`` as its version 0 (birth, split)."""
        check_domain_name(new_domain)
        with self._writing:
            parent = self._known(parent_domain)
            if new_domain in self._book.served:
                raise InvalidValueError("domain", new_domain, "a domain that has no version yet")
            reason = f"inherited from {parent_domain} v{parent.number}"
            tensors = {name: tensor.clone() for name, tensor in parent.tensors.items()}
            number = self._book.following.get(new_domain, 0)
            version = Version(
                new_domain, number, tensors, None, reason, parent.score, time.time(), parent.trunk
            )
            book = self._book.taking([version], version, self.keep)
            origin: dict[str, Any] = {"parent_domain": parent_domain, "parent": parent.number}
            self._adopt([version], book.noting("clone", version, reason, **origin))
            return version

    def drop(self, domain: str) -> None:
        """Forget a domain and delete its files; its events stay."""
        with self._writing:
            version = self._known(domain)
            self._commit(self._book.without(domain).noting("drop", version, "dropped"))

    def merge(self, into: str, other: str, acceptance: Mapping[str, float]) -> Version:
        """Make one draft of two, see :meth:`merge_all`; what serves ``into`` now."""
        return self.merge_all([(into, other, acceptance)])[0]

    def merge_all(self, pairs: Sequence[tuple[str, str, Mapping[str, float]]]) -> list[Version]:
        """Make one draft of each pair: the better one serves the first, the second is gone; all in one step.

        Weights of the two are never averaged: nothing says that experts trained apart are good in between.

        Args:
            pairs: The one that stays (on equal figures with its own expert), the one that goes, and by name
                what the served expert of each was measured to reach on both ones' records.

        Returns:
            What serves each pair's first now: its version until now, or a new one with the other's weights.

        Raises:
            UnknownNameError: One of them has no version.
            InvalidValueError: The two are one, a figure is missing or no share, or forms or tables differ.
            CheckpointError: The change cannot be written.
        """
        with self._writing:
            book, versions = self._book, []
            for into, other, acceptance in pairs:
                book, version = self._merged(book, into, other, acceptance)
                versions.append(version)
            before = self._book.kept
            self._adopt([v for v in versions if v.number not in before[v.domain]], book)
            return versions

    def _merged(
        self, book: Book, into: str, other: str, acceptance: Mapping[str, float]
    ) -> tuple[Book, Version]:
        """``book`` after one merge, and what serves ``into`` in it."""
        mine, theirs = self._known(into), self._known(other)
        if into == other:
            raise InvalidValueError("other", other, "a domain other than the one it is merged into")
        for name in (into, other):
            check_share(f"acceptance.{name}", acceptance.get(name))
        ours, others = acceptance[into], acceptance[other]
        check_same_form(f"{other}.tensors", theirs.tensors, mine.tensors)
        check_same_tables(f"{other}.tensors", theirs.tensors, mine.tensors)
        best = theirs if others > ours else mine
        reason = f"the expert of {best.domain} serves {into} and {other}: {ours:.3f} against {others:.3f}"
        figures = {"merged": other, "better": best.domain, "acceptance": {into: ours, other: others}}
        book, version = book.without(other), mine
        if best is theirs:
            tensors = {name: tensor.clone() for name, tensor in theirs.tensors.items()}
            number = book.following[into]
            version = Version(into, number, tensors, mine.number, reason, others, time.time(), theirs.trunk)
            book = book.taking([version], version, self.keep)
        return book.noting("merge", version, reason, **figures), version

    def export(self, domain: str, path: Path, trunk: str | None = None) -> None:
        """Write a domain's kept versions to one file that needs nothing else (:meth:`import_file`).

        Args:
            domain: The domain.
            path: The file; replaced if there.
            trunk: Fingerprint of the trunk that the experts belong to, if they belong to one.

        Raises:
            UnknownNameError: The domain has no version.
            CheckpointError: The file cannot be written.
        """
        with self._writing:
            served, versions = self._known(domain), self.versions(domain)
        write_export(path, versions, served.number, trunk)

    def import_file(
        self,
        path: Path,
        domain: str | None = None,
        *,
        trunk: str | None = None,
        check: Callable[[dict[str, torch.Tensor]], None] = lambda tensors: None,
    ) -> Version:
        """Serve the versions of a file that :meth:`export` wrote, after those a domain has already.

        Numbers go on where the domain's end. The served version of the file descends from the one that was
        served until now, so that a rollback undoes the import; so do those whose parent is not in the file.

        Args:
            path: The file.
            domain: The domain that takes them; the file's own if not given.
            trunk: Fingerprint of this deployment's trunk; a file that names another is refused.
            check: Raises a :class:`~drafts.errors.PolydraftError` for weights that cannot be served.

        Returns:
            The version that is served now.

        Raises:
            VersionsFileError: The file is damaged, of another form, or holds values that are not finite.
            InvalidValueError: ``domain`` is no name of a domain.
            CheckpointError: The versions cannot be written.
        """
        found = read_export(path, trunk, check)
        domain = found.domain if domain is None else domain
        check_domain_name(domain)
        with self._writing:
            following = self._book.following.get(domain, 0)
            versions, served = continued(path, found, domain, following, self.current(domain))
            reason = f"imported {len(versions)} versions of {found.domain}"
            book = self._book.taking(versions, served, self.keep)
            self._adopt(versions, book.noting("import", served, reason, file=path.name))
            return served

    def checksum(self, version: Version) -> str:
        """SHA-256 of a version's tensors; equal for equal weights by whatever path they came."""
        return checksum(version.tensors)

    def events(self) -> list[dict[str, Any]]:
        """What changed, oldest first: ``kind, domain, number, reason, time`` and the kind's own figures."""
        return [dict(event) for event in self._book.events]

    def lineage(self, domain: str) -> list[dict[str, Any]]:
        """Kept versions as plain values, oldest first."""
        served = self.current(domain)
        return [
            {**v.metadata(), "served": v is served, "checksum": self.checksum(v)}
            for v in self.versions(domain)
        ]

    def _known(self, domain: str) -> Version:
        version = self.current(domain)
        if version is None:
            raise UnknownNameError("domain", domain, self.domains())
        return version

    def _before(self, served: Version) -> Version:
        kept = self._book.kept[served.domain]
        if served.parent in kept:
            return kept[served.parent]
        earlier = [number for number in kept if number < served.number]
        if not earlier:
            field_name = f"{served.domain}.version"
            raise InvalidValueError(field_name, served.number, "a version with an earlier one still kept")
        return kept[max(earlier)]

    def _adopt(self, versions: Sequence[Version], book: Book) -> None:
        """Write new versions that ``book`` keeps, then commit: a failure on the way changes nothing."""
        added = [v for v in versions if v.number in book.kept[v.domain]]
        try:
            for version in added:
                self._files.save(version.domain, version.number, version.tensors, version.metadata())
            self._commit(book)
        except CheckpointError:
            for version in added:
                self._files.remove(version.domain, version.number)
            raise

    def _commit(self, book: Book) -> None:
        """The moment of change: the index on disk, then memory, then files that it no longer names."""
        flushed = True
        try:
            self._files.save_index(book.index())
        except UnflushedError as error:
            logger.warning("%s; what the index before it names stays on disk", error)
            flushed = False
        before, self._book = self._book, book
        self._serial += 1
        if flushed:
            sweep(self._files, before, book)

    def _restore(self) -> None:
        """Serve what was served before, or the last good version before it; a full disk stops nothing."""
        self._book, lost = restore(self._files)
        for domain, wanted in lost.items():
            version, reason = self._book.served[domain], f"version {wanted} could not be read"
            logger.error("domain %s: %s; serving version %d", domain, reason, version.number)
            try:
                self._commit(self._book.noting("fallback", version, reason, wanted=wanted))
            except CheckpointError as error:
                logger.error("%s", error)
