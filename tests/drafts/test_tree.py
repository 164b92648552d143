"""Growing one row's tree: sources meet at every node, and verified text scores all of them."""

from collections.abc import Sequence

import pytest

from drafts.combine import Combiner
from drafts.kinds.base import DraftRow, MemorySource
from drafts.proposal import ROOT, Proposal
from drafts.tree import TreeGrower


class Table(MemorySource):
    """Guesses by the path so far."""

    name = "table"

    def __init__(self, table: dict[tuple[int, ...], list[tuple[int, float]]]) -> None:
        self.table = table

    def guesses(self, row: DraftRow, path: Sequence[int]):
        return self.table.get(tuple(path), [])


def grower(*tables: dict, neural: int = 0, depth: int = 4, floor: float = 0.01) -> TreeGrower:
    memories = {index: Table(table) for index, table in enumerate(tables)}
    names = [f"m{index}" for index in memories] + [f"n{index}" for index in range(neural)]
    combiner = Combiner([False] * len(memories) + [True] * neural)
    return TreeGrower(DraftRow("r", "d", [1], 1), memories, combiner, names, depth, floor)


def test_agreeing_sources_share_a_node_and_disagreeing_ones_make_siblings():
    tree = grower({(): [(5, 0.9)]}, {(): [(5, 0.8), (6, 0.7)]})
    tree.start()
    proposal = tree.ranked(8)
    proposal.check()
    assert proposal.tokens == (5, 6)
    assert proposal.parents == (ROOT, ROOT)
    assert proposal.sources == ("m0+m1", "m1")


@pytest.mark.parametrize(
    ("parents", "branches"),
    [
        ((), 0),
        ((ROOT, 0, 1), 0),
        ((ROOT, ROOT, 0), 1),
        ((ROOT, ROOT, 1), 2),
        ((ROOT, 0, ROOT, 0, 1, 4, 2), 3),
    ],
)
def test_nodes_off_the_chain_of_first_children_are_branches(parents: tuple[int, ...], branches: int) -> None:
    count = len(parents)
    tree = Proposal(tuple(range(count)), parents, ("a",) * count, (0.5,) * count)
    tree.check()
    assert tree.branch_nodes == branches


def test_a_memory_continues_where_the_head_knows_better():
    tree = grower({(): [(5, 0.2)], (7,): [(8, 0.9)], (7, 8): [(9, 0.9)]}, neural=1)
    tree.start()
    tree.lead()
    assert tree.extend(1, [(7, 0.95)], 0.0) == 7
    assert tree.extend(1, [(4, 0.1)], 0.0) == 8
    tree.branch(4)
    assert tree.main_path(3).tokens == (7, 8, 9)


def test_a_head_goes_no_deeper_than_pays_or_is_allowed():
    tree = grower({}, neural=1, depth=2)
    tree.start()
    tree.lead()
    assert tree.extend(0, [(7, 0.3)], 0.99) is None
    tree.lead()
    assert tree.extend(0, [(7, 0.9)], 0.0) == 7
    assert tree.extend(0, [(8, 0.9)], 0.0) is None


def test_nodes_are_ranked_by_reach_and_parents_come_first():
    tree = grower({(): [(5, 0.9), (6, 0.3)], (5,): [(7, 0.9), (8, 0.2)], (6,): [(9, 0.9)]})
    tree.start()
    tree.branch(8)
    proposal = tree.ranked(16)
    proposal.check()
    assert list(proposal.reach) == sorted(proposal.reach, reverse=True)
    assert set(proposal.tokens) == {5, 6, 7, 8, 9}
    for count in range(len(proposal)):
        proposal.first(count).check()


def test_every_source_is_scored_on_the_verified_text_as_far_as_it_spoke():
    tree = grower({(): [(5, 0.9)], (5,): [(6, 0.9)], (5, 6): [(0, 0.9)]}, {(): [(4, 0.9)]})
    tree.start()
    tree.branch(8)
    assert tree.score([5, 6, 7, 8]) == {0: 2, 1: 0}


@pytest.mark.parametrize("emitted", [[], [99]])
def test_text_that_nobody_named_scores_nothing(emitted):
    tree = grower({(): [(5, 0.9)]})
    tree.start()
    assert sum(tree.score(emitted).values()) == 0


def test_a_second_neural_source_revises_the_tree():
    tree = grower({}, neural=2)
    tree.start()
    tree.lead()
    tree.extend(0, [(7, 0.6)], 0.0)
    tree.extend(0, [(8, 0.9)], 0.0)
    tree.lead()
    assert tree.extend(1, [(3, 0.95)], 0.0) == 3
    proposal = tree.ranked(8)
    proposal.check()
    assert proposal.tokens[0] == 3
    assert list(proposal.reach) == sorted(proposal.reach, reverse=True)


def test_a_head_that_does_not_stop_is_held_to_the_depth():
    tree = grower({}, neural=1, depth=2)
    tree.start()
    tree.lead()
    for token in range(5, 12):
        tree.extend(0, [(token, 0.9)], 0.0)
    assert max(tree.ranked(24).depths) == 2


def test_a_chain_ends_where_a_node_is_not_worth_growing():
    tables = {(): [(5, 0.9)], (5,): [(6, 0.9)], (5, 6): [(7, 0.02)], (5, 6, 7): [(8, 0.02)]}
    whole, cut = grower(tables, depth=8, floor=0.0), grower(tables, depth=8, floor=0.3)
    for tree in (whole, cut):
        tree.start()
    assert whole.main_path(8).tokens == (5, 6, 7, 8)
    assert cut.main_path(8).tokens == (5, 6)
