"""Follows the registry: at step borders, what was published becomes what is served."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Protocol

import torch

from drafts.errors import PolydraftError
from drafts.registry import Registry
from drafts.version import Swap

log = logging.getLogger(__name__)


class Loadable(Protocol):
    """Where served expert weights live, for example the stacked bank."""

    def load(self, domain: str, tensors: dict[str, torch.Tensor]) -> None:
        """Serve ``tensors`` as the expert of ``domain`` from now on."""
        ...


@dataclass
class VersionFollower:
    """Serves exactly the version that the registry names, switching between steps only.

    The registry may be published to from any thread; ``adopt`` runs on the engine's thread, so a step
    sees the old version or the new one, never a half.
    """

    registry: Registry
    bank: Loadable
    _served: dict[str, int] = field(default_factory=dict)
    _refused: dict[str, int] = field(default_factory=dict)
    _serial: int = -1

    def adopt(self) -> list[Swap]:
        """Load every version that differs from the one being served; returns what was swapped.

        A version that does not fit the bank is logged and left out: the one before goes on serving.
        """
        serial = self.registry.serial
        if serial == self._serial:
            return []
        swaps = []
        for domain in self.registry.domains():
            version = self.registry.current(domain)
            old = self._served.get(domain)
            if version is None or version.number == old:
                continue
            try:
                self.bank.load(domain, version.tensors)
            except PolydraftError as error:
                if self._refused.get(domain) != version.number:
                    log.error("version %d of %s cannot be served: %s", version.number, domain, error)
                self._refused[domain] = version.number
                continue
            self._served[domain] = version.number
            if old is None and version.number == 0:
                continue
            numbers = {} if version.score is None else {"score": version.score}
            swaps.append(Swap(domain, old or 0, version.number, version.reason, numbers))
        self._serial = serial
        return swaps

    def forget(self, domain: str) -> None:
        """A domain is gone; one of the same name would begin anew."""
        self._served.pop(domain, None)
        self._refused.pop(domain, None)

    def served(self, domain: str) -> int:
        """Number of the version that serves ``domain``; 0 before anything was published."""
        return self._served.get(domain, 0)
