from __future__ import annotations

import pytest
from suffix_memory import SuffixTree, _BackOff, _Suffix, right, serve

from drafts.config import NgramConfig

QUESTION, ANSWER = [1, 2], [3, 4, 5, 6, 7, 8, 9]


def test_a_tree_counts_every_substring_up_to_its_depth() -> None:
    tree = SuffixTree(3)
    tree.extend([1, 2, 1, 2])
    one = tree.root.next[1]
    assert one.count == 2
    assert one.next[2].count == 2
    assert one.next[2].next[1].count == 1
    assert not one.next[2].next[1].next


def test_sequences_are_not_joined() -> None:
    tree = SuffixTree(3)
    tree.extend([1])
    tree.begin()
    tree.extend([2])
    assert not tree.root.next[1].next


def test_the_chain_of_the_greatest_summed_probability_wins() -> None:
    tree = SuffixTree(6)
    for tokens in ([1, 2, 7, 7], [3, 2, 8, 8], [3, 2, 8, 8]):
        tree.begin()
        tree.extend(tokens)
    # After [2] alone 8 is likelier; after [1, 2] only 7 was seen.
    assert tree.best([2], 2, factor=4.0) == (pytest.approx(4 / 3), [8, 8])
    assert tree.best([1, 2], 2, factor=4.0) == (2.0, [7, 7])
    assert tree.best([1, 2], 4, factor=0.5)[1] == [7]


@pytest.mark.parametrize("memory", [_Suffix(factor=4.0), _BackOff(NgramConfig(base_weight=0.0))])
def test_a_request_is_scored_before_it_is_learned(memory) -> None:
    text = [*QUESTION, *ANSWER]
    first = serve(memory, [(text, 2)], depth=4)
    again = serve(memory, [(text, 2)], depth=4)
    # Nothing is known at first: a token a pass. Then six tokens after the first in two passes of up to five.
    assert first["tau"] == 1.0
    assert again["tau"] == 3.0
    assert again["bytes"] > 0


def test_right_counts_leading_tokens() -> None:
    assert right([1, 2, 9], [1, 2, 3]) == 2
    assert right([], [1]) == 0
    assert right([1, 2], [1]) == 1
