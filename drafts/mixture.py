"""The mixture: per row and step all sources vote on one token tree, grown as far as it pays.

Verification is lossless, so the emitted text is evidence for every source that was asked, also for those
whose tokens were not verified (full information, HedgeSpec, arXiv 2510.20064, section 4). No exploration
of target passes is needed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from drafts.calls import Asked, NeuralCalls, Worth
from drafts.combine import Combiner
from drafts.control import Control, Drawn
from drafts.errors import InvalidValueError
from drafts.kinds.base import DraftRow, MemorySource, NeuralSource, Source
from drafts.ledger import Ledger
from drafts.proposal import Price, Proposal
from drafts.regret import DEPTHS, RegretBook
from drafts.tree import TreeGrower
from drafts.version import Swap
from drafts.versions import VersionFollower

MAX_NODES = 24
"""Most nodes of one row, unless config says otherwise."""

EXPANSIONS = 10
"""Open ends that memories may continue per row and step, when it has the pass to itself."""


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
        max_nodes: Most nodes of one row.
        forced_nodes: Propose trees of as many nodes as there are up to this, whatever they cost: for
            checks of trees where they would not pay. ``None`` lets goodput decide.
        clock: Seconds, by which drafting is timed.
    """

    sources: Mapping[str, Source]
    domain_sources: dict[str, tuple[str, ...]] = field(default_factory=dict)
    versions: VersionFollower | None = None
    learn: bool = True
    default: str = "base"
    only: frozenset[str] | None = None
    trees: bool = True
    max_nodes: int = MAX_NODES
    forced_nodes: int | None = None
    learn_seconds: float = 0.0
    ledger: Ledger = field(default_factory=Ledger)
    clock: Callable[[], float] = time.perf_counter
    control: Control = field(default_factory=Control)
    _combiners: dict[bool, Combiner] = field(default_factory=dict)
    _asked: list[Asked | None] = field(default_factory=list)
    _dropped: set[str] = field(default_factory=set)
    _spent_ms: float = 0.0
    _price: Price | None = None

    def __post_init__(self) -> None:
        for name, source in self.sources.items():
            if not isinstance(source, MemorySource | NeuralSource):
                raise InvalidValueError("sources", name, "a MemorySource or a NeuralSource")
        self.calls = NeuralCalls(self.clock, self.control.pacing)
        self.regret = RegretBook(self.clock)

    @property
    def needs_features(self) -> bool:
        """Whether any source reads the target's hidden states."""
        return any(source.needs_features for source in self.sources.values())

    def propose(self, rows: Sequence[DraftRow], limits: Sequence[int], price: Price) -> list[Proposal]:
        """One proposal per row, trimmed to the nodes that pay at ``price``."""
        begin = self.clock()
        if self.forced_nodes is not None:
            price = replace(price, fixed_k=self.forced_nodes)
        self._price, self.calls.spent_ms = price, 0.0
        fixed = price.fixed_k
        caps = [limit if fixed is None else min(limit, fixed) for limit in limits]
        goodput, node_ms = self.control.pacing.goodput(price), self.control.pacing.node_ms(price)
        floor = 0.0 if fixed is not None else goodput * node_ms
        able = [cap > 0 for cap in caps]
        wanted = (
            able if fixed is not None else self.control.pacing.whom([row.domain for row in rows], able, price)
        )
        self._asked = [
            self._start(row, cap, floor, fixed is not None) if want else None
            for row, cap, want in zip(rows, caps, wanted, strict=True)
        ]
        worth = Worth(goodput, node_ms, price.slowdown, always=fixed is not None)
        for at, (name, source) in enumerate(self.sources.items()):
            if isinstance(source, NeuralSource):
                self.calls.ask(at, source, rows, caps, self._askable(name, rows), name, worth)
        if fixed is None:
            self._probe(rows, caps, price, goodput)
        if self.trees and (fixed is None or self.forced_nodes is not None):
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
        for at, (row, proposal, tokens, asked) in enumerate(zip(rows, proposals, emitted, step, strict=True)):
            if asked is not None:
                self._score(row, asked, proposal, tokens, self.control.spent(at))
            self.regret.close(row)
        for row, tokens in zip(rows, emitted, strict=True):
            for source in self.sources.values():
                source.observe(row, tokens)
        if self._price is not None and rows:
            spent = self._spent_ms + (self.clock() - begin) * 1e3 / self._price.slowdown
            nodes, counts = sum(map(len, proposals)), list(map(len, emitted))
            dropped = self._dropped.intersection(row.domain for row in rows)
            self.control.settle(
                self._price,
                nodes,
                counts,
                spent,
                self.calls.spent_ms,
                counted=not dropped,
                branch_nodes=[proposal.branch_nodes for proposal in proposals],
            )

    def finish(self, row: DraftRow) -> None:
        """A request ended: sources learn its text if learning is on and the request allows it."""
        self.regret.close(row, ended=True)
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

    def add_domain(self, domain: str, parent: str | None = None, brings: tuple[str, ...] = ()) -> None:
        """Serve a new domain with every source, inheriting from ``parent``, and with what it ``brings``."""
        self._dropped.discard(domain)
        for source in self.sources.values():
            source.add_domain(domain, parent)
        if parent in self.domain_sources:
            self.domain_sources.setdefault(domain, self.domain_sources[parent])
        if brings:
            names = self.domain_sources.get(domain, tuple(self.sources))
            self.domain_sources[domain] = tuple(dict.fromkeys((*names, *brings)))
        if self.versions is not None:
            self.versions.look_again()

    def drop_domain(self, domain: str) -> None:
        """Forget a domain in every source."""
        for source in self.sources.values():
            source.drop_domain(domain)
        self.domain_sources.pop(domain, None)
        self.ledger.forget(domain)
        self.control.forget(domain)
        for combiner in self._combiners.values():
            combiner.forget(domain)
        self.calls.forget(domain)
        self.regret.forget(domain)
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
        return {**self.control.figures(domain), "regret": self.regret.figures(domain)}

    def state(self) -> dict[str, Any]:
        """What was learned about the sources, as JSON: the combiners' weights, ledger and book."""
        combiners = {
            "sampled" if sampled else "greedy": {
                "shared": list(c.shared),
                "squares": list(c.squares),
                "own": dict(c.own),
            }
            for sampled, c in self._combiners.items()
        }
        return {
            "sources": list(self.sources),
            "combiners": combiners,
            "earned": self.ledger.state(),
            "speculated": self.control.book.state(),
            "regret": self.regret.state(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state`; weights only where the sources are the same."""
        self.ledger.load_state(state.get("earned", []))
        self.control.book.load_state(state.get("speculated", {}))
        self.regret.load_state(state.get("regret", {}))
        if state.get("sources") != list(self.sources):
            return
        for name, weights in state.get("combiners", {}).items():
            combiner = self._combiner(name == "sampled")
            combiner.shared = [float(value) for value in weights["shared"]]
            combiner.squares = [float(value) for value in weights.get("squares", combiner.squares)]
            combiner.own = {domain: list(map(float, own)) for domain, own in weights["own"].items()}

    def _memories(self, row: DraftRow, leave: frozenset[str] = frozenset()) -> dict[int, MemorySource]:
        names = set(self.names_of(row)) - leave
        return {
            index: source
            for index, (name, source) in enumerate(self.sources.items())
            if isinstance(source, MemorySource) and name in names
        }

    def _start(self, row: DraftRow, cap: int, floor: float, always: bool) -> Asked | None:
        """A tree that holds what the memories say about the next token; useless ones only ``always``."""
        if cap <= 0:
            return None
        tree = TreeGrower(
            row,
            self._memories(row, frozenset() if always else self.regret.useless(row.domain)),
            self._combiner(row.temperature > 0),
            tuple(self.sources),
            cap,
            floor,
        )
        return Asked(tree, tree.start())

    def _askable(self, name: str, rows: Sequence[DraftRow]) -> dict[int, Asked]:
        """The rows of the step that may be asked of the source ``name``, by index."""
        return {
            index: asked
            for index, (row, asked) in enumerate(zip(rows, self._asked, strict=True))
            if asked is not None and name in self.names_of(row)
        }

    def _probe(self, rows: Sequence[DraftRow], caps: Sequence[int], price: Price, goodput: float) -> None:
        """At sampled steps, keep what every source alone would have proposed, as far as pacing allows."""
        pacing = self.control.pacing
        for row, cap, asked in zip(rows, caps, self._asked, strict=True):
            if asked is None or row.domain in self._dropped:
                continue
            pays = pacing.pays(row.domain, len(rows))
            if not self.regret.due(row, hurry=pays):
                continue
            if not (pays or pacing.allowance.afford(pacing.ask_ms(len(rows)))):
                continue
            depth = min(cap, DEPTHS[-1])
            names = tuple(self.sources)
            chains = {
                names[index]: self.regret.drawn(names[index], source, row, depth)
                for index, source in self._memories(row).items()
            }
            for name in asked.neural:
                chains[name] = asked.tree.own_chain(names.index(name))
            call_ms = {name: self.calls.token_ms(name, len(rows)) for name in asked.neural}
            self.regret.open(row, chains, call_ms, price, goodput)

    def _branch(self, count: int) -> None:
        """Let the memories branch out, and rank what was grown."""
        expansions = max(EXPANSIONS // count, 2)
        most = self.max_nodes if self.forced_nodes is None else self.forced_nodes
        for asked in self._asked:
            if asked is not None:
                asked.tree.branch(expansions)
                asked.ranked = asked.tree.ranked(most)

    def _score(
        self, row: DraftRow, asked: Asked, proposal: Proposal, emitted: Sequence[int], cost: float
    ) -> None:
        if row.domain in self._dropped:
            return
        names = tuple(self.sources)
        right = {names[index]: count for index, count in asked.tree.score(emitted).items()}
        whole = asked.ranked.path(emitted)
        self.control.depths.see(row.domain, asked.ranked, whole, len(emitted))
        path = [node for node in whole if node < len(proposal)]
        self.ledger.add(row.domain, right, proposal, path)
        self.calls.note_gains(row.domain, asked, right, proposal, len(path))
        self.regret.served(row, len(path), cost)

    def _combiner(self, sampled: bool) -> Combiner:
        if sampled not in self._combiners:
            self._combiners[sampled] = Combiner([source.is_neural for source in self.sources.values()])
        return self._combiners[sampled]
