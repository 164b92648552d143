"""Grows one row's token tree: at every node all sources are asked, and their answers are combined."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from drafts.combine import Combiner, Vote, log_odds
from drafts.kinds.base import DraftRow, Guess, MemorySource
from drafts.proposal import EMPTY, POINT_MASS, ROOT, Proposal

Votes = dict[int, list[Vote]]
"""Per candidate token the votes it got."""


@dataclass(slots=True)
class _Node:
    token: int
    parent: int
    depth: int
    probability: float = 0.0
    reach: float = 0.0


@dataclass(slots=True)
class _Position:
    """What was said about the token that follows one node."""

    votes: Votes = field(default_factory=dict)
    tops: dict[int, int] = field(default_factory=dict)
    children: dict[int, int] = field(default_factory=dict)


class TreeGrower:
    """The candidate tree of one row in one step, kept until the verified text has scored it.

    A neural source is led along the *main path*, the most probable continuation by the combined
    evidence of all sources, so that it also continues where a memory knows better and the memory
    continues where the head knows better. Everything else branches off as a sibling.

    Args:
        row: The request.
        memories: Sources that cost no model time, by index.
        combiner: Turns votes into probabilities.
        names: Names of all sources, by index.
        depth: Most tokens a path may hold.
        floor: Reach below which a node is not worth growing.
    """

    def __init__(
        self,
        row: DraftRow,
        memories: Mapping[int, MemorySource],
        combiner: Combiner,
        names: Sequence[str],
        depth: int,
        floor: float,
    ) -> None:
        self.row = row
        self.depth = depth
        self.floor = floor
        self._memories = memories
        self._names = names
        self._combiner = combiner
        self._nodes: list[_Node] = []
        self._positions: dict[int, _Position] = {}
        self._cursor = ROOT

    def start(self) -> float:
        """Ask the memories about the next token; the best candidate's probability."""
        self._ask(ROOT)
        return max((self._nodes[n].probability for n in self._positions[ROOT].children.values()), default=0.0)

    def lead(self) -> None:
        """Put the cursor of a neural source back to the committed text."""
        self._cursor = ROOT

    def extend(self, source: int, guesses: Sequence[Guess], floor: float) -> int | None:
        """Add a neural source's guesses at the cursor and move on along the main path.

        Returns:
            The token to continue with, ``None`` where going deeper is not worth ``floor``.
        """
        if self._cursor != ROOT and self._nodes[self._cursor].depth >= self.depth:
            return None
        if self._cursor not in self._positions:
            self._ask(self._cursor)
        self._add(self._cursor, source, guesses)
        self._settle(self._cursor)
        best = self._best_child(self._cursor)
        if best is None:
            return None
        self._cursor = best
        node = self._nodes[best]
        return node.token if node.reach >= floor and node.depth < self.depth else None

    def branch(self, expansions: int) -> None:
        """Let the memories continue the most probable open ends, best first."""
        for _ in range(expansions):
            open_ends = [
                (node.reach, -index)
                for index, node in enumerate(self._nodes)
                if node.reach >= self.floor and node.depth < self.depth and index not in self._positions
            ]
            if not open_ends:
                return
            self._ask(-max(open_ends)[1])

    def own_chain(self, source: int) -> tuple[int, ...]:
        """A source's own best guesses one after another, as far as it was asked along them."""
        tokens: list[int] = []
        at: int | None = ROOT
        while at is not None and at in self._positions and source in self._positions[at].tops:
            position = self._positions[at]
            tokens.append(position.tops[source])
            at = position.children.get(tokens[-1])
        return tuple(tokens)

    def main_path(self, limit: int) -> Proposal:
        """The most probable chain, of at most ``limit`` tokens, continued by the memories where it ends.

        It ends before a token whose reach is below the floor.
        """
        chosen: list[int] = []
        at = ROOT
        while len(chosen) < limit:
            if at not in self._positions:
                self._ask(at)
            best = self._best_child(at)
            if best is None or self._nodes[best].reach < self.floor:
                break
            chosen.append(best)
            at = best
        return self._proposal(chosen)

    def ranked(self, limit: int) -> Proposal:
        """The ``limit`` nodes of greatest reach, best first (a parent is never below its child)."""
        order = sorted(range(len(self._nodes)), key=lambda n: (-self._nodes[n].reach, n))
        return self._proposal(order[:limit])

    def score(self, emitted: Sequence[int]) -> dict[int, int]:
        """Learn from the verified text; per source that spoke, how many leading tokens it had right."""
        right: dict[int, int] = {}
        silent: set[int] = set()
        at = ROOT
        for depth, token in enumerate(emitted):
            position = self._positions.get(at)
            if position is None:
                break
            tokens = list(position.votes)
            hit = tokens.index(token) if token in position.votes else None
            if tokens:
                self._combiner.learn(self.row.domain, depth > 0, list(position.votes.values()), hit)
            for source in right:
                if source not in position.tops:
                    silent.add(source)
            for source, top in position.tops.items():
                if depth == 0:
                    right[source] = 0
                if source in silent or source not in right:
                    continue
                if top == token:
                    right[source] += 1
                else:
                    silent.add(source)
            if hit is None or token not in position.children:
                break
            at = position.children[token]
        return right

    def _ask(self, at: int) -> None:
        """Ask every memory about the token after node ``at``."""
        self._positions.setdefault(at, _Position())
        path = self._path(at)
        for index, source in self._memories.items():
            self._add(at, index, source.guesses(self.row, path))
        self._settle(at)

    def _add(self, at: int, source: int, guesses: Sequence[Guess]) -> None:
        position = self._positions[at]
        if guesses:
            position.tops[source] = guesses[0][0]
        for token, confidence in guesses:
            position.votes.setdefault(token, []).append((source, log_odds(confidence)))

    def _settle(self, at: int) -> None:
        """Give every candidate after ``at`` its probability; those worth a node get one."""
        position = self._positions[at]
        if not position.votes:
            return
        depth, reach = (1, 1.0) if at == ROOT else (self._nodes[at].depth + 1, self._nodes[at].reach)
        found = self._combiner.probabilities(self.row.domain, depth > 1, list(position.votes.values()))
        best = max(found)
        for token, probability in zip(position.votes, found, strict=True):
            index = position.children.get(token)
            if index is None:
                if probability < best and reach * probability < 0.5 * self.floor:
                    continue
                index = position.children[token] = len(self._nodes)
                self._nodes.append(_Node(token, at, depth))
            node = self._nodes[index]
            node.probability, node.reach = probability, reach * probability
            if index in self._positions:
                self._refresh(index)

    def _refresh(self, at: int) -> None:
        """Carry a node's changed reach to its descendants."""
        for child in self._positions[at].children.values():
            node = self._nodes[child]
            node.reach = self._nodes[at].reach * node.probability
            if child in self._positions:
                self._refresh(child)

    def _best_child(self, at: int) -> int | None:
        position = self._positions.get(at)
        if position is None or not position.children:
            return None
        return max(position.children.values(), key=lambda n: self._nodes[n].probability)

    def _path(self, at: int) -> list[int]:
        path: list[int] = []
        while at != ROOT:
            path.append(self._nodes[at].token)
            at = self._nodes[at].parent
        return path[::-1]

    def _proposal(self, chosen: Sequence[int]) -> Proposal:
        if not chosen:
            return EMPTY
        place = {ROOT: ROOT} | {node: at for at, node in enumerate(chosen)}
        nodes = [self._nodes[index] for index in chosen]
        return Proposal(
            tuple(node.token for node in nodes),
            tuple(place[node.parent] for node in nodes),
            tuple(self._label(node) for node in nodes),
            tuple(node.probability for node in nodes),
            None if self.row.coupled else (POINT_MASS,) * len(nodes),
        )

    def _label(self, node: _Node) -> str:
        return "+".join(self._names[source] for source, _ in self._positions[node.parent].votes[node.token])
