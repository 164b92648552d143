"""The proposal: what every draft hands to verification, and the only form that is verified."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from drafts.errors import DraftDistributionError, IntegrityError

ROOT = -1
"""Parent index of a node that directly continues the committed text."""


@dataclass(frozen=True, eq=False)
class DraftDistribution:
    """The distribution q that a proposed token was drawn from, as rejection sampling needs it.

    It must be the very distribution of the draw (after temperature and any cut to a few candidates), not a
    softer one: otherwise the output is no longer the target's (case A11).

    Attributes:
        ids: Candidate token ids, int64 [n], each once.
        probabilities: Their probabilities, float64 [n], adding up to 1.
    """

    ids: npt.NDArray[np.int64]
    probabilities: npt.NDArray[np.float64]

    @cached_property
    def sound(self) -> bool:
        """Whether this is a distribution: finite, not negative, of mass 1."""
        q = self.probabilities
        if len(q) != len(self.ids) or not np.isfinite(q).all() or (q < 0.0).any():
            return False
        return abs(float(q.sum()) - 1.0) <= 1e-6

    def of(self, token: int) -> float:
        """The probability of ``token``; 0 outside the candidates."""
        return float(self.probabilities[self.ids == token].sum())

    def without(self, token: int) -> DraftDistribution | None:
        """What a further draw, never ``token``, comes from; ``None`` where next to nothing is left."""
        left = np.where(self.ids == token, 0.0, self.probabilities)
        mass = float(left.sum())
        return DraftDistribution(self.ids, left / mass) if mass > 1e-9 else None


POINT_MASS = DraftDistribution(np.empty(0, dtype=np.int64), np.empty(0))
"""The distribution of a token that was chosen and not drawn: all mass on the token itself."""


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
        distributions: Per node what it was drawn from, given its parent and the siblings before it (so a
            sibling drawn without replacement has those removed), :data:`POINT_MASS` for a token that was
            chosen without chance, ``None`` where that is not known. Only rejection sampling reads it;
            ``None`` as a whole where the draft drew with verification's own noise.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    sources: tuple[str, ...] = ()
    confidence: tuple[float, ...] = ()
    distributions: tuple[DraftDistribution | None, ...] | None = None

    @classmethod
    def chain(
        cls,
        tokens: Sequence[int],
        source: str,
        confidence: Sequence[float],
        distributions: Sequence[DraftDistribution | None] | None = None,
    ) -> Proposal:
        """A chain of ``tokens``, each the only child of the one before."""
        n = len(tokens)
        drawn_from = None if distributions is None else tuple(distributions)
        return cls(tuple(tokens), tuple(range(ROOT, n - 1)), (source,) * n, tuple(confidence), drawn_from)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_chain(self) -> bool:
        """Whether every node is the only child of the node before it."""
        return self.parents == tuple(range(ROOT, len(self.tokens) - 1))

    @property
    def branch_nodes(self) -> int:
        """Nodes off the main chain, which from the root on takes every node's first (most probable) child."""
        at, on_chain = ROOT, 0
        for index, parent in enumerate(self.parents):
            if parent == at:
                at, on_chain = index, on_chain + 1
        return len(self.parents) - on_chain

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
            None if self.distributions is None else self.distributions[:count],
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
        if self.distributions is not None:
            sizes.add(len(self.distributions))
        if len(sizes) != 1:
            raise IntegrityError(f"proposal arrays differ in length: {sorted(sizes)}")
        for index, parent in enumerate(self.parents):
            if not ROOT <= parent < index:
                raise IntegrityError(f"node {index} has parent {parent}, allowed {ROOT}..{index - 1}")

    def check_distributions(self) -> tuple[DraftDistribution, ...]:
        """The distribution of every node, for rejection sampling (case A11).

        Raises:
            DraftDistributionError: A node without one, or arrays that differ in length; names the source.
        """
        found = self.distributions
        if found is None:
            found = (None,) * len(self.tokens)
        if len(found) != len(self.tokens):
            raise DraftDistributionError("+".join(dict.fromkeys(self.sources)), f"{len(found)} distributions")
        known = tuple(q for q in found if q is not None)
        if len(known) < len(found):
            raise DraftDistributionError(self.sources[found.index(None)], "no distribution")
        return known


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
