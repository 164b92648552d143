"""Log-probabilities that a request asked for: of its emitted tokens, under the target's raw distribution."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from osd.serve.shaping import top_ids
from osd.types import TokenLogprob


def token_logprobs(
    logits: torch.Tensor, rows: Sequence[int], tokens: Sequence[int], count: int
) -> tuple[TokenLogprob, ...]:
    """One entry per emitted token: temperature 1, before bias, penalties, grammar and cuts; natural log.

    Alternatives come best first, equal ones by id; tokens of probability zero are left out.

    Args:
        logits: Raw logits of the pass, float [rows, V].
        rows: The logit row that chose each token.
        tokens: The emitted tokens.
        count: Alternatives per token; 0 for none.
    """
    if not tokens:
        return ()
    chosen = logits[list(rows)].float()
    logprobs = chosen - chosen.logsumexp(-1, keepdim=True)
    own = logprobs.gather(-1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0].tolist()
    found = []
    for token, logprob, row in zip(tokens, own, logprobs, strict=True):
        found.append(TokenLogprob(token, logprob, _top(row, count)))
    return tuple(found)


def _top(logprobs: torch.Tensor, count: int) -> tuple[tuple[int, float], ...]:
    if not count:
        return ()
    ids = top_ids(logprobs, min(count, len(logprobs)))
    values, order = logprobs[ids].sort(descending=True, stable=True)
    pairs = zip(ids[order].tolist(), values.tolist(), strict=True)
    return tuple((token, value) for token, value in pairs if value > -math.inf)
