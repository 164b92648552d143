"""The versions of domains' experts as the service offers them: list, roll back, export, import."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from drafts.errors import UnknownNameError, VersionsFileError
from drafts.expert_key import FIRST_KIND, expert_key, split_key
from drafts.registry import Registry
from drafts.version import Version
from osd.types import Event

Check = Callable[[str, dict[str, torch.Tensor]], None]
"""Raises a :class:`~drafts.errors.PolydraftError` for weights that cannot be served for a domain."""


class DomainVersions:
    """Reads and changes the registry from any thread; what changes is served from the next step border on.

    A domain has versions of each kind of draft that learns. Where no ``kind`` is given, its first one that
    has versions is meant: the expert of the ``eagle`` head, else the adapter of the draft model.

    Args:
        registry: The registry.
        checks: By kind that is served, what says whether an imported version fits.
        on_event: Called with every change.
    """

    def __init__(
        self,
        registry: Registry,
        checks: Mapping[str, Check] | None = None,
        on_event: Callable[[Event], None] = lambda event: None,
    ) -> None:
        self._registry = registry
        self._checks = dict(checks or {})
        self._on_event = on_event

    def rows(self, domain: str, kind: str | None = None) -> list[dict[str, Any]]:
        """Kept versions, oldest first: number, parent, reason, score, created, trunk, served, checksum.

        Raises:
            UnknownNameError: The domain has no expert, or none of this kind.
        """
        return self._registry.lineage(self._key(domain, kind))

    def rollback(self, domain: str, to: int | None = None, kind: str | None = None) -> dict[str, Any]:
        """Serve an earlier version again: ``to``, else the one that the served one was trained from.

        Raises:
            UnknownNameError: The domain, kind or version is not known.
            InvalidValueError: No earlier version is kept.
        """
        reason = "rolled back by hand"
        version = self._registry.rollback(self._key(domain, kind), to, reason=reason)
        return self._changed("rollback", version, reason)

    def export(self, domain: str, kind: str | None = None) -> bytes:
        """The content of a file that :meth:`import_file` takes, here or on another server of the same trunk.

        An adapter's file is taken by servers of the same draft model.

        Raises:
            UnknownNameError: The domain has no expert, or none of this kind.
        """
        key = self._key(domain, kind)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / domain_file(key)
            self._registry.export(key, path, self._trunk(key))
            return path.read_bytes()

    def import_file(
        self, domain: str, content: bytes, name: str = "", kind: str | None = None
    ) -> dict[str, Any]:
        """Serve the versions of an exported file after those that the domain has.

        Args:
            domain: A registered domain, of whatever name in the file.
            content: What :meth:`export` gave.
            name: Name of the file, for messages and the event.
            kind: The kind of draft that takes them.

        Raises:
            UnknownNameError: The domain has no expert, or none of this kind.
            VersionsFileError: The file is damaged or does not fit; nothing has changed then.
        """
        key = self._key(domain, kind)
        check = self._checks.get(split_key(key)[1], _anything)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / (Path(name).name or domain_file(key))
            path.write_bytes(content)
            try:
                version = self._registry.import_file(
                    path, key, trunk=self._trunk(key), check=lambda tensors: check(domain, tensors)
                )
            except VersionsFileError as error:
                raise VersionsFileError(str(error).replace(f"{folder}/", "")) from error
        return self._changed("import", version, f"imported up to version {version.number}")

    def _changed(self, what: str, version: Version, reason: str) -> dict[str, Any]:
        """Report a change and describe the version that it made the served one."""
        domain, kind = split_key(version.domain)
        told = reason if kind == FIRST_KIND else f"{kind}: {reason}"
        self._on_event(Event(what, domain, told, {"version": version.number}))
        return {**version.metadata(), "served": True, "checksum": self._registry.checksum(version)}

    def _key(self, domain: str, kind: str | None) -> str:
        kinds: dict[str, list[str]] = {}
        for key in self._registry.domains():
            name, found = split_key(key)
            kinds.setdefault(name, []).append(found)
        if domain not in kinds:
            raise UnknownNameError("domain", domain, sorted(kinds))
        own = sorted(kinds[domain], key=lambda name: (name != FIRST_KIND, name))
        if kind is not None and kind not in own:
            raise UnknownNameError("kind", kind, own)
        return expert_key(domain, kind or own[0])

    def _trunk(self, key: str) -> str | None:
        return self._registry.trunk if split_key(key)[1] == FIRST_KIND else None


def _anything(domain: str, tensors: dict[str, torch.Tensor]) -> None:
    """What a kind that is not served here is checked by."""


def domain_file(key: str) -> str:
    """The name of an exported file, where nobody gave one."""
    return f"{key}.versions.safetensors"
