"""Bias, penalties, least length: exact at every position of a round, whatever was proposed (A16, A17)."""

import functools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from scipy import stats

from drafts.errors import PolydraftError
from drafts.proposal import ROOT
from osd.serve.noise import RequestNoise
from osd.serve.processor import LogitsProcessor, processes_logits
from osd.serve.shaping import NoTokenError, TargetNumericsError, shaped_logprobs
from osd.serve.verify import verify, verify_batch
from osd.types import SamplingParams
from tests.osd.toy_target import TABLE, V, block_of, chain, plain, processor_of, row_of, speculate, tree

PROMPT, ENDS = (3, 4, 4, 11), (2, 7)
PENALTIES = {
    "frequency": {"frequency_penalty": 1.5},
    "presence": {"presence_penalty": 1.0},
    "repetition": {"repetition_penalty": 1.3},
    "negative": {"frequency_penalty": -0.4, "presence_penalty": -0.3, "repetition_penalty": 0.9},
    "min_tokens": {"min_tokens": 10},
    "bias": {"logit_bias": {5: 3.0, 6: -100.0, 2: 2.5}},
    "all": {
        "frequency_penalty": 1.5,
        "presence_penalty": 1.0,
        "repetition_penalty": 1.3,
        "min_tokens": 10,
        "logit_bias": {5: 3.0, 6: -100.0},
        "min_p": 0.05,
        "stop_token_ids": (9,),
    },
}
TEMPERATURES = [0.0, 1e-6, 1e-3, 0.7, 2.0]


def definition(logits, params, before):
    """The processed logits spelled out, token by token; ``before`` is the output so far."""
    out = []
    for token, value in enumerate(logits.tolist()):
        bias = params.logit_bias.get(token, 0.0)
        value = -math.inf if bias <= -100 else value + bias
        if token in PROMPT or token in before:
            value = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
        value -= params.frequency_penalty * before.count(token)
        value -= params.presence_penalty * (token in before)
        if len(before) < params.min_tokens and token in (*ENDS, *params.stop_token_ids):
            value = -math.inf
        out.append(value)
    return out


@pytest.mark.parametrize("name", PENALTIES)
@pytest.mark.parametrize("before", [[], [5], [5, 5, 4, 0, 5], list(range(10)), [1] * 12])
def test_a17_the_processed_logits_follow_the_definition(name, before):
    params = SamplingParams(**PENALTIES[name])
    processor = LogitsProcessor(params, PROMPT, ENDS, V)
    for token in before:
        processor.advance(token)
    logits = row_of(TABLE, before)
    kept = logits.clone()
    torch.testing.assert_close(processor.apply(logits), torch.tensor(definition(logits, params, before)))
    assert torch.equal(logits, kept)


@given(
    name=st.sampled_from(sorted(PENALTIES)),
    temperature=st.sampled_from(TEMPERATURES),
    seed=st.integers(0, 2**32),
    rng=st.randoms(),
)
@settings(max_examples=200, deadline=None)
def test_a17_the_text_is_the_same_whatever_is_proposed(name, temperature, seed, rng):
    """Chains and trees whose branches hold different counts; A18's temperatures among them."""
    params = SamplingParams(temperature=temperature, **PENALTIES[name])
    expected = plain(params, seed, 14, prompt=PROMPT, ends=ENDS)

    def propose(text, noise):
        nodes = rng.choice([0, 1, 3, 4, 8])
        parents = [rng.choice([i - 1, rng.randrange(ROOT, i)]) for i in range(nodes)]
        depths = tree([0] * nodes, parents).depths
        truth = [*expected[len(text) :], *[0] * nodes]
        tokens = [truth[depth - 1] if rng.random() < 0.6 else rng.randrange(V) for depth in depths]
        return tree(tokens, parents)

    assert speculate(params, seed, 14, propose, PROMPT, ENDS) == expected


def test_a17_end_tokens_become_possible_at_exactly_token_min_tokens_plus_one():
    """The end token is by far the best everywhere; forced drafts propose it at every position."""
    params = SamplingParams(min_tokens=10, logit_bias={2: 50.0})
    for nodes in (0, 1, 3, 5):
        text = speculate(params, 0, 12, lambda text, noise, n=nodes: chain([2] * n), PROMPT, ENDS)
        assert 2 not in text[:10]
        assert text[10:] == [2, 2]


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_a17_a_repetition_penalty_that_is_not_positive_is_refused(bad):
    with pytest.raises(ValidationError, match="repetition_penalty"):
        SamplingParams(repetition_penalty=bad)


@pytest.mark.parametrize("temperature", [0.0, 1.0, 10.0])
def test_a16_a_forbidden_token_never_appears_though_drafts_propose_it_everywhere(temperature):
    free = SamplingParams(temperature=temperature)
    for seed in range(20):
        banned = plain(free, seed, 1)[0]
        params = SamplingParams(temperature=temperature, logit_bias={banned: -100.0})
        for nodes in (0, 4):
            text = speculate(params, seed, 12, lambda text, noise, n=nodes, b=banned: chain([b] * n))
            assert banned not in text


def test_a16_min_p_keeps_no_token_below_half_of_the_maximum_at_any_position():
    params = SamplingParams(temperature=2.0, min_p=0.5)
    cut = 0
    for seed in range(60):
        expected = plain(params, seed, 8)
        propose = lambda text, noise, e=expected: chain([*e, 0, 0, 0, 0][len(text) : len(text) + 4])  # noqa: E731
        text = speculate(params, seed, 8, propose)
        assert text == expected
        for at, token in enumerate(text):
            p = torch.softmax(row_of(TABLE, text[:at]).double() / 2.0, -1)
            assert p[token] >= 0.5 * p.max() * (1 - 1e-12)
            cut += int((p < 0.5 * p.max()).sum())
    assert cut > 0


