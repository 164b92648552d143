"""The rule itself: one text whatever is proposed, limits, seeds, numerics."""

import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafts.proposal import EMPTY, ROOT
from osd.serve.noise import RequestNoise
from osd.serve.shaping import TargetNumericsError
from osd.serve.verify import Verdict, target_token, verify, verify_batch
from osd.types import SamplingParams
from tests.osd.toy_target import A11, GREEDY, V, block_of, chain, plain, speculate, tree

PARAMS = [
    GREEDY,
    SamplingParams(temperature=0.5),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=1.0, top_k=4),
    SamplingParams(temperature=0.5, top_p=0.8),
    A11,
]


@given(params=st.sampled_from(PARAMS), seed=st.integers(-(2**63), 2**64 - 1), rng=st.randoms())
@settings(max_examples=300, deadline=None)
def test_a15_the_text_is_the_same_whatever_is_proposed(params, seed, rng):
    """Chains and trees of 0 to 8 nodes, right, wrong, or a guess; siblings may repeat."""
    expected = plain(params, seed, 12)

    def propose(text, noise):
        nodes = rng.choice([0, 0, 1, 2, 3, 4, 8])
        parents = [rng.choice([i - 1, rng.randrange(ROOT, i)]) for i in range(nodes)]
        depths = tree([0] * nodes, parents).depths
        truth = [*expected[len(text) :], *[0] * nodes]
        tokens = [truth[depth - 1] if rng.random() < 0.6 else rng.randrange(V) for depth in depths]
        return tree(tokens, parents)

    assert speculate(params, seed, 12, propose) == expected


@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_right_chains_are_accepted_whole_and_wrong_ones_cost_nothing(params, k):
    expected = plain(params, 7, k + 1)
    right = chain(expected[:k])
    noise = RequestNoise(7, 0, V)
    verdict = verify(block_of([], right), right, params, noise, 0)
    assert verdict == (tuple(expected), k, k, tuple(range(k)))
    wrong = chain([(token + 1) % V for token in expected[:k]])
    assert verify(block_of([], wrong), wrong, params, noise, 0) == ((expected[0],), 0, 1, ())
    assert verify(block_of([], EMPTY), EMPTY, params, noise, 0) == ((expected[0],), 0, 0, ())


def test_a_tree_accepts_the_branch_that_is_right_and_counts_the_position_it_fails_at():
    a, b, c = plain(GREEDY, 0, 3)
    x = (a + 1) % V
    proposal = tree([x, a, x, b, (c + 1) % V], [ROOT, ROOT, 0, 1, 3])
    assert verify(block_of([], proposal), proposal, GREEDY, None, 0) == Verdict((a, b, c), 2, 3, (1, 3))


def test_repeated_siblings_lend_each_other_their_children():
    a, b, c = plain(GREEDY, 0, 3)
    proposal = tree([a, a, (b + 1) % V, b], [ROOT, ROOT, 0, 1])
    assert verify(block_of([], proposal), proposal, GREEDY, None, 0) == Verdict((a, b, c), 2, 2, (1, 3))


@pytest.mark.parametrize("params", [GREEDY, A11])
@pytest.mark.parametrize("limit", [1, 2, 3, 4, 5, None])
def test_a06_a_limit_cuts_the_round_and_leaves_a_prefix_of_the_plain_text(params, limit):
    expected = plain(params, 3, 5)
    right = chain(expected[:4])
    verdict = verify(block_of([], right), right, params, RequestNoise(3, 0, V), 0, limit)
    size = limit or 5
    assert verdict == (tuple(expected[:size]), min(size, 4), min(size, 4), tuple(range(min(size, 4))))


def test_equal_maxima_go_to_the_first_index_in_every_batch():
    logits = torch.zeros(3, 1000)
    logits[:, [400, 7, 993]] = 2.0
    assert verify(logits, chain([7, 7]), GREEDY, None, 0).emitted == (7, 7, 7)


