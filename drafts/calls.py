"""Calls of neural sources: which rows they are made for, what they take and what they add."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from drafts.kinds.base import DraftRow, Guess, NeuralSource
from drafts.neural_pricing import CALL_DEPTHS, EVIDENCE_DISCOUNT, NeuralPricing
from drafts.pacing import Pacing
from drafts.proposal import EMPTY, Proposal
from drafts.tree import TreeGrower


@dataclass
class Asked:
    """One row of the present step.

    Attributes:
        tree: What is grown for it.
        sure: Probability of the memories' best candidate for the next token.
        neural: Names of the neural sources that were asked.
        ranked: The grown nodes, most probable first.
        call_ms: Its share of neural calls.
    """

    tree: TreeGrower
    sure: float
    neural: list[str] = field(default_factory=list)
    ranked: Proposal = EMPTY
    call_ms: float = 0.0


@dataclass(frozen=True)
class Worth:
    """Prices of the present step.

    Attributes:
        goodput: What a millisecond is worth, in tokens.
        node_ms: Milliseconds that one more verified node costs.
        slowdown: How much slower the machine is now than those say.
        always: Ask and deepen whatever it costs, as k is fixed.
    """

    goodput: float
    node_ms: float
    slowdown: float = 1.0
    always: bool = False


@dataclass
class NeuralCalls:
    """Asks neural sources where that is expected to earn its time.

    Attributes:
        clock: Seconds, by which calls are timed.
        pacing: Says whether speculation as a whole pays, and grants what may be spent where it does not.
        spent_ms: Milliseconds of the present step's calls.
    """

    clock: Callable[[], float]
    pacing: Pacing
    spent_ms: float = 0.0
    _pricing: dict[str, NeuralPricing] = field(default_factory=lambda: defaultdict(NeuralPricing))

    def ask(
        self,
        at: int,
        source: NeuralSource,
        rows: Sequence[DraftRow],
        caps: Sequence[int],
        asked: Mapping[int, Asked],
        name: str,
        worth: Worth,
    ) -> None:
        """Let one source deepen the trees of the rows where that pays.

        Args:
            at: Index of the source, ``name`` its name.
            source: The source.
            rows: The whole batch.
            caps: Most depths per row.
            asked: The rows it may be asked about, by index.
            worth: Of this step.
        """
        able = list(asked.items())
        unread = {index: source.unread(rows[index]) for index, _ in able}
        if not worth.always and able:
            able = self._chosen(name, able, unread, rows, worth)
        if not able:
            return
        floor = 0.0
        if not worth.always:
            depth = self._pricing[name].depth_floor(worth.goodput, len(able))
            floor = worth.goodput * worth.node_ms + depth
        spoke: set[int] = set()
        for _, item in able:
            item.tree.lead()

        def extend(index: int, guesses: Sequence[Guess]) -> int | None:
            spoke.add(index)
            return able[index][1].tree.extend(at, guesses, floor)

        begin = self.clock()
        source.draft([rows[i] for i, _ in able], [caps[i] for i, _ in able], extend)
        took = (self.clock() - begin) * 1e3 / worth.slowdown
        self.spent_ms += took
        tried = self._pricing[name].tried_ms
        if not worth.always and tried is not None:
            self.pacing.call_allowance.correct(took - tried)
        if spoke:
            self._pricing[name].note_call(len(spoke), took, [unread[index] for index, _ in able])
        for index in spoke:
            able[index][1].neural.append(name)
            able[index][1].call_ms += took / len(spoke)

    def token_ms(self, name: str, rows: int) -> float:
        """Milliseconds of one depth of a source for one of ``rows`` rows."""
        return self._pricing[name].call_ms(rows) / rows / CALL_DEPTHS

    def note_gains(
        self, domain: str, asked: Asked, right: Mapping[str, int], proposal: Proposal, accepted: int
    ) -> None:
        """What the sources asked about a row added to it; nothing is learned where no node was verified.

        Args:
            domain: The row's domain.
            asked: The row.
            right: Per source that spoke, the leading emitted tokens it had right, verified or not.
            proposal: What was verified.
            accepted: How many of its nodes were accepted.
        """
        if not len(proposal):
            return
        for name in asked.neural:
            others = max((count for other, count in right.items() if other != name), default=0)
            others = min(others, accepted)
            alone = sum(sources == name for sources in proposal.sources)
            self._pricing[name].note_gain(domain, asked.sure, accepted - others, alone)

    def forget(self, domain: str) -> None:
        """Drop a domain."""
        for pricing in self._pricing.values():
            pricing.forget(domain)

    def _chosen(
        self,
        name: str,
        able: Sequence[tuple[int, Asked]],
        unread: Mapping[int, int],
        rows: Sequence[DraftRow],
        worth: Worth,
    ) -> list[tuple[int, Asked]]:
        domains = [rows[index].domain for index, _ in able]
        pays = all(self.pacing.pays_with_calls(domain, len(rows)) for domain in domains)
        wanted = self._pricing[name].choose(
            domains,
            [item.sure for _, item in able],
            worth.goodput,
            worth.node_ms,
            unread=[unread[index] for index, _ in able],
            discount=EVIDENCE_DISCOUNT if pays else 1.0,
            afford=self.pacing.call_allowance.afford,
        )
        return [item for item, yes in zip(able, wanted, strict=True) if yes]
