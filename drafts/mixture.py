"""The mixture: per row and step all sources vote on one token tree, grown as far as it pays.

Verification is lossless, so the emitted text is evidence for every source that was asked, also for those
whose tokens were not verified (full information, HedgeSpec, arXiv 2510.20064, section 4). No exploration
of target passes is needed.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from drafts.combine import Combiner
from drafts.goodput import worthwhile_nodes
from drafts.kinds.base import DraftRow, Guess, MemorySource, NeuralSource, Source
from drafts.neural_pricing import NeuralPricing
from drafts.proposal import EMPTY, Price, Proposal
from drafts.registry import Swap
from drafts.tree import TreeGrower
from drafts.versions import VersionFollower

BATCH_MARGIN = 1.0
"""Factor on the price of time where several rows share a pass."""

MAX_NODES = 24
"""Most nodes of one row."""

EXPANSIONS = 10
"""Open ends that memories may continue per row and step, when it has the pass to itself."""


@dataclass
class _Earned:
    """Counters of one source in one domain, for the statistics."""

    asked: int = 0
    chosen: int = 0
    proposed: int = 0
    accepted: int = 0
    would_accept: int = 0


@dataclass
class _Asked:
    """One row of the present step."""

    tree: TreeGrower
    sure: float
    neural: list[str] = field(default_factory=list)


@dataclass
class Mixture:
    """Grows a proposal for each row and keeps score; implements ``osd.ports.Drafter``.

    Args:
        sources: All sources by name, cheapest first.
        domain_sources: Names of the sources a domain uses; domains not listed use all.
        versions: Adopts published versions at step borders; ``None`` when nothing learns.
        learn: False keeps the sources from learning the text of finished requests.
        default: Domain whose sources are used by domains that are not listed.
        only: Restricts all domains to these sources; ``None`` does not.
    """

    sources: Mapping[str, Source]
    domain_sources: dict[str, tuple[str, ...]] = field(default_factory=dict)
    versions: VersionFollower | None = None
    learn: bool = True
    default: str = "base"
    only: frozenset[str] | None = None
    learn_seconds: float = 0.0
    earned: dict[tuple[str, str], _Earned] = field(default_factory=lambda: defaultdict(_Earned))
    _combiners: dict[bool, Combiner] = field(default_factory=dict)
    _pricing: dict[str, NeuralPricing] = field(default_factory=lambda: defaultdict(NeuralPricing))
    _asked: list[_Asked | None] = field(default_factory=list)
    _goodput: dict[int, float] = field(default_factory=dict)
    _spent_ms: float = 0.0
    _price: Price | None = None

    @property
    def needs_features(self) -> bool:
        """Whether any source reads the target's hidden states."""
        return any(source.needs_features for source in self.sources.values())

    def propose(self, rows: Sequence[DraftRow], limits: Sequence[int], price: Price) -> list[Proposal]:
        """One proposal per row, trimmed to the nodes that pay at ``price``."""
        begin = time.perf_counter()
        self._price = price
        fixed = price.fixed_k
        caps = [limit if fixed is None else min(limit, fixed) for limit in limits]
        goodput = self._current_goodput(len(rows), price)
        node_ms = self._node_ms(len(rows), price)
        floor = 0.0 if fixed is not None else goodput * node_ms
        self._asked = [self._start(row, cap, floor) for row, cap in zip(rows, caps, strict=True)]
        for name, source in self.sources.items():
            if isinstance(source, NeuralSource):
                self._ask_neural(name, source, rows, caps, goodput, node_ms, fixed is not None)
        if fixed is not None:
            proposals = [
                EMPTY if asked is None else self._fixed(asked.tree, cap)
                for asked, cap in zip(self._asked, caps, strict=True)
            ]
        else:
            proposals = self._grown(len(rows), price, goodput)
        self._spent_ms = (time.perf_counter() - begin) * 1e3
        return proposals

    def observe(
        self, rows: Sequence[DraftRow], proposals: Sequence[Proposal], emitted: Sequence[Sequence[int]]
    ) -> None:
        """Score every source of the last step on the verified text, verified or not."""
        for row, proposal, tokens, asked in zip(rows, proposals, emitted, self._asked, strict=True):
            if asked is not None:
                self._score(row, asked, proposal, tokens)
        if self._price is not None and rows:
            processed = len(rows) + sum(len(proposal) for proposal in proposals)
            spent = self._price.step_ms(processed) + self._spent_ms
            self._update_goodput(len(rows), sum(len(tokens) for tokens in emitted) / max(spent, 1e-6))
        for row, tokens in zip(rows, emitted, strict=True):
            for source in self.sources.values():
                source.observe(row, tokens)
        self._asked = []

    def finish(self, row: DraftRow) -> None:
        """A request ended: sources learn its text if learning is on and the request allows it."""
        if self.learn and row.store:
            begin = time.perf_counter()
            for source in self.sources.values():
                source.finish(row)
            self.learn_seconds += time.perf_counter() - begin
        row.scratch.clear()

    def swap(self) -> list[Swap]:
        """Adopt newly published versions (called at a step border only)."""
        return [] if self.versions is None else self.versions.adopt()

    def version(self, domain: str) -> int:
        """The version that serves ``domain`` now; 0 is what it was born with."""
        return 0 if self.versions is None else self.versions.served(domain)

    def add_domain(self, domain: str, parent: str | None = None) -> None:
        """Serve a new domain with every source, inheriting from ``parent``."""
        for source in self.sources.values():
            source.add_domain(domain, parent)
        if parent in self.domain_sources:
            self.domain_sources.setdefault(domain, self.domain_sources[parent])

    def drop_domain(self, domain: str) -> None:
        """Forget a domain in every source."""
        for source in self.sources.values():
            source.drop_domain(domain)
        self.domain_sources.pop(domain, None)
        if self.versions is not None:
            self.versions.forget(domain)

    def names(self, domain: str) -> tuple[str, ...]:
        """Sources that ``domain`` uses."""
        names = self.domain_sources.get(domain) or self.domain_sources.get(self.default, tuple(self.sources))
        return names if self.only is None else tuple(name for name in names if name in self.only)

    def describe(self, domain: str) -> dict[str, dict[str, float | int | str]]:
        """Per source of a domain: what it earned and how large it is."""
        report: dict[str, dict[str, float | int | str]] = {}
        for name in self.names(domain):
            earned = self.earned[(domain, name)]
            report[name] = {
                "asked": earned.asked,
                "chosen": earned.chosen,
                "proposed_tokens": earned.proposed,
                "accepted_tokens": earned.accepted,
                "would_accept_per_ask": earned.would_accept / earned.asked if earned.asked else 0.0,
                **self.sources[name].describe(domain),
            }
        return report

    def _memories(self, domain: str) -> dict[int, MemorySource]:
        names = self.names(domain)
        return {
            index: source
            for index, (name, source) in enumerate(self.sources.items())
            if isinstance(source, MemorySource) and name in names
        }

    def _start(self, row: DraftRow, cap: int, floor: float) -> _Asked | None:
        """A tree that holds what the memories say about the next token."""
        if cap <= 0:
            return None
        tree = TreeGrower(
            row, self._memories(row.domain), self._combiner(row), tuple(self.sources), cap, floor
        )
        return _Asked(tree, tree.start())

    def _ask_neural(
        self,
        name: str,
        source: NeuralSource,
        rows: Sequence[DraftRow],
        caps: Sequence[int],
        goodput: float,
        node_ms: float,
        always: bool,
    ) -> None:
        """Let a neural source deepen the trees of the rows where that is expected to earn its time."""
        able = [
            index
            for index, (row, asked) in enumerate(zip(rows, self._asked, strict=True))
            if asked is not None and name in self.names(row.domain)
        ]
        pricing = self._pricing[name]
        if not always and able:
            trees = [self._asked[index] for index in able]
            sure = [asked.sure for asked in trees if asked is not None]
            wanted = pricing.choose([rows[i].domain for i in able], sure, goodput, node_ms)
            able = [index for index, yes in zip(able, wanted, strict=True) if yes]
        if not able:
            return
        floor = 0.0 if always else goodput * node_ms + pricing.depth_floor(goodput, len(able))
        at = list(self.sources).index(name)
        trees = [self._asked[index] for index in able]
        for asked in trees:
            assert asked is not None
            asked.neural.append(name)
            asked.tree.lead()

        def extend(index: int, guesses: Sequence[Guess]) -> int | None:
            asked = trees[index]
            assert asked is not None
            return asked.tree.extend(at, guesses, floor)

        begin = time.perf_counter()
        source.draft([rows[i] for i in able], [caps[i] for i in able], extend)
        pricing.note_call(len(able), (time.perf_counter() - begin) * 1e3)

    @staticmethod
    def _fixed(tree: TreeGrower, depth: int) -> Proposal:
        tree.branch_main(depth)
        return tree.main_path(depth)

    def _grown(self, count: int, price: Price, goodput: float) -> list[Proposal]:
        """Branch out, then keep the nodes that pay over the whole batch."""
        expansions = max(EXPANSIONS // count, 2)
        ranked: list[Proposal] = []
        for asked in self._asked:
            if asked is None:
                ranked.append(EMPTY)
                continue
            asked.tree.branch(expansions)
            ranked.append(asked.tree.ranked(MAX_NODES))
        kept, _ = worthwhile_nodes([proposal.reach for proposal in ranked], price.step_ms, goodput)
        return [proposal.first(count) for proposal, count in zip(ranked, kept, strict=True)]

    def _score(self, row: DraftRow, asked: _Asked, proposal: Proposal, emitted: Sequence[int]) -> None:
        right = asked.tree.score(emitted)
        names = tuple(self.sources)
        by_memories = max((n for i, n in right.items() if not self.sources[names[i]].is_neural), default=0)
        for index, count in right.items():
            earned = self.earned[(row.domain, names[index])]
            earned.asked += 1
            earned.would_accept += count
        path = proposal.path(emitted)
        for index, sources in enumerate(proposal.sources):
            for name in sources.split("+"):
                earned = self.earned[(row.domain, name)]
                earned.proposed += 1
                earned.accepted += index in path
        for name in {name for sources in proposal.sources for name in sources.split("+")}:
            self.earned[(row.domain, name)].chosen += 1
        for name in asked.neural:
            alone = sum(sources == name for sources in proposal.sources)
            self._pricing[name].note_gain(row.domain, asked.sure, len(path) - by_memories, alone)

    def _combiner(self, row: DraftRow) -> Combiner:
        sampled = row.temperature > 0
        if sampled not in self._combiners:
            self._combiners[sampled] = Combiner([source.is_neural for source in self.sources.values()])
        return self._combiners[sampled]

    def _current_goodput(self, rows: int, price: Price) -> float:
        """What a millisecond is worth, in tokens; dearer in a batch, where an over-estimate costs everyone.

        Nodes are picked for their estimated reach, so the picked ones are over-estimated (the
        optimiser's curse), and the more rows compete the more so.
        """
        goodput = self._goodput.get(rows, rows / max(price.step_ms(rows), 1e-6))
        return goodput * (BATCH_MARGIN if rows > 1 else 1.0)

    @staticmethod
    def _node_ms(rows: int, price: Price) -> float:
        """Half the mean cost of the next eight nodes: below it a node is not even worth growing."""
        return max(price.step_ms(rows + 8) - price.step_ms(rows), 0.0) / 16

    def _update_goodput(self, rows: int, value: float) -> None:
        old = self._goodput.get(rows)
        self._goodput[rows] = value if old is None else old + 0.05 * (value - old)
