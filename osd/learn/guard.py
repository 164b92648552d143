"""The guard: an update is published only if it is not worse, and taken back if live traffic says so."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from drafts.bank import Expert


@dataclass(frozen=True)
class Scores:
    """How one expert does at P positions, float ``[P]`` each.

    Attributes:
        agreement: 1 where the argmax is the emitted token: greedy acceptance itself, but coarse.
        overlap: 1 - TV(p, q): acceptance of sampled requests (DESIGN.md, Verification), and a much less
            noisy sign of progress for greedy ones.
    """

    agreement: torch.Tensor
    overlap: torch.Tensor


@dataclass
class _Paired:
    """Sums of one score of two experts at the same positions."""

    served: float = 0.0
    candidate: float = 0.0
    squares: float = 0.0
    positions: int = 0

    def add(self, served: torch.Tensor, candidate: torch.Tensor) -> None:
        self.served += float(served.sum())
        self.candidate += float(candidate.sum())
        self.squares += float(((candidate - served) ** 2).sum())
        self.positions += len(served)

    @property
    def gain(self) -> float:
        return (self.candidate - self.served) / max(1, self.positions)

    @property
    def error(self) -> float:
        n = max(1, self.positions)
        return math.sqrt(max(0.0, self.squares / n - self.gain**2) / n)


@dataclass(frozen=True)
class Verdict:
    """Outcome of a comparison on the same positions.

    Attributes:
        accepted: Whether the candidate may be published.
        hopeless: Whether it agrees less often by more than two standard errors, so that training on is no
            use.
        served: Mean agreement of the served version.
        candidate: Mean agreement of the candidate.
        overlap_gain: Gain in mean overlap.
        positions: Positions compared.
    """

    accepted: bool
    hopeless: bool
    served: float
    candidate: float
    overlap_gain: float
    positions: int


class Comparison:
    """Candidate against served, paired position by position, fed record by record."""

    def __init__(self) -> None:
        self._agreement = _Paired()
        self._overlap = _Paired()

    def add(self, served: Scores, candidate: Scores) -> None:
        """Scores of both at one record's positions."""
        self._agreement.add(served.agreement, candidate.agreement)
        self._overlap.add(served.overlap, candidate.overlap)

    def verdict(self, margin: float) -> Verdict:
        """Accepted if overlap gains at least ``margin`` and agreement falls by no more than its noise.

        The noise is one standard error; a score that is missing or not finite is never accepted.
        """
        agreement, overlap = self._agreement, self._overlap
        n = agreement.positions
        if not n:
            return Verdict(False, False, 0.0, 0.0, 0.0, 0)
        finite = math.isfinite(agreement.gain) and math.isfinite(overlap.gain)
        accepted = finite and overlap.gain >= margin and agreement.gain >= -agreement.error
        hopeless = not finite or agreement.gain < -2.0 * agreement.error
        return Verdict(accepted, hopeless, agreement.served / n, agreement.candidate / n, overlap.gain, n)


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
