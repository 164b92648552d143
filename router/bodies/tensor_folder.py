"""Memories and buffers on disk: one safetensors file per domain; a damaged one is set aside."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from drafts.checkpoint import clean_leftovers, load_tensors, save_tensors
from drafts.errors import CheckpointError

log = logging.getLogger(__name__)

Tensors = dict[str, torch.Tensor]


class TensorFolder:
    """One safetensors file per domain in a folder; a file that cannot be read is set aside.

    Args:
        folder: The folder; made if missing.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        clean_leftovers(folder)

    def save(self, domain: str, tensors: Tensors) -> None:
        """Write a domain's tensors atomically; an empty state removes the file."""
        if tensors:
            save_tensors(self._path(domain), tensors, {"domain": domain})
        else:
            self.remove(domain)

    def remove(self, domain: str) -> None:
        """Remove a domain's file."""
        self._path(domain).unlink(missing_ok=True)

    def load(self) -> dict[str, Tensors]:
        """All readable files by domain. A damaged one is renamed ``*.corrupt`` and logged."""
        found: dict[str, Tensors] = {}
        for path in sorted(self.folder.glob("*.safetensors")):
            try:
                found[path.stem] = load_tensors(path)[0]
            except CheckpointError as error:
                aside = path.with_suffix(".corrupt")
                path.replace(aside)
                log.warning("%s; it was set aside as %s and starts empty", error, aside.name)
        return found

    def _path(self, domain: str) -> Path:
        return self.folder / f"{domain}.safetensors"
