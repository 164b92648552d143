"""Files of the registry: a folder per domain with one safetensors file per version, and one index."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import torch

from drafts.checkpoint import (
    clean_leftovers,
    flush_folder,
    load_tensors,
    make_folder,
    save_tensors,
    write_atomically,
)
from drafts.errors import CheckpointError
from drafts.version import Version
from drafts.version_checks import is_domain_name

logger = logging.getLogger(__name__)

INDEX = "registry.json"
FILE_PATTERN = "v*.safetensors"


class VersionFiles:
    """Reads and writes versions under ``directory``, which one process owns.

    A file that cannot be trusted is set aside as ``*.corrupt`` with a logged message and never served
    (case B26). ``directory`` ``None`` keeps nothing on disk.
    """

    def __init__(self, directory: Path | None) -> None:
        self.directory = directory
        if directory is not None:
            make_folder(directory)
            for path in clean_leftovers(directory):
                logger.warning("removed unfinished file %s", path)

    def path(self, domain: str, number: int) -> Path:
        """Where a version lives."""
        assert self.directory is not None
        return _version_file(self.directory, domain, number)

    def save(
        self, domain: str, number: int, tensors: dict[str, torch.Tensor], metadata: dict[str, Any]
    ) -> None:
        """Write one version; raises :class:`CheckpointError` where that fails."""
        if self.directory is not None:
            save_tensors(self.path(domain, number), tensors, {"version": json.dumps(metadata)})

    def remove(self, domain: str, number: int) -> None:
        """Delete one version's file; what cannot be deleted is logged, as nothing names it any more."""
        if self.directory is not None:
            try:
                self.path(domain, number).unlink(missing_ok=True)
            except OSError as error:
                logger.warning("version %d of %s is left on disk: %s", number, domain, error)

    def remove_domain(self, domain: str) -> None:
        """Delete a domain's folder; what cannot be deleted is logged, as nothing names it any more."""
        if self.directory is not None and (self.directory / domain).exists():
            try:
                shutil.rmtree(self.directory / domain)
                flush_folder(self.directory)
            except OSError as error:
                logger.warning("files of domain %s are left on disk: %s", domain, error)

    def load_domain(self, domain: str) -> list[tuple[dict[str, torch.Tensor], dict[str, Any]]]:
        """Tensors and metadata of every good version of a domain, oldest first."""
        if self.directory is None:
            return []
        loaded = []
        for path in sorted((self.directory / domain).glob(FILE_PATTERN)):
            try:
                tensors, metadata = load_tensors(path)
                version = json.loads(metadata["version"])
                if path != self.path(domain, version["number"]):
                    raise CheckpointError(f"{path}: holds version {version['number']}")
            except (CheckpointError, KeyError, ValueError) as error:
                self._set_aside(path, error)
                continue
            loaded.append((tensors, version))
        return sorted(loaded, key=lambda item: int(item[1]["number"]))

    def domains(self) -> list[str]:
        """Domains that have a folder with versions."""
        if self.directory is None:
            return []
        found = {path.parent.name for path in self.directory.glob(f"*/{FILE_PATTERN}")}
        return sorted(name for name in found if is_domain_name(name))

    def save_index(self, index: dict[str, Any]) -> None:
        """Write which versions each domain has and serves, the next numbers, and the events."""
        if self.directory is not None:
            write_atomically(self.directory / INDEX, json.dumps(index, indent=1).encode())

    def load_index(self) -> dict[str, Any] | None:
        """The index, or ``None`` when there is none or it cannot be read (it is set aside then)."""
        if self.directory is None or not (self.directory / INDEX).exists():
            return None
        path = self.directory / INDEX
        try:
            index = json.loads(path.read_bytes())
            index.setdefault("kept", {})
            wanted = {"served": dict, "kept": dict, "next": dict, "events": list}
            if not all(isinstance(index[name], kind) for name, kind in wanted.items()):
                raise ValueError("served, kept, next or events has the wrong type")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            self._set_aside(path, error)
            return None
        return {name: index[name] for name in wanted}

    @staticmethod
    def _set_aside(path: Path, error: Exception) -> None:
        aside = path.with_name(path.name + ".corrupt")
        logger.error("set aside %s as %s: %s", path, aside.name, error)
        try:
            path.replace(aside)
        except OSError as problem:
            logger.error("%s stays where it is: %s", path, problem)


def read_served(directory: Path) -> dict[str, int]:
    """Which version each domain serves, from the index of a folder that another process may own.

    Raises:
        CheckpointError: The index cannot be read.
    """
    path = directory / INDEX
    if not path.exists():
        return {}
    try:
        return {
            str(domain): int(number) for domain, number in json.loads(path.read_bytes())["served"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error


def read_version(directory: Path, domain: str, number: int) -> Version:
    """One version, from a folder that another process may own.

    Raises:
        CheckpointError: The file is missing or damaged; nothing is set aside.
    """
    path = _version_file(directory, domain, number)
    tensors, metadata = load_tensors(path)
    try:
        return Version(domain, tensors=tensors, **json.loads(metadata["version"]))
    except (KeyError, ValueError, TypeError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error


def _version_file(directory: Path, domain: str, number: int) -> Path:
    return directory / domain / f"v{number:04d}.safetensors"
