"""The guard: an update is published only if it is not worse, and taken back if live traffic says so."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from drafts.bank import Expert


@dataclass(frozen=True)
class Verdict:
    """Outcome of a comparison on the same positions.

    Attributes:
        accepted: Whether the candidate may be published.
        served: Mean agreement of the served version.
        candidate: Mean agreement of the candidate.
        positions: Positions compared.
    """

    accepted: bool
    served: float
    candidate: float
    positions: int


@dataclass
class Comparison:
    """Candidate against served, paired position by position, fed record by record."""

    served_sum: float = 0.0
    candidate_sum: float = 0.0
    positions: int = 0

    def add(self, served_sum: float, candidate_sum: float, positions: int) -> None:
        """Agreement summed over one record's positions."""
        self.served_sum += served_sum
        self.candidate_sum += candidate_sum
        self.positions += positions

    def verdict(self, margin: float) -> Verdict:
        """Accepted if the mean gain is at least ``margin``; an infinite or missing score never is."""
        if not self.positions:
            return Verdict(False, 0.0, 0.0, 0)
        served, candidate = self.served_sum / self.positions, self.candidate_sum / self.positions
        accepted = math.isfinite(candidate) and candidate - served >= margin
        return Verdict(accepted, served, candidate, self.positions)


@dataclass
class Watch:
    """Live comparison after a swap: the version served now against the one before, on every new record.

    Both are scored on the same records, so a change of traffic cannot be mistaken for a bad version.

    Attributes:
        version: The version served now.
        previous: Number of the one before.
        expert: Weights of the one before.
        gains: Per record, mean agreement of ``version`` minus that of ``previous``.
    """

    version: int
    previous: int
    expert: Expert
    gains: list[float] = field(default_factory=list)

    def has_fallen(self, least: int, z: float) -> bool:
        """Whether the mean gain is below 0 by more than ``z`` standard errors, after ``least`` records.

        The false-alarm chance of a whole watch is measured in the tests.
        """
        n = len(self.gains)
        if n < least:
            return False
        mean = sum(self.gains) / n
        variance = sum((g - mean) ** 2 for g in self.gains) / (n - 1)
        return mean < -z * math.sqrt(variance / n) - 1e-9
