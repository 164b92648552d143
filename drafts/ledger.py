"""What each source earned in each domain, counted from verified text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

from drafts.proposal import Proposal

_TREE = "*"
"""Name under which the trees themselves are counted, whoever named their nodes."""


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
        alone: Accepted nodes that no other source named.
    """

    spoke: int = 0
    chosen: int = 0
    proposed: int = 0
    accepted: int = 0
    right: int = 0
    alone: int = 0


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
        tree = self._of(domain, _TREE)
        tree.spoke += 1
        tree.proposed += len(proposal.sources)
        tree.accepted += len(path)
        for index, sources in enumerate(proposal.sources):
            names = sources.split("+")
            for name in names:
                earned = self._of(domain, name)
                earned.proposed += 1
                earned.accepted += index in path
                earned.alone += index in path and len(names) == 1
                chosen.add(name)
        for name in chosen:
            self._of(domain, name).chosen += 1

    def figures(self, domain: str, name: str) -> dict[str, float | int | str]:
        """For the statistics, see :func:`source_figures`; zeros for a source that never spoke."""
        earned, tree = (self._earned.get((domain, key), Earned()) for key in (name, _TREE))
        counts = {
            "spoke": earned.spoke,
            "chosen": earned.chosen,
            "proposed_tokens": earned.proposed,
            "accepted_tokens": earned.accepted,
            "accepted_alone": earned.alone,
            "right_tokens": earned.right,
            "steps": tree.spoke,
            "accepted_by_all": tree.accepted,
        }
        return {**counts, **source_figures(counts)}

    def forget(self, domain: str) -> None:
        """Drop a domain's counters."""
        for key in [key for key in self._earned if key[0] == domain]:
            del self._earned[key]

    def state(self) -> list[list[str | int]]:
        """All counters as rows of domain, source and figures."""
        return [[domain, name, *vars(e).values()] for (domain, name), e in list(self._earned.items())]

    def load_state(self, rows: Sequence[Sequence[str | int]]) -> None:
        """Restore :meth:`state`; rows of an older form, which lack counters, begin anew."""
        for domain, name, *counts in rows:
            if len(counts) == len(fields(Earned)):
                self._earned[(str(domain), str(name))] = Earned(*map(int, counts))

    def _of(self, domain: str, name: str) -> Earned:
        return self._earned.setdefault((domain, name), Earned())


COUNTS = (
    "spoke",
    "chosen",
    "proposed_tokens",
    "accepted_tokens",
    "accepted_alone",
    "right_tokens",
    "steps",
    "accepted_by_all",
)
"""Counters of a source's figures; the other figures follow from them."""


def source_figures(counts: Mapping[str, int]) -> dict[str, float]:
    """What follows from a source's counters in a domain.

    ``share`` is its accepted nodes over all accepted ones; shares add up to more than 1 where sources agree.
    ``gain`` is accepted tokens per step that no other source named: what would be missing without it, had the
    trees been the same. ``right_per_step`` is its own leading tokens right, verified or not.
    """

    def ratio(top: str, bottom: str) -> float:
        return counts[top] / counts[bottom] if counts[bottom] else 0.0

    return {
        "acceptance_rate": ratio("accepted_tokens", "proposed_tokens"),
        "share": ratio("accepted_tokens", "accepted_by_all"),
        "gain": ratio("accepted_alone", "steps"),
        "right_per_step": ratio("right_tokens", "spoke"),
    }
