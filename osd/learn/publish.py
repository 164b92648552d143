"""What learning asks of the registry."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from drafts.version import Version


class Publisher(Protocol):
    """Publishes versions atomically and can take the newest one back (``drafts.registry.Registry``)."""

    def domains(self) -> list[str]:
        """Domains that have a version."""
        ...

    def publish(
        self,
        domain: str,
        tensors: Mapping[str, torch.Tensor],
        *,
        reason: str,
        score: float | None = None,
        parent: int | None = None,
    ) -> Version:
        """Make ``tensors`` the newest version of ``domain``."""
        ...

    def current(self, domain: str) -> Version | None:
        """The version to serve, ``None`` before the first."""
        ...

    def merge_all(self, pairs: Sequence[tuple[str, str, Mapping[str, float]]]) -> list[Version]:
        """Serve the first of each pair with the better of two experts; the second is gone."""
        ...

    def rollback(self, domain: str) -> Version:
        """Serve the version before again."""
        ...
