"""The rule of :mod:`osd.serve.verify` for all rows of a pass at once, where the logits are.

On a processor the walk asks row by row and stops at the first rejection. On an accelerator every question
would be a wait, so here each row is answered before any is read, and one copy brings all answers to the host.

No row's answer depends on the rows beside it: scores and noise are computed element by element, ranks are
exact, and the mass of a nucleus is a sum of integers, which has one value in any order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from drafts.proposal import Proposal
from drafts.transfer import sent
from osd.serve.device_noise import AHEAD, ROWS_AT_ONCE, Wanted, prepare
from osd.serve.noise import RequestNoise
from osd.types import SamplingParams


class SampledRow(NamedTuple):
    """A row of logits that a sampled request without a processor may choose from.

    Attributes:
        row: Its index in the logits of the pass.
        params: The request's parameters.
        noise: The request's noise.
        position: The output position that the row decides.
    """

    row: int
    params: SamplingParams
    noise: RequestNoise
    position: int


def on_accelerator(logits: Tensor) -> bool:
    """Whether reading a value of ``logits`` would make the host wait for what is queued."""
    return logits.device.type != "cpu"


def sampled_rows(
    wanted: Sequence[bool],
    offsets: Sequence[int],
    proposals: Sequence[Proposal],
    params: Sequence[SamplingParams],
    noises: Sequence[RequestNoise | None],
    positions: Sequence[int],
) -> list[SampledRow]:
    """Every row of the wanted requests that sample, with the output position that its depth gives it.

    All arguments have one entry a request, as in :func:`osd.serve.verify.verify_batch`.
    """
    found: list[SampledRow] = []
    for index, proposal in enumerate(proposals):
        if not wanted[index] or params[index].temperature == 0.0:
            continue
        noise = noises[index]
        assert noise is not None, "a sampled request has noise"
        for node, depth in enumerate((0, *proposal.depths)):
            found.append(SampledRow(offsets[index] + node, params[index], noise, positions[index] + depth))
    return found


def answers(logits: Tensor, sampled: Sequence[SampledRow]) -> Tensor:
    """The target's token in every row, and the row's maximum; queued without waiting for the device.

    Args:
        logits: Raw target logits of the pass, float [rows, V].
        sampled: Rows to be sampled; all others get the first index of their maximum.

    Returns:
        float64 [2, rows], tokens (exact) and maxima (NaN if the row holds one), on the device of ``logits``.
        The token of a row whose maximum is not finite means nothing.
    """
    best = logits.argmax(dim=-1)
    peaks = logits.gather(-1, best.unsqueeze(-1)).squeeze(-1)
    _prepare_noise(logits, sampled)
    for ranks in (False, True):
        group = [item for item in sampled if _ranks(item.params, logits.shape[-1]) == ranks]
        for at in range(0, len(group), ROWS_AT_ONCE):
            part = group[at : at + ROWS_AT_ONCE]
            rows, tokens = _sample(logits, peaks, part)
            best = best.index_copy(0, rows, tokens)
    return torch.stack((best.double(), peaks.double()))


def _prepare_noise(logits: Tensor, sampled: Sequence[SampledRow]) -> None:
    """Make the noise of the pass, and of what the next drafts will ask, for all requests together."""
    reach: dict[int, Wanted] = {}
    for item in sampled:
        noise, at = item.noise.on_device, item.position
        known = reach.get(id(noise), Wanted(noise, at, at))
        reach[id(noise)] = Wanted(noise, min(known.first, at), max(known.last, at + AHEAD))
    prepare(list(reach.values()), logits.shape[-1], logits.device)


def _ranks(params: SamplingParams, vocab_size: int) -> bool:
    return 0 < params.top_k < vocab_size or params.top_p < 1.0


def _sample(logits: Tensor, peaks: Tensor, group: Sequence[SampledRow]) -> tuple[Tensor, Tensor]:
    """Indices and tokens of rows that all need ranking or all do not."""
    whole, real = _table(group, logits.device)
    rows, top_k = whole
    temperature, top_p, least = real.unsqueeze(-1)
    raw = logits.index_select(0, rows)
    ranking: Tensor | None = None
    if _ranks(group[0].params, logits.shape[-1]):
        raw, ranking = raw.sort(dim=-1, descending=True, stable=True)
    scores = (raw.double() - peaks.index_select(0, rows).double().unsqueeze(-1)) / temperature
    if ranking is not None:
        scores = _cut(scores, top_k.unsqueeze(-1), top_p)
    scores = scores.masked_fill(scores < least, -math.inf)
    noise = torch.stack([item.noise.on_device.row(item.position)[: logits.shape[-1]] for item in group])
    if ranking is not None:
        noise = noise.gather(-1, ranking)
    chosen = (scores + noise).argmax(dim=-1)
    if ranking is not None:
        chosen = ranking.gather(-1, chosen.unsqueeze(-1)).squeeze(-1)
    return rows, chosen


def _cut(ranked: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Scores [R, V], best first and 0 at most, without what ``top_k`` and ``top_p`` leave out."""
    vocab_size = ranked.shape[-1]
    rank = torch.arange(vocab_size, device=ranked.device)
    ranked = ranked.masked_fill(rank >= top_k, -math.inf)
    mass = (ranked.exp() * 2.0 ** (62 - vocab_size.bit_length())).long().cumsum(-1)
    short = mass.double() < top_p * mass[:, -1:].double()
    kept = torch.where(top_p < 1.0, 1 + short.sum(-1, keepdim=True), vocab_size)
    return ranked.masked_fill(rank >= kept, -math.inf)


def _table(group: Sequence[SampledRow], device: torch.device) -> tuple[Tensor, Tensor]:
    """What differs by row, int64 [2, R] and float64 [3, R], in one copy that nobody waits for."""
    whole = [
        (
            item.row,
            item.params.top_k if item.params.top_k > 0 else np.iinfo(np.int64).max,
        )
        for item in group
    ]
    real = [
        (
            item.params.temperature,
            item.params.top_p,
            math.log(item.params.min_p) if item.params.min_p > 0.0 else -math.inf,
        )
        for item in group
    ]
    bits = np.concatenate(
        (np.array(whole, dtype=np.int64).T, np.array(real, dtype=np.float64).view(np.int64).T)
    )
    table = sent(torch.from_numpy(bits), device)
    return table[:2], table[2:].contiguous().view(torch.float64)
