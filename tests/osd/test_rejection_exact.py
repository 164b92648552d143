"""Case A11 under rejection sampling: the target's distribution for every tree; acceptance as theory says."""

import functools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

from drafts.kinds.base import Draws
from drafts.proposal import POINT_MASS, ROOT, DraftDistribution, Proposal
from osd.acceptance import coupled_acceptance, rejection_acceptance
from osd.serve import rejection
from osd.serve import verify as invariant
from osd.serve.noise import RequestNoise
from osd.serve.shaping import shaped_logprobs
from osd.types import SamplingParams
from tests.drafts import head_rig
from tests.osd.toy_target import A11, DRAFT, TABLE, V, block_of, row_of, tree

ALL = torch.arange(V)


@functools.cache
def shaped(last):
    ids, logp = shaped_logprobs(row_of(TABLE, last), A11)
    return ids.numpy(), logp.numpy()


@functools.cache
def draft_logprobs(last):
    return torch.log_softmax(row_of(DRAFT, last).double() / A11.temperature, -1)


@functools.cache
def draft_distribution(last):
    return DraftDistribution(ALL.numpy(), draft_logprobs(last).exp().numpy())


@functools.cache
def draws_of(last, order):
    """Tokens in the order drawn, each with what it was drawn from."""
    return list(zip(order, Draws(order, draft_distribution(last)).distributions, strict=True))


# --- what proposes: candidates for the token after ``text``, with what they were drawn from


def drawn(width, last, noise, position):
    """A sampled head without replacement, as the heads draw."""
    return draws_of(last, tuple(perturbed(last, noise, position).argsort()[: -width - 1 : -1].tolist()))


def replaced(width, last, noise, position):
    """A sampled head with replacement: siblings may be equal, and q stays as it is."""
    tokens = [int(perturbed(last, noise, position, i).argmax()) for i in range(width)]
    return [(token, draft_distribution(last)) for token in tokens]


def perturbed(last, noise, position, copy=0):
    return draft_logprobs(last).numpy() + gumbel(noise, position)[copy * V : (copy + 1) * V]


@functools.lru_cache(maxsize=8)
def gumbel(noise, position):
    return -np.log(-np.log(noise.draft.uniform(position)))


def argmax(width, last, noise, position):
    """The head's most probable tokens, without chance."""
    return chosen(width, last)


@functools.cache
def chosen(width, last):
    return [(token, POINT_MASS) for token in draft_logprobs(last).topk(width).indices.tolist()]


@functools.cache
def remembered(width, last):
    found = [int(row_of(TABLE, last).argmax()), (3 * sum(last) + 1) % V, (5 * sum(last) + 2) % V]
    return [(token, POINT_MASS) for token in found[:width]]


def memory(width, last, noise, position):
    """Right, or a fixed token: what lookup and ngram do."""
    return remembered(width, last)


def merged(width, last, noise, position):
    """A drawn token beside chosen ones; tokens that several sources name stay duplicates."""
    return [
        *drawn(1, last, noise, position),
        *argmax(width, last, noise, position),
        *memory(width, last, noise, position),
    ]


def tree_of(source, width, depth, text, noise):
    """Every node continued, to ``depth``."""
    tokens, parents, distributions = [], [], []
    paths = [(ROOT, [*text])]
    for _ in range(depth):
        following = []
        for at, path in paths:
            for token, q in source(width, (V, V, *path)[-2:], noise, len(path)):
                following.append((len(tokens), [*path, token]))
                tokens.append(token)
                parents.append(at)
                distributions.append(q)
        paths = following
    names, half = ("toy",) * len(tokens), (0.5,) * len(tokens)
    return Proposal(tuple(tokens), tuple(parents), names, half, tuple(distributions))


def text_of(propose, seed, length):
    """The real walk, with the shaping of a row remembered."""
    noise = RequestNoise(seed, 0, 3 * V)
    text = []
    while len(text) < length:
        proposal = propose(text, noise)

        def shape(row, emitted, text=text, proposal=proposal):
            path, node = [], row - 1
            while node != ROOT:
                path.append(proposal.tokens[node])
                node = proposal.parents[node]
            assert path[::-1] == list(emitted)
            return shaped((V, V, *text, *emitted)[-2:])

        text += rejection.walk(proposal, shape, noise, len(text), length - len(text)).emitted
    return text


@functools.cache
def joint():
    """Exact probabilities under A11 of the first two tokens, [V, V]."""
    table = np.zeros((V, V))
    ids, logp = shaped((V, V))
    for token, p in zip(ids.tolist(), np.exp(logp), strict=True):
        then, q = shaped((V, token))
        table[token, then] = p * np.exp(q)
    return table


