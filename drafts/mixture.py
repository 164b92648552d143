"""The mixture: per row and step all sources vote on one token tree, grown as far as it pays.

Verification is lossless, so the emitted text is evidence for every source that was asked, also for those
whose tokens were not verified (full information, HedgeSpec, arXiv 2510.20064, section 4). No exploration
of target passes is needed.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from drafts.combine import Combiner
from drafts.control import Control, Drawn
from drafts.errors import InvalidValueError
from drafts.kinds.base import DraftRow, Guess, MemorySource, NeuralSource, Source
from drafts.ledger import Ledger
from drafts.neural_pricing import EVIDENCE_DISCOUNT, NeuralPricing
from drafts.proposal import EMPTY, Price, Proposal
from drafts.registry import Swap
from drafts.tree import TreeGrower
from drafts.versions import VersionFollower

MAX_NODES = 24
"""Most nodes of one row."""

EXPANSIONS = 10
"""Open ends that memories may continue per row and step, when it has the pass to itself."""


@dataclass
class _Asked:
    """One row of the present step."""

    tree: TreeGrower
    sure: float
    neural: list[str] = field(default_factory=list)
    ranked: Proposal = EMPTY
    call_ms: float = 0.0


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
        trees: False proposes chains only, as a fixed k does.
        clock: Seconds, by which drafting is timed.
    """

    sources: Mapping[str, Source]
    domain_sources: dict[str, tuple[str, ...]] = field(default_factory=dict)
    versions: VersionFollower | None = None
    learn: bool = True
    default: str = "base"
    only: frozenset[str] | None = None
    trees: bool = True
    learn_seconds: float = 0.0
    ledger: Ledger = field(default_factory=Ledger)
    clock: Callable[[], float] = time.perf_counter
    control: Control = field(default_factory=Control)
    _combiners: dict[bool, Combiner] = field(default_factory=dict)
    _pricing: dict[str, NeuralPricing] = field(default_factory=lambda: defaultdict(NeuralPricing))
    _asked: list[_Asked | None] = field(default_factory=list)
    _dropped: set[str] = field(default_factory=set)
    _spent_ms: float = 0.0
    _calls_ms: float = 0.0
    _price: Price | None = None

    def __post_init__(self) -> None:
        for name, source in self.sources.items():
            if not isinstance(source, MemorySource | NeuralSource):
                raise InvalidValueError("sources", name, "a MemorySource or a NeuralSource")

    @property
    def needs_features(self) -> bool:
        """Whether any source reads the target's hidden states."""
        return any(source.needs_features for source in self.sources.values())

    def propose(self, rows: Sequence[DraftRow], limits: Sequence[int], price: Price) -> list[Proposal]:
        """One proposal per row, trimmed to the nodes that pay at ``price``."""
        begin = self.clock()
        self._price, self._calls_ms = price, 0.0
        fixed = price.fixed_k
        caps = [limit if fixed is None else min(limit, fixed) for limit in limits]
        goodput, node_ms = self.control.pacing.goodput(price), self.control.pacing.node_ms(price)
        floor = 0.0 if fixed is not None else goodput * node_ms
        able = [cap > 0 for cap in caps]
        wanted = (
            able if fixed is not None else self.control.pacing.whom([row.domain for row in rows], able, price)
        )
        self._asked = [
            self._start(row, cap, floor) if want else None
            for row, cap, want in zip(rows, caps, wanted, strict=True)
        ]
        for name, source in self.sources.items():
            if isinstance(source, NeuralSource):
                self._ask_neural(name, source, rows, caps, goodput, node_ms, fixed is not None)
        if fixed is None and self.trees:
            self._branch(len(rows))
        else:
            for asked, cap in zip(self._asked, caps, strict=True):
                if asked is not None:
                    asked.ranked = asked.tree.main_path(cap)
        drawn = [None if asked is None else Drawn(asked.ranked, asked.call_ms) for asked in self._asked]
        proposals = self.control.cut([row.domain for row in rows], drawn, price)
        self._spent_ms = (self.clock() - begin) * 1e3 / price.slowdown
        return proposals

    def observe(
        self, rows: Sequence[DraftRow], proposals: Sequence[Proposal], emitted: Sequence[Sequence[int]]
    ) -> None:
        """Score every source of the last step on the verified text, verified or not."""
        begin = self.clock()
        step, self._asked = self._asked or [None] * len(rows), []
        for row, proposal, tokens, asked in zip(rows, proposals, emitted, step, strict=True):
            if asked is not None:
                self._score(row, asked, proposal, tokens)
        for row, tokens in zip(rows, emitted, strict=True):
            for source in self.sources.values():
                source.observe(row, tokens)
        if self._price is not None and rows:
            spent = self._spent_ms + (self.clock() - begin) * 1e3 / self._price.slowdown
            nodes, counts = sum(map(len, proposals)), list(map(len, emitted))
            dropped = self._dropped.intersection(row.domain for row in rows)
            self.control.settle(self._price, nodes, counts, spent, self._calls_ms, counted=not dropped)

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
        self._dropped.discard(domain)
        for source in self.sources.values():
            source.add_domain(domain, parent)
        if parent in self.domain_sources:
            self.domain_sources.setdefault(domain, self.domain_sources[parent])

    def drop_domain(self, domain: str) -> None:
        """Forget a domain in every source."""
        for source in self.sources.values():
            source.drop_domain(domain)
        self.domain_sources.pop(domain, None)
        self.ledger.forget(domain)
        self.control.forget(domain)
        for combiner in self._combiners.values():
            combiner.forget(domain)
        for pricing in self._pricing.values():
            pricing.forget(domain)
        self._dropped.add(domain)
        if self.versions is not None:
            self.versions.forget(domain)

    def names(self, domain: str) -> tuple[str, ...]:
        """Sources that ``domain`` uses."""
        names = self.domain_sources.get(domain)
        if names is None:
            names = self.domain_sources.get(self.default, tuple(self.sources))
        return names if self.only is None else tuple(name for name in names if name in self.only)

    def names_of(self, row: DraftRow) -> tuple[str, ...]:
        """Sources that propose for ``row``: its domain's, as far as the request allows them."""
        names = self.names(row.domain)
        return names if row.sources is None else tuple(name for name in names if name in row.sources)

    def describe(self, domain: str) -> dict[str, dict[str, float | int | str]]:
        """Per source of a domain: what it earned and how large it is."""
        return {
            name: {**self.ledger.figures(domain, name), **self.sources[name].describe(domain)}
            for name in self.names(domain)
        }

    def speculation(self, domain: str) -> dict[str, Any]:
        """How much is speculated in a domain, what is expected and what comes of it."""
        return self.control.figures(domain)

    def state(self) -> dict[str, Any]:
        """What was learned about the sources, as JSON: the combiners' weights, ledger and book."""
        combiners = {
            "sampled" if sampled else "greedy": {"shared": list(c.shared), "own": dict(c.own)}
            for sampled, c in self._combiners.items()
        }
        return {
            "sources": list(self.sources),
            "combiners": combiners,
            "earned": self.ledger.state(),
            "speculated": self.control.book.state(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state`; weights only where the sources are the same."""
        self.ledger.load_state(state.get("earned", []))
        self.control.book.load_state(state.get("speculated", {}))
        if state.get("sources") != list(self.sources):
            return
        for name, weights in state.get("combiners", {}).items():
            combiner = self._combiner(name == "sampled")
            combiner.shared = [float(value) for value in weights["shared"]]
            combiner.own = {domain: list(map(float, own)) for domain, own in weights["own"].items()}

    def _memories(self, row: DraftRow) -> dict[int, MemorySource]:
        names = self.names_of(row)
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
            row,
            self._memories(row),
            self._combiner(row.temperature > 0),
            tuple(self.sources),
            cap,
            floor,
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
            (index, asked)
            for index, (row, asked) in enumerate(zip(rows, self._asked, strict=True))
            if asked is not None and name in self.names_of(row)
        ]
        pricing = self._pricing[name]
        if not always and able:
            domains = [rows[index].domain for index, _ in able]
            pays = all(self.control.pacing.pays_with_calls(domain, len(rows)) for domain in domains)
            wanted = pricing.choose(
                domains,
                [asked.sure for _, asked in able],
                goodput,
                node_ms,
                discount=EVIDENCE_DISCOUNT if pays else 1.0,
                afford=self.control.pacing.afford,
            )
            able = [item for item, yes in zip(able, wanted, strict=True) if yes]
        if not able:
            return
        floor = 0.0 if always else goodput * node_ms + pricing.depth_floor(goodput, len(able))
        at = list(self.sources).index(name)
        spoke: set[int] = set()
        for _, asked in able:
            asked.tree.lead()

        def extend(index: int, guesses: Sequence[Guess]) -> int | None:
            spoke.add(index)
            return able[index][1].tree.extend(at, guesses, floor)

        begin = self.clock()
        source.draft([rows[i] for i, _ in able], [caps[i] for i, _ in able], extend)
        took = (self.clock() - begin) * 1e3 / (1.0 if self._price is None else self._price.slowdown)
        self._calls_ms += took
        if spoke:
            pricing.note_call(len(spoke), took)
        for index in spoke:
            able[index][1].neural.append(name)
            able[index][1].call_ms += took / len(spoke)

    def _branch(self, count: int) -> None:
        """Let the memories branch out, and rank what was grown."""
        expansions = max(EXPANSIONS // count, 2)
        for asked in self._asked:
            if asked is not None:
                asked.tree.branch(expansions)
                asked.ranked = asked.tree.ranked(MAX_NODES)

    def _score(self, row: DraftRow, asked: _Asked, proposal: Proposal, emitted: Sequence[int]) -> None:
        if row.domain in self._dropped:
            return
        names = tuple(self.sources)
        right = {names[index]: count for index, count in asked.tree.score(emitted).items()}
        whole = asked.ranked.path(emitted)
        self.control.depths.see(row.domain, asked.ranked, whole, len(emitted))
        path = [node for node in whole if node < len(proposal)]
        self.ledger.add(row.domain, right, proposal, path)
        for name in asked.neural:
            others = max((count for other, count in right.items() if other != name), default=0)
            alone = sum(sources == name for sources in proposal.sources)
            self._pricing[name].note_gain(row.domain, asked.sure, len(path) - others, alone)

    def _combiner(self, sampled: bool) -> Combiner:
        if sampled not in self._combiners:
            self._combiners[sampled] = Combiner([source.is_neural for source in self.sources.values()])
        return self._combiners[sampled]
