"""Measured acceptance of the two rules against theory, on the toy target and with a real head."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from drafts.proposal import ROOT
from osd.acceptance import coupled_acceptance, rejection_acceptance
from osd.serve import rejection
from osd.serve import verify as invariant
from osd.serve.noise import RequestNoise
from osd.types import SamplingParams
from tests.drafts import head_rig
from tests.osd.rejection_rig import argmax, draft_logprobs, drawn, p_value, shaped
from tests.osd.toy_target import V


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
