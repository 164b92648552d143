"""The most probable scores: a library's ranking and log-probabilities, in two readings."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from drafts.native.ranking import BLOCK, Ranker


@pytest.fixture(scope="module")
def ranks() -> Ranker:
    return Ranker()


@pytest.mark.parametrize("blocks", [1, 3, 32, 33, 384])
@pytest.mark.parametrize("scale", [0.0, 1.0, 30.0])
def test_ranks_and_log_probabilities_are_the_librarys(ranks: Ranker, blocks: int, scale: float):
    scores = torch.randn(blocks * BLOCK, generator=torch.Generator().manual_seed(blocks)) * scale
    if scale == 0.0:
        scores[torch.randperm(len(scores))[:40]] = 2.0
    ids, logprobs = ranks.top(scores.numpy(), 32)
    expected = scores.log_softmax(-1)
    torch.testing.assert_close(torch.from_numpy(logprobs), expected[ids], atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(scores[ids], scores.topk(32).values, atol=0.0, rtol=0.0)
    assert len(set(ids.tolist())) == 32


def test_all_the_best_may_lie_in_one_block(ranks: Ranker):
    scores = np.zeros(8 * BLOCK, dtype=np.float32)
    scores[3 * BLOCK : 3 * BLOCK + 40] = np.arange(40, 0, -1)
    assert ranks.top(scores, 32)[0].tolist() == list(range(3 * BLOCK, 3 * BLOCK + 32))


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_scores_that_are_not_finite_give_log_probabilities_that_are_not(ranks: Ranker, wrong: float):
    scores = np.ones(4 * BLOCK, dtype=np.float32)
    scores[200] = wrong
    assert not np.isfinite(ranks.top(scores, 8)[1]).all()
