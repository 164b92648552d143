"""Trees of every kind of draft over the toy target, for tests of rejection sampling."""

import functools

import numpy as np
import torch
from scipy import stats

from drafts.kinds.base import Draws
from drafts.proposal import POINT_MASS, ROOT, DraftDistribution, Proposal
from osd.serve import rejection
from osd.serve.noise import RequestNoise
from osd.serve.shaping import shaped_logprobs
from tests.osd.toy_target import A11, DRAFT, TABLE, V, row_of

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

        text += rejection.walk(
            proposal, proposal.check_distributions(), shape, noise, len(text), length - len(text)
        ).emitted
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