@functools.cache
def joint_later():
    """The same of the tokens at positions 1 and 2."""
    table = np.zeros((V, V))
    for a, b in np.argwhere(joint() > 0).tolist():
        then, q = shaped((a, b))
        table[b, then] += joint()[a, b] * np.exp(q)
    return table


def p_value(counts, expected):
    """Chi-square; cells expecting fewer than 5 are merged, impossible ones fail."""
    counts, expected = np.ravel(counts).astype(float), np.ravel(expected)
    if counts[expected == 0].any():
        return 0.0
    expected = expected / expected.sum() * counts.sum()
    large = expected >= 5
    seen, wanted = list(counts[large]), list(expected[large])
    if expected[~large].sum() > 1:
        seen.append(counts[~large].sum())
        wanted.append(expected[~large].sum())
    return stats.chisquare(seen, np.array(wanted) * sum(seen) / sum(wanted)).pvalue


SCENARIOS = [
    *((source, width) for source in (drawn, argmax, memory) for width in (1, 2, 3)),
    (replaced, 2),
    (replaced, 3),
    (merged, 1),
    (merged, 2),
]
DRAWS = 4_000


@pytest.mark.parametrize(("source", "width"), SCENARIOS, ids=lambda value: getattr(value, "__name__", value))
def test_a11_every_tree_of_depth_two_leaves_the_targets_distribution(source, width):
    """The first two tokens, and the second and third; seeds are fixed, by chance 1 of 1,000 would fail."""
    first, later = np.zeros((V, V)), np.zeros((V, V))
    start = 10**6 * (1 + SCENARIOS.index((source, width)))
    for seed in range(start, start + DRAWS):
        a, b, c = text_of(functools.partial(tree_of, source, width, 2), seed, 3)
        first[a, b] += 1
        later[b, c] += 1
    assert p_value(first, joint()) > 1e-3
    assert p_value(later, joint_later()) > 1e-3


def soft_argmax(width, last, noise, position):
    """The fault of A11: chosen tokens that pass for draws of the soft q."""
    q = draft_distribution(last)
    return [(token, q) for token in draft_logprobs(last).topk(width).indices.tolist()]


def untempered(width, last, noise, position):
    """Another of its faults: drawn at the request's temperature, reported at temperature 1."""
    found = drawn(width, last, noise, position)
    q = DraftDistribution(ALL.numpy(), row_of(DRAFT, last).double().softmax(-1).numpy())
    return [(token, q) for token, _ in found]


def greedy_order(width, last, noise, position):
    """Draws without replacement, tested in the order of their probability instead of that of the draws."""
    found = [token for token, _ in drawn(width, last, noise, position)]
    found.sort(key=lambda token: -float(draft_logprobs(last)[token]))
    return draws_of(last, tuple(found))


@pytest.mark.parametrize(("source", "width"), [(soft_argmax, 1), (untempered, 1), (greedy_order, 3)])
def test_a11_the_same_chi_square_catches_a_q_that_is_not_the_one_drawn_from(source, width):
    counts = np.zeros((V, V))
    for seed in range(DRAWS):
        a, b = text_of(functools.partial(tree_of, source, width, 1), seed, 2)
        counts[a, b] += 1
    assert p_value(counts, joint()) < 1e-6


@pytest.mark.parametrize("width", [1, 2, 3])
def test_a11_the_invariant_rule_over_siblings_that_share_its_noise(width):
    """Trees of the top w of log q + verification's noise, no q reported."""
    counts = np.zeros((V, V))
    for seed in range(1_000):
        noise = RequestNoise(seed, 0, V)
        tokens, parents = [], []
        for first in (draft_logprobs((V, V)) + noise.gumbel(0, ALL)).topk(width).indices.tolist():
            at = len(tokens)
            found = (draft_logprobs((V, first)) + noise.gumbel(1, ALL)).topk(width).indices.tolist()
            tokens += [first, *found]
            parents += [ROOT, *[at] * width]
        proposal = tree(tokens, parents)
        text = []
        while len(text) < 2:
            part = proposal if not text else tree([], [])
            text += invariant.verify(block_of(text, part), part, A11, noise, len(text), 2 - len(text)).emitted
        counts[text[0], text[1]] += 1
    assert p_value(counts, joint()) > 1e-3


# --- measured acceptance against theory


