"""What each source earned in each domain, counted from verified text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from drafts.proposal import Proposal


@dataclass
class Earned:
    """Counters of one source in one domain.

    A node that several sources named counts for each of them, so the sources' nodes add up to more than
    the trees held.

    Attributes:
        spoke: Steps in which it named a next token.
        chosen: Steps in which a node it named was verified.
        proposed: Verified nodes it named.
        accepted: Those of them that were accepted.
        right: Leading tokens its own best guesses had right, as far as the tree was grown.
    """

    spoke: int = 0
    chosen: int = 0
    proposed: int = 0
    accepted: int = 0
    right: int = 0


@dataclass
class Ledger:
    """:class:`Earned` by domain and source."""

    _earned: dict[tuple[str, str], Earned] = field(default_factory=dict)

    def add(self, domain: str, right: Mapping[str, int], proposal: Proposal, path: Sequence[int]) -> None:
        """Count one step of one row.

        Args:
            domain: The row's domain.
            right: Per source that spoke, the leading tokens it had right.
            proposal: What was verified.
            path: Indices of its accepted nodes.
        """
        for name, count in right.items():
            earned = self._of(domain, name)
            earned.spoke += 1
            earned.right += count
        chosen: set[str] = set()
        for index, sources in enumerate(proposal.sources):
            for name in sources.split("+"):
                earned = self._of(domain, name)
                earned.proposed += 1
                earned.accepted += index in path
                chosen.add(name)
        for name in chosen:
            self._of(domain, name).chosen += 1

    def figures(self, domain: str, name: str) -> dict[str, float | int | str]:
        """For the statistics; zeros for a source that never spoke."""
        earned = self._earned.get((domain, name), Earned())
        return {
            "spoke": earned.spoke,
            "chosen": earned.chosen,
            "proposed_tokens": earned.proposed,
            "accepted_tokens": earned.accepted,
            "right_per_step": earned.right / earned.spoke if earned.spoke else 0.0,
        }

    def forget(self, domain: str) -> None:
        """Drop a domain's counters."""
        for key in [key for key in self._earned if key[0] == domain]:
            del self._earned[key]

    def state(self) -> list[list[str | int]]:
        """All counters as rows of domain, source and figures."""
        return [[domain, name, *vars(e).values()] for (domain, name), e in list(self._earned.items())]

    def load_state(self, rows: Sequence[Sequence[str | int]]) -> None:
        """Restore :meth:`state`."""
        for domain, name, *counts in rows:
            self._earned[(str(domain), str(name))] = Earned(*map(int, counts))

    def _of(self, domain: str, name: str) -> Earned:
        return self._earned.setdefault((domain, name), Earned())
