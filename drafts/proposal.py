"""The proposal: what every draft hands to verification, and the only form that is verified."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from drafts.errors import IntegrityError

ROOT = -1
"""Parent index of a node that directly continues the committed text."""


@dataclass(frozen=True)
class Proposal:
    """A small token tree proposed for one row; a chain is its simplest form.

    Nodes are ordered so that a parent precedes its children.

    Attributes:
        tokens: Token id of every node.
        parents: Index of every node's parent, ``ROOT`` for nodes that follow the committed text.
        sources: Names of the sources that proposed each node, joined by ``+``.
        confidence: Estimated probability that a node is accepted given that its parent is, in
            [0, 1]. It orders and trims nodes; it never decides acceptance.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    sources: tuple[str, ...] = ()
    confidence: tuple[float, ...] = ()

    @classmethod
    def chain(cls, tokens: Sequence[int], source: str, confidence: Sequence[float]) -> Proposal:
        """A chain of ``tokens``, each the only child of the one before."""
        n = len(tokens)
        return cls(tuple(tokens), tuple(range(ROOT, n - 1)), (source,) * n, tuple(confidence))

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_chain(self) -> bool:
        """Whether every node is the only child of the node before it."""
        return self.parents == tuple(range(ROOT, len(self.tokens) - 1))

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Depth of each node, 1 for a child of the root."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent == ROOT else depths[parent] + 1)
        return tuple(depths)

    @cached_property
    def reach(self) -> tuple[float, ...]:
        """Estimated probability that each node is accepted, all its ancestors included."""
        reach: list[float] = []
        for parent, confidence in zip(self.parents, self.confidence, strict=True):
            reach.append(confidence * (1.0 if parent == ROOT else reach[parent]))
        return tuple(reach)

    def first(self, count: int) -> Proposal:
        """The proposal cut to its first ``count`` nodes (still a valid tree)."""
        if count >= len(self.tokens):
            return self
        return Proposal(
            self.tokens[:count],
            self.parents[:count],
            self.sources[:count],
            self.confidence[:count],
        )

    def path(self, emitted: Sequence[int]) -> list[int]:
        """Indices of the nodes that spell the beginning of ``emitted``, each the parent of the next."""
        found: list[int] = []
        at = ROOT
        for token in emitted:
            for index, parent in enumerate(self.parents):
                if parent == at and self.tokens[index] == token:
                    break
            else:
                break
            found.append(index)
            at = index
        return found

    def check(self) -> None:
        """Raise :class:`IntegrityError` unless the arrays agree and parents precede children."""
        sizes = {len(self.tokens), len(self.parents), len(self.sources), len(self.confidence)}
        if len(sizes) != 1:
            raise IntegrityError(f"proposal arrays differ in length: {sorted(sizes)}")
        for index, parent in enumerate(self.parents):
            if not ROOT <= parent < index:
                raise IntegrityError(f"node {index} has parent {parent}, allowed {ROOT}..{index - 1}")


EMPTY = Proposal()
"""The proposal of a source that has nothing to say."""


@dataclass(frozen=True)
class Price:
    """What a proposed node must earn, from the engine's own measurements of this step.

    Attributes:
        rows: Rows that decode in this step.
        step_ms: Expected milliseconds of a target pass over these rows, by the number of tokens in it.
        fixed_k: Propose exactly this many where a source can, whatever the goodput; ``None`` lets
            goodput (tokens per millisecond) decide.
        silenced: Per row, why its limit is 0 (``""`` where it is not); for the statistics.
        slowdown: How much slower the machine is now than ``step_ms`` says, by which times measured
            elsewhere are divided.
        measured_ms: Once the pass is done, its milliseconds in the unit of ``step_ms``; ``None`` where
            nobody measures.
    """

    rows: int
    step_ms: Callable[[int], float]
    fixed_k: int | None = None
    silenced: Sequence[str] = ()
    slowdown: float = 1.0
    measured_ms: Callable[[], float | None] | None = None
