import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from osd.serve.shaping import TargetNumericsError, shaped_logprobs
from osd.types import SamplingParams


def reference(logits, params):
    """The definition, spelled out over python lists: rank, cut, renormalise."""
    ranked = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if params.temperature == 0:
        return {ranked[0]: 1.0}
    if params.top_k:
        ranked = ranked[: params.top_k]
    weights = [math.exp((logits[i] - logits[ranked[0]]) / params.temperature) for i in ranked]
    total, mass, kept = sum(weights), 0.0, {}
    for token, weight in zip(ranked, weights, strict=True):
        kept[token] = weight
        mass += weight / total
        if params.top_p < 1 and mass >= params.top_p:
            break
    kept = {token: weight for token, weight in kept.items() if weight >= params.min_p}
    return {token: weight / sum(kept.values()) for token, weight in kept.items()}


@given(
    logits=st.lists(st.integers(-12, 12).map(lambda x: x / 2), min_size=1, max_size=40),
    temperature=st.sampled_from([0.0, 1e-3, 0.5, 0.7, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 2, 5, 100]),
    top_p=st.sampled_from([1e-9, 0.31, 0.5234, 0.9001, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 1e-9, 0.0901, 0.5678, 1.0]),
)
@settings(max_examples=400, deadline=None)
def test_shaping_follows_the_definition_ties_included(logits, temperature, top_k, top_p, min_p):
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    ids, logp = shaped_logprobs(torch.tensor(logits), params)
    expected = reference(logits, params)
    assert ids.dtype == torch.int64
    assert logp.dtype == torch.float64
    assert ids.tolist() == sorted(expected)
    got = dict(zip(ids.tolist(), logp.exp().tolist(), strict=True))
    assert got == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.999, 1 - 1e-7])
@pytest.mark.parametrize("scale", [0.0, 0.5, 4.0])
def test_large_vocabularies_cut_the_same_nucleus_as_a_full_sort(top_p, scale):
    logits = torch.randn(5000, generator=torch.Generator().manual_seed(1)) * scale
    params = SamplingParams(temperature=0.9, top_p=top_p)
    ids, logp = shaped_logprobs(logits, params)
    expected = reference(logits.double().tolist(), params)
    # summing 5,000 terms in two orders may disagree about the token on the border
    assert abs(len(ids) - len(expected)) <= 1
    assert len(set(ids.tolist()) ^ set(expected)) <= 1
    assert logp.exp().sum().item() == pytest.approx(1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_top_k_one_is_greedy_also_between_equal_maxima(dtype):
    logits = torch.tensor([0.0, 3.0, 3.0, 3.0, -1.0], dtype=dtype)
    for params in (SamplingParams(temperature=1.0, top_k=1), SamplingParams(temperature=0.0)):
        ids, logp = shaped_logprobs(logits, params)
        assert (ids.tolist(), logp.tolist()) == ([1], [0.0])


def test_masked_tokens_have_probability_zero():
    logits = torch.tensor([-math.inf, 1.0, -math.inf, 1.0])
    for params in (SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, top_k=3, top_p=0.99)):
        ids, logp = shaped_logprobs(logits, params)
        alive = {int(i): p for i, p in zip(ids, logp.exp().tolist(), strict=True) if p > 0}
        assert alive == pytest.approx({1: 0.5, 3: 0.5})


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-6, 1e-3])
def test_a18_tiny_temperatures_do_not_overflow(temperature):
    logits = torch.tensor([-3e38, 80.0, 79.99, 3e38, -math.inf])
    ids, logp = shaped_logprobs(logits, SamplingParams(temperature=temperature))
    assert not logp.isnan().any()
    assert ids[logp.argmax()] == 3
    assert logp.max() == 0.0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a18_a_row_that_defines_no_distribution_is_refused(bad, temperature):
    params = SamplingParams(temperature=temperature)
    with pytest.raises(TargetNumericsError, match="finite maximum") as caught:
        shaped_logprobs(torch.tensor([0.0, bad, 1.0]), params)
    assert caught.value.status == 500
    with pytest.raises(TargetNumericsError):
        shaped_logprobs(torch.full((4,), -math.inf), params)


def test_the_logits_are_left_alone():
    logits = torch.tensor([1.0, 2.0, 3.0])
    shaped_logprobs(logits, SamplingParams(temperature=0.5, top_k=2, top_p=0.5))
    assert logits.tolist() == [1.0, 2.0, 3.0]
