"""Recursive rejection sampling: the rule itself, its numerics, and what it refuses."""

import math

import numpy as np
import pytest
import torch

from drafts.errors import DraftDistributionError, IntegrityError
from drafts.kinds.base import Draws
from drafts.proposal import EMPTY, POINT_MASS, ROOT, DraftDistribution, Proposal
from osd.serve.noise import RequestNoise
from osd.serve.processor import LogitsProcessor
from osd.serve.rejection import judge_children, verify, verify_batch
from osd.serve.shaping import TargetNumericsError
from osd.serve.verify import verify as verify_invariant
from osd.types import SamplingParams
from tests.osd.toy_target import A11, GREEDY, V, block_of, chain, plain, tree

WARM = SamplingParams(temperature=1.0)
IDS = np.arange(4)


def dist(*probabilities, ids=None):
    return DraftDistribution(
        np.arange(len(probabilities)) if ids is None else np.array(ids), np.array(probabilities, dtype=float)
    )


def told(proposal, *distributions):
    found = distributions or (POINT_MASS,) * len(proposal)
    return Proposal(proposal.tokens, proposal.parents, proposal.sources, proposal.confidence, tuple(found))


def judge(p, candidates, uniforms):
    """The accepted child and the normalised rest of p."""
    with np.errstate(divide="ignore"):
        hit, left = judge_children(np.arange(len(p)), np.log(p), candidates, np.array(uniforms))
    left = np.exp(left)
    return hit, left / left.sum()


# --- the rule


def test_a_drawn_token_is_accepted_by_the_ratio_and_leaves_the_positive_difference():
    p, q = [0.5, 0.3, 0.2, 0.0], dist(0.1, 0.6, 0.2, 0.1)
    assert judge(p, [(1, q)], [0.499])[0] == 0
    hit, left = judge(p, [(1, q)], [0.501])
    assert hit is None
    assert left == pytest.approx([1.0, 0.0, 0.0, 0.0])
    assert judge(p, [(0, q)], [1 - 2**-53])[0] == 0
    assert judge(p, [(3, q)], [2**-53])[0] is None


def test_siblings_are_tested_on_what_the_ones_before_left():
    p, q = [0.4, 0.3, 0.2, 0.1], dist(0.0, 0.5, 0.3, 0.2)
    second = q.without(1)
    assert second.probabilities == pytest.approx([0, 0, 0.6, 0.4])
    hit, left = judge(p, [(1, q), (2, second)], [0.7, 0.01])
    assert hit is None
    assert left == pytest.approx([1, 0, 0, 0])
    hit, left = judge(p, [(1, POINT_MASS), (2, second)], [0.31, 0.47])
    assert hit == 1, "p(2) is now 0.2 / 0.7, and 0.2 / 0.7 / 0.6 is above 0.47"
    hit, left = judge(p, [(1, POINT_MASS), (2, POINT_MASS), (1, POINT_MASS)], [0.31, 0.3, 0.0001])
    assert hit is None
    assert left == pytest.approx([0.8, 0, 0, 0.2])


def test_a_chosen_token_is_accepted_with_the_targets_own_probability():
    assert judge([0.25, 0.75], [(0, POINT_MASS)], [0.249])[0] == 0
    hit, left = judge([0.25, 0.75], [(0, POINT_MASS)], [0.251])
    assert hit is None
    assert left == pytest.approx([0, 1])
    hit, left = judge([0.25, 0.75], [(9, POINT_MASS)], [1e-9])
    assert hit is None
    assert left == pytest.approx([0.25, 0.75])


def test_draws_name_each_token_once_with_what_it_was_drawn_from():
    """Confidences depend on the draws before and not on the token, so trimming by them takes no side."""
    q = dist(0.5, 0.3, 0.2, ids=[7, 2, 9])
    for order in ([7, 2, 9], [2, 7, 9]):
        draws = Draws(order, q)
        assert [token for token, _ in draws] == order
        assert draws[0][1] == 0.5
        assert draws.distributions[0] is q
        assert draws.distributions[1].of(order[0]) == 0
        assert draws.distributions[2].of(9) == pytest.approx(1.0)
    assert len(Draws([7, 2], dist(1.0, 0.0, ids=[7, 2]))) == 1


def test_without_a_proposal_the_text_is_that_of_the_invariant_rule():
    for seed in range(30):
        noise = RequestNoise(seed, 0, V)
        assert verify(block_of([], EMPTY), EMPTY, A11, noise, 0) == verify_invariant(
            block_of([], EMPTY), EMPTY, A11, noise, 0
        )


def test_greedy_requests_follow_the_argmax_whatever_the_proposal_says_of_itself():
    right = chain(plain(GREEDY, 0, 3))
    assert verify(block_of([], right), right, GREEDY, None, 0).accepted == 3


