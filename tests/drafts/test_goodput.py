"""The goodput rule: nodes are verified while they pay at the long-run rate."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafts.goodput import worthwhile_nodes
from drafts.proposal import EMPTY, Proposal


def staircase(tokens: int) -> float:
    return {1: 20.0, 2: 20.0, 3: 28.0, 4: 30.0}.get(tokens, 30.0 + 6.0 * (tokens - 4))


def test_a_free_node_is_always_taken():
    kept, value = worthwhile_nodes([[0.05]], staircase, goodput=0.05)
    assert kept == [1]
    assert value == pytest.approx(0.05)


def test_nothing_is_proposed_when_every_node_costs_more_than_it_earns():
    kept, value = worthwhile_nodes([[0.1], [0.1]], lambda n: 20.0 * n, goodput=0.05)
    assert kept == [0, 0]
    assert value == 0.0


def test_a_loss_on_the_way_does_not_hide_a_later_gain():
    kept, _ = worthwhile_nodes([[0.9, 0.3, 0.29, 0.28]], lambda n: 20.0 if n < 3 else 27.0, goodput=0.05)
    assert kept == [4]


def test_the_confident_row_gets_the_depth():
    kept, _ = worthwhile_nodes([[0.95, 0.9, 0.85], [0.1, 0.01, 0.001]], lambda n: 10.0 * n, goodput=0.05)
    assert kept == [3, 0]


@given(
    st.lists(st.lists(st.floats(0.01, 0.99), max_size=4), min_size=1, max_size=3),
    st.floats(0.01, 0.2),
)
def test_the_choice_is_the_best_of_all_choices(confidences, goodput):
    reaches = [list(itertools.accumulate(chain, lambda a, b: a * b)) for chain in confidences]
    rows = len(reaches)

    def value(counts):
        tokens = sum(sum(chain[:count]) for chain, count in zip(reaches, counts, strict=True))
        return tokens - goodput * (staircase(rows + sum(counts)) - staircase(rows))

    kept, gain = worthwhile_nodes(reaches, staircase, goodput)
    best = max(value(c) for c in itertools.product(*(range(len(chain) + 1) for chain in reaches)))
    assert gain == pytest.approx(best, abs=1e-9)
    assert value(kept) == pytest.approx(best, abs=1e-9)


def test_reach_multiplies_along_the_path():
    assert sum(Proposal.chain([1, 2], "x", [0.5, 0.5]).reach) == pytest.approx(0.75)
    assert sum(EMPTY.reach) == 0.0