def test_a16_parameters_that_need_a_processor_are_never_verified_without_one():
    proposal = chain([1, 2])
    for values in PENALTIES.values():
        params = SamplingParams(**values)
        assert processes_logits(params)
        with pytest.raises(PolydraftError, match="need a processor"):
            verify(block_of([], proposal), proposal, params, None, 0)
    assert not processes_logits(SamplingParams(temperature=1.0, min_p=0.5, top_k=3, stop_token_ids=(3,)))


# --- the distribution

SHAPED = SamplingParams(
    temperature=0.9,
    min_p=0.02,
    frequency_penalty=1.5,
    presence_penalty=0.5,
    repetition_penalty=1.2,
    logit_bias={5: 1.0, 6: -100.0},
    min_tokens=2,
)


@functools.cache
def exact(before):
    """Exact probabilities after ``before``, [V], from the definition alone."""
    values = definition(row_of(TABLE, before), SHAPED, list(before))
    weights = [math.exp((value - max(values)) / SHAPED.temperature) for value in values]
    kept = [weight if weight >= SHAPED.min_p else 0.0 for weight in weights]
    return torch.tensor(kept, dtype=torch.float64) / sum(kept)


def test_a11_a17_sampled_text_has_the_penalised_distribution_at_every_position_of_a_round():
    """Tokens 1 and 2 (of 0, 1, 2) of accepted and rejected trees against exact probabilities.

    Seeds are fixed; with others, the test would fail by chance once in 1,000 runs.
    """
    joint = torch.zeros(V, V, dtype=torch.float64)
    for first, p in enumerate(exact(()).tolist()):
        if p:
            for second, q in enumerate(exact((first,)).tolist()):
                if q:
                    joint[second] += p * q * exact((first, second))

    def propose(text, noise):
        best = [int(exact(tuple(text)).argmax())]
        best.append(int(exact((*text, *best)).argmax()) if len(text) < 2 else 1)
        return tree([best[0], 5, best[1], 5], [ROOT, ROOT, 0, 1])

    counts = torch.zeros(V, V, dtype=torch.float64)
    draws, accepted = 3000, 0
    for seed in range(draws):
        noise, processor, text = RequestNoise(seed, 0, V), processor_of(SHAPED, PROMPT, ENDS), []
        while len(text) < 3:
            proposal = propose(text, noise)
            block = block_of(text, proposal)
            verdict = verify(block, proposal, SHAPED, noise, len(text), 3 - len(text), processor)
            accepted += verdict.accepted
            text += verdict.emitted
        counts[text[1], text[2]] += 1
    assert accepted > draws / 2
    assert not counts[joint == 0].any()
    expected, seen = joint.flatten() * draws, counts.flatten()
    large = expected >= 5
    rest = (seen[~large].sum().item(), expected[~large].sum().item())
    observed, wanted = [*seen[large].tolist(), rest[0]], [*expected[large].tolist(), rest[1]]
    assert stats.chisquare(observed, wanted).pvalue > 1e-3


# --- A18: numerics


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a18_a_bad_target_row_fails_its_request_alone_also_where_the_bad_token_is_forbidden(bad, temperature):
    params = SamplingParams(temperature=temperature, logit_bias={3: -100.0}, presence_penalty=1.0)
    good = chain(plain(params, 1, 2))
    block = block_of([], good)
    broken = block.clone()
    broken[1, 3] = bad
    noises = [RequestNoise(1, 0, V) for _ in range(3)]
    first, second, third = verify_batch(
        torch.cat([block, broken, block]),
        [0, 3, 6],
        [good] * 3,
        [params] * 3,
        noises,
        [0, 0, 0],
        processors=[processor_of(params) for _ in range(3)],
    )
    assert first == third == verify(block, good, params, noises[0], 0, None, processor_of(params))
    assert isinstance(second, TargetNumericsError)
    assert (second.status, second.position) == (500, 1)


def test_a_request_that_forbids_every_token_fails_with_the_reason():
    params = SamplingParams(logit_bias=dict.fromkeys(range(V), -100.0))
    with pytest.raises(NoTokenError, match="position 0: logit_bias, min_tokens"):
        verify(block_of([], chain([])), chain([]), params, None, 0, None, processor_of(params))


def test_greedy_with_a_processor_takes_the_first_of_equal_maxima():
    params = SamplingParams(logit_bias={4: 1.0})
    ids, _ = shaped_logprobs(torch.tensor([2.0, 0.0, 0.0, 0.0, 1.0]), params, processor_of(params))
    assert ids.tolist() == [0]


def test_penalties_are_exact_while_a_model_loads_in_another_type():
    """A loading draft model sets torch's default type for the whole process for a while."""
    params, before = SamplingParams(**PENALTIES["negative"]), [5] * 300 + [4]
    expected = torch.tensor(definition(row_of(TABLE, before), params, before))
    text = plain(params, 3, 14, prompt=PROMPT, ends=ENDS)
    torch.set_default_dtype(torch.bfloat16)
    try:
        processor = LogitsProcessor(params, PROMPT, ENDS, V)
        for token in before:
            processor.advance(token)
        again = plain(params, 3, 14, prompt=PROMPT, ends=ENDS)
        found = processor.apply(row_of(TABLE, before))
    finally:
        torch.set_default_dtype(torch.float32)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected)
    assert again == text