def test_right_chains_of_a_certain_target_are_accepted_whole_and_limits_cut():
    """A06: a limit ends the round on an accepted token."""
    greedy = plain(GREEDY, 0, 4)
    cold = SamplingParams(temperature=1e-3)
    right = told(chain(greedy[:3]))
    noise = RequestNoise(3, 0, V)
    assert verify(block_of([], right), right, cold, noise, 0) == (tuple(greedy), 3, 3, (0, 1, 2))
    for limit in (1, 2, 3):
        verdict = verify(block_of([], right), right, cold, noise, 0, limit)
        assert verdict == (tuple(greedy[:limit]), limit, limit, tuple(range(limit)))
    wrong = told(chain([(greedy[0] + 1) % V, greedy[1]]))
    assert verify(block_of([], wrong), wrong, cold, noise, 0) == ((greedy[0],), 0, 1, ())


def test_repeated_siblings_lend_each_other_their_children():
    a, b, c = plain(GREEDY, 0, 3)
    cold = SamplingParams(temperature=1e-3)
    proposal = told(tree([a, a, (b + 1) % V, b], [ROOT, ROOT, 0, 1]))
    verdict = verify(block_of([], proposal), proposal, cold, RequestNoise(0, 0, V), 0)
    assert verdict == ((a, b, c), 2, 2, (1, 3))


# --- A11: no distribution, no verification


def test_a11_a_proposal_without_q_is_refused_and_the_source_named():
    noise = RequestNoise(0, 0, V)
    for proposal in (chain([1, 2]), told(chain([1, 2]), POINT_MASS, None)):
        with pytest.raises(DraftDistributionError, match="forced") as caught:
            verify(block_of([], proposal), proposal, WARM, noise, 0)
        assert caught.value.source == "forced"
    with pytest.raises(DraftDistributionError, match="1 distributions"):
        told(chain([1, 2]), POINT_MASS).check_distributions()
    with pytest.raises(IntegrityError):
        told(chain([1, 2]), POINT_MASS).check()


def test_a11_cutting_a_proposal_keeps_what_its_nodes_were_drawn_from():
    q, r = dist(0.5, 0.5), dist(0.1, 0.9)
    proposal = Proposal.chain([0, 1, 1], "head", [0.5] * 3, [q, r, POINT_MASS])
    assert proposal.first(2).distributions == (q, r)
    assert proposal.first(2).check_distributions() == (q, r)
    assert EMPTY.check_distributions() == ()


# --- A15: seeds


def test_a15_the_same_seed_and_drafts_give_the_same_text_alone_and_in_a_batch():
    proposals = [told(tree([n, (n + 3) % V, 5], [ROOT, ROOT, 0])) for n in range(12)]
    params = [GREEDY if n % 4 == 3 else A11 for n in range(12)]
    noises = [None if p is GREEDY else RequestNoise(n, n % 3, V) for n, p in enumerate(params)]
    blocks = [block_of([n], proposal) for n, proposal in enumerate(proposals)]
    alone = [verify(*item) for item in zip(blocks, proposals, params, noises, range(12), strict=True)]
    fresh = [None if n is None else RequestNoise(n.seed, n.choice, V) for n in noises]
    offsets = list(range(0, 48, 4))
    together = verify_batch(torch.cat(blocks), offsets, proposals, params, fresh, list(range(12)))
    assert together == alone


def test_a15_the_streams_of_a_seed_differ_and_depend_on_seed_choice_and_position():
    noise = RequestNoise(5, 1, V)
    rows = [
        noise.uniform(3),
        noise.draft.uniform(3),
        noise.acceptance.uniform(3),
        noise.acceptance.uniform(4),
        RequestNoise(5, 2, V).acceptance.uniform(3),
        RequestNoise(6, 1, V).acceptance.uniform(3),
    ]
    assert len({float(row[0]) for row in rows}) == len(rows)
    assert (RequestNoise(5, 1, V).acceptance.uniform(3) == rows[2]).all()


# --- A18: numerics


@pytest.mark.parametrize("temperature", [0.0, 1e-6, 1e-3, 1.0])
@pytest.mark.parametrize("proposed", range(3))
def test_a18_p_equal_to_q_and_both_one_hot(temperature, proposed):
    logits = torch.full((2, V), -math.inf)
    logits[:, 1] = 0.0
    params = SamplingParams(temperature=temperature, top_p=0.9)
    one_hot = dist(*np.eye(V)[proposed])
    for q in (one_hot, POINT_MASS):
        proposal = told(chain([proposed]), q)
        verdict = verify(logits, proposal, params, RequestNoise(0, 0, V), 0)
        assert verdict.emitted == ((1, 1) if proposed == 1 else (1,))


