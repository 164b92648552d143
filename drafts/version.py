"""One version of a domain's draft, and the notice that another one is served."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch


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
        trunk: Fingerprint of the trunk it was trained on; ``None`` where it has none or none was noted.
    """

    domain: str
    number: int
    tensors: dict[str, torch.Tensor]
    parent: int | None
    reason: str
    score: float | None
    created: float
    trunk: str | None = None

    def metadata(self) -> dict[str, Any]:
        """All but domain and weights, as JSON."""
        return {
            "number": self.number,
            "parent": self.parent,
            "reason": self.reason,
            "score": self.score,
            "created": self.created,
            "trunk": self.trunk,
        }


@dataclass(frozen=True)
class Swap:
    """The engine has begun to serve another version of ``domain``'s expert at a step border."""

    domain: str
    old: int
    new: int
    reason: str
    numbers: dict[str, float] = field(default_factory=dict)
