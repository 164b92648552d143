"""Evidence: the target's own distribution at emitted positions, kept from verification for distillation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from drafts.native.ranking import BLOCK, ranker
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
    ids, logprobs = _top(logits, [index for _, indices in groups for index in indices], count)
    at = 0
    for row, indices in groups:
        row.evidence.append((ids[at : at + len(indices)], logprobs[at : at + len(indices)]))
        at += len(indices)


def _top(logits: torch.Tensor, rows: list[int], count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids ``[n, count]`` int32 and log-probabilities float16 of the most probable tokens of ``rows``."""
    size = logits.shape[-1]
    count = min(count, size)
    able = logits.device.type == "cpu" and logits.dtype == torch.float32 and logits.is_contiguous()
    if able and size % BLOCK == 0 and (ranks := ranker()) is not None:
        table = logits.numpy()
        found = [ranks.top(table[row], count) for row in rows]
        ids, logprobs = (torch.from_numpy(np.stack(part)) for part in zip(*found, strict=True))
        return ids.int(), logprobs.half()
    chosen = logits[rows]
    top = chosen.topk(count, dim=-1)
    logprobs = top.values - chosen.logsumexp(-1, keepdim=True)
    # One copy to the host: float32 holds every id of a vocabulary below 2 ** 24.
    logprobs, ids = torch.cat((logprobs, top.indices.to(logprobs)), dim=-1).cpu().chunk(2, dim=-1)
    return ids.int(), logprobs.half()
