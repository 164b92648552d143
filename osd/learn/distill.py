"""From finished requests to buffer records, and from records to training batches."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from drafts.bank import Expert
from osd.learn.config import BufferConfig
from osd.learn.guard import Scores
from osd.learn.head import TrainableHead
from osd.learn.losses import SparseTarget, total_variation
from osd.learn.record import BufferRecord
from osd.types import FinishedRecord


@dataclass(frozen=True)
class Pending:
    """The part of a finished request that learning needs, cut to the window.

    Attributes:
        domain: The expert it is for.
        tokens: Prompt and output.
        prompt_length: Number of prompt tokens.
        features: float16, the last ones of ``tokens[:-1]``; ``None`` for a draft that reads none.
        positions: int64 ``[P]``, output positions chosen.
        top_ids: int32 ``[P, K]``.
        top_logprobs: float16 ``[P, K]``.
        greedy: Whether it was decoded greedily.
        boundaries: Output tokens committed after each round.
    """

    domain: str
    tokens: tuple[int, ...]
    prompt_length: int
    features: torch.Tensor | None
    positions: torch.Tensor
    top_ids: torch.Tensor
    top_logprobs: torch.Tensor
    greedy: bool
    boundaries: tuple[int, ...]

    @property
    def emitted(self) -> torch.Tensor:
        """int64 ``[P]``, the tokens at the chosen positions."""
        return torch.tensor(self.tokens)[self.prompt_length + self.positions]


def pending(
    record: FinishedRecord,
    config: BufferConfig,
    key: str | None = None,
    with_features: bool = True,
    context: int | None = None,
) -> Pending | None:
    """Cut a finished request to its window; ``None`` when it teaches nothing.

    Of the output positions whose base lies in the window, at most ``positions_per_record`` are kept, spread
    evenly. An answer without evidence or output is left out, and one without features where they are needed.

    Args:
        record: The request.
        config: Window and positions.
        key: The expert it is for; the domain's first if not given.
        with_features: Whether its draft reads features.
        context: Last tokens that its draft reads; a wider window is cut to them.
    """
    prompt, output = record.request.prompt_ids, record.output_ids
    if record.evidence is None or not output or not record.request.store:
        return None
    end = len(prompt) + len(output) - 1
    window = config.window if context is None else min(config.window, context)
    features = None
    if with_features:
        if record.features is None:
            return None
        features = record.features[-window:].clone()
        low = max(0, end - len(features) - (len(prompt) - 2))
    else:
        low = max(0, end - window - (len(prompt) - 1))
    high = min(len(output), len(record.evidence.top_ids))
    if low >= high:
        return None
    count = min(config.positions_per_record, high - low)
    positions = low + (torch.arange(count) * (high - low)) // count
    boundaries: list[int] = []
    for item in record.rounds:
        boundaries.append(item.emitted + (boundaries[-1] if boundaries else 0))
    return Pending(
        domain=key or record.domain,
        tokens=(*prompt, *output),
        prompt_length=len(prompt),
        features=features,
        positions=positions,
        top_ids=record.evidence.top_ids[positions].clone(),
        top_logprobs=record.evidence.top_logprobs[positions].clone(),
        greedy=record.request.sampling.temperature == 0,
        boundaries=tuple(boundaries),
    )


def encode(head: TrainableHead, item: Pending) -> torch.Tensor:
    """What the head reads of a pending request's positions, ``[P, W]``."""
    return head.encode(item.tokens, item.features, item.prompt_length, item.positions)


def make_record(
    item: Pending, hidden: torch.Tensor, right: torch.Tensor, number: int, version: int
) -> BufferRecord | None:
    """The buffer's record of a scored request; ``None`` if features or evidence are not finite (case A29)."""
    if not bool(torch.isfinite(hidden).all() & torch.isfinite(item.top_logprobs.float().exp()).all()):
        return None
    return BufferRecord(
        number=number,
        created=time.time(),
        version=version,
        greedy=item.greedy,
        positions=item.positions.int(),
        hidden=hidden.cpu(),
        emitted=item.emitted.int(),
        top_ids=item.top_ids.cpu(),
        top_logprobs=item.top_logprobs.cpu(),
        right=right.cpu(),
        boundaries=torch.tensor(item.boundaries, dtype=torch.int32),
    )


def is_right(logits: torch.Tensor, emitted: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Whether the argmax over the draft vocabulary is the emitted token, bool ``[P]``."""
    return token_ids[logits.argmax(-1)] == emitted.to(token_ids)


@torch.no_grad()
def score(head: TrainableHead, record: BufferRecord, expert: Expert, to_draft: torch.Tensor) -> Scores:
    """How the expert's first token does at each position of a record.

    A sampled request's emitted tokens are not what an argmax should hit: there both scores are the overlap.
    """
    device = to_draft.device
    logits = head.logits(record.hidden.to(device), expert)
    target = SparseTarget.from_evidence(record.top_ids.to(device), record.top_logprobs.to(device), to_draft)
    overlap = 1.0 - total_variation(logits, target)
    if not record.greedy:
        return Scores(overlap, overlap)
    return Scores(is_right(logits, record.emitted.to(device), head.token_ids).float(), overlap)


@dataclass(frozen=True)
class Batch:
    """N positions from any records of one domain.

    Attributes:
        hidden: ``[N, W]``, what the head reads of each.
        target: The target's distribution.
        emitted: int64 ``[N]``.
        ends: bool ``[N]``, whether a position was the last of its round.
    """

    hidden: torch.Tensor
    target: SparseTarget
    emitted: torch.Tensor
    ends: torch.Tensor


def collate(drawn: Sequence[tuple[BufferRecord, int]], to_draft: torch.Tensor) -> Batch:
    """The batch of drawn (record, row) pairs; at least one."""
    device = to_draft.device
    hidden = torch.stack([record.hidden[row] for record, row in drawn]).to(device)
    ids = torch.stack([record.top_ids[row] for record, row in drawn]).to(device)
    logprobs = torch.stack([record.top_logprobs[row] for record, row in drawn]).to(device)
    emitted = torch.stack([record.emitted[row] for record, row in drawn]).to(device).long()
    ends = torch.stack([record.ends[row] for record, row in drawn]).to(device)
    return Batch(hidden, SparseTarget.from_evidence(ids, logprobs, to_draft), emitted, ends)