# --- A15: seeds


def test_a15_a_seed_gives_one_text_per_choice_and_other_seeds_give_others():
    """Four choices of 12 tokens that coincide by chance: below 1e-6."""
    params = SamplingParams(temperature=1.0)
    texts = [tuple(plain(params, 42, 12, choice)) for choice in range(4)]
    assert texts == [tuple(plain(params, 42, 12, choice)) for choice in range(4)]
    assert len(set(texts)) == 4
    assert len({tuple(plain(params, seed, 12)) for seed in range(20)}) >= 15


def test_a15_a_batch_gives_every_request_what_it_gets_alone():
    rng = random.Random(0)
    proposals, params, noises, positions, blocks, alone = [], [], [], [], [], []
    for index in range(24):
        parents = [rng.randrange(ROOT, i) for i in range(rng.randrange(6))]
        proposals.append(tree([rng.randrange(4) for _ in parents], parents))
        params.append(PARAMS[index % len(PARAMS)])
        noises.append(None if params[-1].temperature == 0 else RequestNoise(index, 0, V))
        positions.append(rng.randrange(50))
        blocks.append(block_of([index % V], proposals[-1]))
        alone.append(verify(blocks[-1], proposals[-1], params[-1], noises[-1], positions[-1]))
    offsets = np.cumsum([0, *map(len, blocks)]).tolist()
    assert verify_batch(torch.cat(blocks), offsets, proposals, params, noises, positions) == alone


# --- A18: numerics


@pytest.mark.parametrize("temperature", [0.0, 1e-6, 1e-3, 1.0])
@pytest.mark.parametrize("proposed", range(3))
def test_a18_a_one_hot_target_always_gives_its_token(temperature, proposed):
    logits = torch.full((3, V), -math.inf)
    logits[:, 1] = 0.0
    params = SamplingParams(temperature=temperature, top_p=0.9)
    verdict = verify(logits, chain([1, proposed]), params, RequestNoise(0, 0, V), 0)
    assert verdict.emitted == ((1, 1, 1) if proposed == 1 else (1, 1))


@pytest.mark.parametrize("temperature", [1e-6, 1e-3])
def test_a18_at_tiny_temperatures_the_text_is_the_greedy_one(temperature):
    for seed in range(20):
        assert plain(SamplingParams(temperature=temperature), seed, 8) == plain(GREEDY, 0, 8)


def test_a18_a_tiny_temperature_still_chooses_between_equal_maxima():
    """Only one of two tokens in 40 draws: chance 2e-12."""
    logits = torch.tensor([1.0, 5.0, 5.0, 0.0])
    params = SamplingParams(temperature=1e-6)
    assert {target_token(logits, params, RequestNoise(seed, 0, 4), 0) for seed in range(40)} == {1, 2}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=1.0), A11])
def test_a18_a_bad_target_row_fails_its_request_and_no_other(bad, params):
    good = chain(plain(params, 1, 2))
    block = block_of([], good)
    broken = block.clone()
    broken[1, 3] = bad
    noises = [RequestNoise(1, 0, V) for _ in range(3)]
    first, second, third = verify_batch(
        torch.cat([block, broken, block]), [0, 3, 6], [good] * 3, [params] * 3, noises, [0, 0, 0]
    )
    assert first == third == verify(block, good, params, noises[0], 0)
    assert isinstance(second, TargetNumericsError)
    assert (second.status, second.position) == (500, 1)
    with pytest.raises(TargetNumericsError, match="position 1"):
        verify(broken, good, params, noises[0], 0)


def test_a18_a_bad_row_of_a_rejected_branch_is_never_read():
    a, b = plain(GREEDY, 0, 2)
    proposal = tree([(a + 1) % V, a], [ROOT, ROOT])
    block = block_of([], proposal)
    block[1] = math.nan
    assert verify(block, proposal, GREEDY, None, 0).emitted == (a, b)
