"""The versions of domains' experts as the service offers them: list, roll back, export, import."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from drafts.bank import ExpertBank
from drafts.errors import UnknownNameError, VersionsFileError
from drafts.registry import Registry
from drafts.version import Version
from osd.types import Event


class DomainVersions:
    """Reads and changes the registry from any thread; what changes is served from the next step border on.

    Args:
        registry: The registry.
        bank: Where experts are served, which says what fits; ``None`` where none are.
        on_event: Called with every change.
    """

    def __init__(
        self,
        registry: Registry,
        bank: ExpertBank | None = None,
        on_event: Callable[[Event], None] = lambda event: None,
    ) -> None:
        self._registry = registry
        self._bank = bank
        self._on_event = on_event

    def rows(self, domain: str) -> list[dict[str, Any]]:
        """Kept versions, oldest first: number, parent, reason, score, created, served, checksum.

        Raises:
            UnknownNameError: The domain has no expert.
        """
        self._check(domain)
        return self._registry.lineage(domain)

    def rollback(self, domain: str, to: int | None = None) -> dict[str, Any]:
        """Serve an earlier version again: ``to``, else the one that the served one was trained from.

        Raises:
            UnknownNameError: The domain or version is not known.
            InvalidValueError: No earlier version is kept.
        """
        version = self._registry.rollback(domain, to, reason="rolled back by hand")
        return self._changed("rollback", version)

    def export(self, domain: str) -> bytes:
        """The content of a file that :meth:`import_file` takes, here or on another server of the same trunk.

        Raises:
            UnknownNameError: The domain has no expert.
        """
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / domain_file(domain)
            self._registry.export(domain, path, self._trunk)
            return path.read_bytes()

    def import_file(self, domain: str, content: bytes, name: str = "") -> dict[str, Any]:
        """Serve the versions of an exported file after those that the domain has.

        Args:
            domain: A registered domain, of whatever name in the file.
            content: What :meth:`export` gave.
            name: Name of the file, for messages and the event.

        Raises:
            UnknownNameError: The domain has no expert.
            VersionsFileError: The file is damaged or does not fit; nothing has changed then.
        """
        self._check(domain)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / (Path(name).name or domain_file(domain))
            path.write_bytes(content)
            try:
                version = self._registry.import_file(path, domain, trunk=self._trunk, check=self._fits)
            except VersionsFileError as error:
                raise VersionsFileError(str(error).replace(f"{folder}/", "")) from error
        return self._changed("import", version)

    def _changed(self, kind: str, version: Version) -> dict[str, Any]:
        reason = str(self._registry.events()[-1]["reason"])
        self._on_event(Event(kind, version.domain, reason, {"version": version.number}))
        return next(row for row in self._registry.lineage(version.domain) if row["number"] == version.number)

    def _check(self, domain: str) -> None:
        if domain not in self._registry.domains():
            raise UnknownNameError("domain", domain, self._registry.domains())

    def _fits(self, tensors: dict[str, torch.Tensor]) -> None:
        if self._bank is not None:
            self._bank.check(tensors)

    @cached_property
    def _trunk(self) -> str | None:
        return None if self._bank is None else self._bank.trunk.fingerprint()


def domain_file(domain: str) -> str:
    """The name of a domain's exported file, where nobody gave one."""
    return f"{domain}.versions.safetensors"