def test_a18_p_equal_to_q_is_always_accepted():
    p = np.random.default_rng(0).dirichlet(np.ones(V))
    for token in range(V):
        assert judge(p, [(token, dist(*p))], [1 - 1e-12])[0] == 0
        assert judge(p, [(token, dist(*p))], [1.0 + 1e-9])[1] == pytest.approx(p)


@pytest.mark.parametrize(
    "q",
    [
        dist(*[0.0, *[1 / (V - 1)] * (V - 1)]),
        dist(*[math.nan] * V),
        dist(*[math.inf, *[0.0] * (V - 1)]),
        dist(*[0.5, -0.5, 1.0, *[0.0] * (V - 3)]),
        dist(*[0.001] * V),
        dist(1.0, ids=[3]),
        dist(ids=[]),
    ],
    ids=["zero", "nan", "inf", "negative", "mass", "elsewhere", "empty"],
)
def test_a18_a_broken_draft_row_counts_as_no_proposal_and_leaves_the_output(q):
    """Token 0 is what q is broken for; its child, though sound, is not followed either."""
    proposal = told(chain([0, 1]), q, POINT_MASS)
    for seed in range(50):
        noise = RequestNoise(seed, 0, V)
        verdict = verify(block_of([], proposal), proposal, WARM, noise, 0)
        assert verdict == (tuple(plain(WARM, seed, 1)), 0, 0, ())


@pytest.mark.parametrize("temperature", [1e-6, 1e-3])
def test_a18_at_tiny_temperatures_the_text_is_the_greedy_one(temperature):
    params = SamplingParams(temperature=temperature)
    greedy = plain(GREEDY, 0, 3)
    q = dist(*[1 / V] * V)
    for seed in range(20):
        for proposal in (
            told(chain(greedy[:2])),
            told(chain(greedy[:2]), q, q),
            told(tree([(greedy[0] + 1) % V, greedy[0]], [ROOT, ROOT]), q, POINT_MASS),
        ):
            verdict = verify(block_of([], proposal), proposal, params, RequestNoise(seed, 0, V), 0)
            assert list(verdict.emitted) == greedy[: len(verdict.emitted)]
            assert verdict.accepted == max(proposal.depths)


@pytest.mark.parametrize("rest", [1e-12, 1e-13, 0.0])
def test_a18_an_empty_residual_draws_from_p_itself(rest):
    """All siblings rejected, by a uniform at the end of the interval: nothing is left but rounding error."""
    p = [1.0 - rest, rest]
    for candidates in (
        [(0, POINT_MASS)],
        [(0, dist(1.0, ids=[0])), (0, dist(1.0, ids=[0]))],
        [(1, dist(0.0, 1.0)), (0, POINT_MASS)],
    ):
        hit, left = judge(p, candidates, [1.0, 1.0])
        assert hit is None
        assert np.isfinite(left).all()
        assert left == pytest.approx(p)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a18_a_bad_target_row_fails_its_request_and_no_other(bad):
    greedy = plain(GREEDY, 0, 2)
    cold = SamplingParams(temperature=1e-3)
    good = told(chain(greedy))
    block = block_of([], good)
    broken = block.clone()
    broken[1, 3] = bad
    noises = [RequestNoise(1, 0, V) for _ in range(3)]
    first, second, third = verify_batch(
        torch.cat([block, broken, block]), [0, 3, 6], [good] * 3, [cold] * 3, noises, [0, 0, 0]
    )
    assert first == third == verify(block, good, cold, noises[0], 0)
    assert isinstance(second, TargetNumericsError)
    assert (second.status, second.position) == (500, 1)
    with pytest.raises(TargetNumericsError, match="position 1"):
        verify(broken, good, cold, noises[0], 0)


# --- every request parameter shapes p at every position (A16, A17)


def test_a16_a17_bias_and_penalties_hold_at_every_tested_position():
    """A banned token is never accepted; a penalty of the first emitted token counts for the second."""
    greedy = plain(GREEDY, 0, 2)
    right = told(chain(greedy))
    banned = SamplingParams(temperature=1e-3, logit_bias={greedy[1]: -100.0})
    processor = LogitsProcessor(banned, (0,), frozenset(), V)
    verdict = verify(block_of([], right), right, banned, RequestNoise(0, 0, V), 0, None, processor)
    assert verdict.emitted[0] == greedy[0]
    assert verdict.emitted[1] != greedy[1]
    assert (verdict.accepted, verdict.tested) == (1, 2)

    steep = SamplingParams(temperature=1e-3, presence_penalty=2.0)
    logits = torch.zeros(3, V)
    logits[:, 4], logits[:, 6] = 3.0, 2.0
    twice = told(chain([4, 4]))
    processor = LogitsProcessor(steep, (0,), frozenset(), V)
    verdict = verify(logits, twice, steep, RequestNoise(0, 0, V), 0, None, processor)
    assert verdict == ((4, 6), 1, 2, (0,))