def within(count, n, expected):
    """4.5 standard errors of a binomial: with other seeds, a false alarm once in 50,000 runs."""
    return abs(count / n - expected) < 4.5 * math.sqrt(expected * (1 - expected) / n)


@pytest.mark.parametrize("last", [(V, V), (V, 4), (9, 2)])
def test_a_drawn_token_is_accepted_as_often_as_one_minus_total_variation(last):
    ids, logp = shaped(last)
    p = torch.zeros(V, dtype=torch.float64)
    p[torch.from_numpy(ids)] = torch.from_numpy(np.exp(logp))
    q = draft_logprobs(last).exp()
    accepted, n = 0, 4_000
    for seed in range(n):
        noise = RequestNoise(seed, 0, V)
        hit, _ = rejection.judge_children(ids, logp, drawn(1, last, noise, 0), noise.acceptance.uniform(0))
        accepted += hit is not None
    expected = float(rejection_acceptance(p, q))
    assert within(accepted, n, expected)
    assert float(coupled_acceptance(p, q)) < expected


@pytest.mark.parametrize("width", [1, 2, 3])
def test_chosen_siblings_are_accepted_as_often_as_the_target_says_one_of_them(width):
    ids, logp = shaped((9, 2))
    candidates = argmax(width, (9, 2), None, 0)
    expected = sum(float(np.exp(logp)[ids == token].sum()) for token, _ in candidates)
    n = 2_000
    hits = [
        rejection.judge_children(ids, logp, candidates, RequestNoise(seed).acceptance.uniform(0))[0]
        for seed in range(n)
    ]
    assert within(sum(hit is not None for hit in hits), n, expected)


class RecordedHead:
    """A real head over a tiny trunk, one row of text, and a target that half agrees with it."""

    def __init__(self, temperature):
        self.eagle = head_rig.source(width=3)
        self.params = SamplingParams(temperature=temperature)
        self.row = head_rig.row(9, 7)
        self.row.temperature = temperature
        self.row.noise, self.row.noise_is_shared = RequestNoise(0, 0, 50), False
        found = []
        self.eagle.draft([self.row], [1], lambda index, guesses: found.append(guesses), draw=True)
        q = found[0].distributions[0]
        self.q = torch.zeros(50, dtype=torch.float64)
        self.q[torch.from_numpy(q.ids)] = torch.from_numpy(q.probabilities)
        generator = torch.Generator().manual_seed(3)
        blur = torch.randn(50, generator=generator, dtype=torch.float64)
        self.logits = ((self.q + 1e-3).log() * temperature + 0.5 * blur).float()
        self.p = (self.logits.double() / temperature).softmax(-1)

    def propose(self, noises, shared, width=1):
        """A proposal per noise, in one batch."""
        rows = [
            replace(self.row, noise=n if shared else n.draft, noise_is_shared=shared, scratch={})
            for n in noises
        ]
        return self.eagle.propose_priced(rows, [1] * len(rows), [0.0] * len(rows), width)


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_the_real_head_is_accepted_as_both_formulas_say(temperature):
    rig = RecordedHead(temperature)
    at, n = rig.row.output_length, 1_000
    block = torch.stack([rig.logits] * 2)
    taken = {True: 0, False: 0}
    counts = np.zeros(50)
    noises = [RequestNoise(seed, 0, 50) for seed in range(n)]
    for shared, judge in ((True, invariant.verify), (False, rejection.verify)):
        for noise, proposal in zip(noises, rig.propose(noises, shared), strict=True):
            assert len(proposal) == 1
            assert (proposal.distributions is None) == shared
            verdict = judge(block, proposal, rig.params, noise, at, 1)
            taken[shared] += verdict.accepted
            if not shared:
                counts[verdict.emitted[0]] += 1
    assert within(taken[True], n, float(coupled_acceptance(rig.p, rig.q)))
    assert within(taken[False], n, float(rejection_acceptance(rig.p, rig.q)))
    assert p_value(counts, rig.p.numpy()) > 1e-3


def test_a11_the_real_heads_siblings_leave_the_targets_distribution():
    rig = RecordedHead(0.8)
    counts, n = np.zeros(50), 1_500
    block = torch.stack([rig.logits] * 4)
    noises = [RequestNoise(seed, 1, 50) for seed in range(n)]
    for noise, proposal in zip(noises, rig.propose(noises, False, 3), strict=True):
        assert proposal.parents == (ROOT,) * 3
        verdict = rejection.verify(block, proposal, rig.params, noise, rig.row.output_length, 1)
        counts[verdict.emitted[0]] += 1
    assert p_value(counts, rig.p.numpy()) > 1e-3
