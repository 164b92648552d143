"""Case A11 under rejection sampling: the target's distribution for every tree."""

import functools

import numpy as np
import pytest

from drafts.proposal import ROOT, DraftDistribution
from osd.serve import verify as invariant
from osd.serve.noise import RequestNoise
from tests.osd.rejection_rig import (
    ALL,
    argmax,
    draft_distribution,
    draft_logprobs,
    drawn,
    draws_of,
    joint,
    joint_later,
    memory,
    merged,
    p_value,
    replaced,
    text_of,
    tree_of,
)
from tests.osd.toy_target import A11, DRAFT, V, block_of, row_of, tree

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
