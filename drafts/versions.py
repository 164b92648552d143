"""Follows the registry: at step borders, what was published becomes what is served."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Protocol

import torch

from drafts.errors import PolydraftError, UnknownNameError
from drafts.expert_key import FIRST_KIND, expert_key, split_key
from drafts.registry import Registry
from drafts.version import Swap

log = logging.getLogger(__name__)


class Loadable(Protocol):
    """Where served expert weights live, for example the stacked bank."""

    def load(self, domain: str, tensors: dict[str, torch.Tensor]) -> None:
        """Serve ``tensors`` as the expert of ``domain`` from now on."""
        ...


class Bank(Protocol):
    """Experts of one draft kind, by domain."""

    def __contains__(self, domain: str) -> bool: ...

    def tensors(self, domain: str) -> dict[str, torch.Tensor]:
        """A copy of the domain's expert."""
        ...

    def load(self, domain: str, tensors: dict[str, torch.Tensor]) -> None:
        """Serve ``tensors`` as the expert of ``domain`` from now on."""
        ...


@dataclass(frozen=True)
class Banks:
    """The banks of all kinds that learn as one (a :class:`Loadable`)."""

    by_kind: dict[str, Bank]

    def load(self, key: str, tensors: dict[str, torch.Tensor]) -> None:
        """Serve ``tensors`` as the expert named ``key``."""
        domain, kind = split_key(key)
        self.by_kind[kind].load(domain, tensors)


@dataclass
class VersionFollower:
    """Serves exactly the version that the registry names, switching between steps only.

    The registry may be published to from any thread; ``adopt`` runs on the engine's thread, so a step
    sees the old version or the new one, never a half.

    Attributes:
        registry: What is published.
        bank: Where experts are served, by key (:mod:`drafts.expert_key`).
        kinds: Draft kinds whose experts are served here; others' versions are left alone.
    """

    registry: Registry
    bank: Loadable
    kinds: tuple[str, ...] = (FIRST_KIND,)
    _served: dict[str, int] = field(default_factory=dict)
    _refused: dict[str, int] = field(default_factory=dict)
    _serial: int = -1

    def adopt(self) -> list[Swap]:
        """Load every version that differs from the one being served; returns what was swapped.

        A version that does not fit the bank is logged and left out: the one before goes on serving. One of a
        domain that the bank does not know waits for the domain (:meth:`look_again`).
        """
        serial = self.registry.serial
        if serial == self._serial:
            return []
        swaps = []
        for domain in self.registry.domains():
            if split_key(domain)[1] not in self.kinds:
                continue
            version = self.registry.current(domain)
            old = self._served.get(domain)
            if version is None or version.number == old:
                continue
            try:
                self.bank.load(domain, version.tensors)
            except UnknownNameError:
                continue
            except PolydraftError as error:
                if self._refused.get(domain) != version.number:
                    log.error("version %d of %s cannot be served: %s", version.number, domain, error)
                self._refused[domain] = version.number
                continue
            self._served[domain] = version.number
            if old is None and version.number == 0:
                continue
            numbers = {} if version.score is None else {"score": version.score}
            swaps.append(Swap(split_key(domain)[0], old or 0, version.number, version.reason, numbers))
        self._serial = serial
        return swaps

    def look_again(self) -> None:
        """A domain was added, which may have had versions before: as after a restart."""
        self._serial = -1

    def forget(self, domain: str) -> None:
        """A domain is gone; one of the same name would begin anew."""
        for key in (expert_key(domain, kind) for kind in self.kinds):
            self._served.pop(key, None)
            self._refused.pop(key, None)

    def served(self, domain: str) -> int:
        """Version that serves ``domain``, of its first kind; 0 before anything was published."""
        return self._served.get(expert_key(domain, self.kinds[0]), 0)

    def served_by_kind(self, domain: str) -> dict[str, int]:
        """Number of the version that serves ``domain``, by kind."""
        return {kind: self._served.get(expert_key(domain, kind), 0) for kind in self.kinds}
