"""Evidence: the target's own distribution at emitted positions, kept from verification for distillation."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from osd.serve.row import Row


def keep_evidence(logits: torch.Tensor, kept: Sequence[tuple[Row, list[int]]], count: int) -> None:
    """Append the top ``count`` raw log-probabilities of every emitted position to its row.

    Temperature 1, before any shaping (OSD, arXiv 2310.07177, Algorithm 1 keeps the target's logits so
    that learning never runs the target again). Rows that nobody will learn from keep nothing.

    Args:
        logits: Logits of the pass, float32 ``[rows, vocab]``.
        kept: Per request, the logit rows that chose its emitted tokens, in order.
        count: Probabilities per position.
    """
    groups = [(row, indices) for row, indices in kept if row.keep_evidence and indices]
    if not groups:
        return
    chosen = logits[[index for _, indices in groups for index in indices]]
    top = chosen.topk(min(count, chosen.shape[-1]), dim=-1)
    logprobs = top.values - chosen.logsumexp(-1, keepdim=True)
    # One copy to the host: float32 holds every id of a vocabulary below 2 ** 24.
    logprobs, ids = torch.cat((logprobs, top.indices.to(logprobs)), dim=-1).cpu().chunk(2, dim=-1)
    logprobs, ids = logprobs.half(), ids.int()
    at = 0
    for row, indices in groups:
        row.evidence.append((ids[at : at + len(indices)], logprobs[at : at + len(indices)]))
        at += len(indices)
