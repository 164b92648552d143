"""The one function that turns a row of target logits into the distribution a request samples from.

Plain decoding and verification both call it, so no parameter can act on one of the two paths only. Where the
logits are on an accelerator, :mod:`osd.serve.device_choice` says its choices for all rows at once, for both.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from drafts.errors import PolydraftError
from osd.serve.processor import LogitsProcessor, processes_logits
from osd.types import SamplingParams

_NUCLEUS_FLOORS = (-7.0, -12.0, -math.inf)


class TargetNumericsError(PolydraftError):
    """The target returned logits that define no distribution; only the request they belong to fails.

    Args:
        best: The row's maximum: NaN, +inf, or -inf when every token is masked.
        position: Output position of the row, ``None`` where it is not known.
    """

    code = "target_numerics"

    def __init__(self, best: float, position: int | None = None) -> None:
        self.best = best
        self.position = position
        where = "" if position is None else f" at output position {position}"
        super().__init__(f"target logits{where}: maximum is {best}; a finite maximum is needed")


class NoTokenError(PolydraftError):
    """A request's bias, least length and grammar together forbid every token; only this request fails."""

    status = 400
    code = "no_token_allowed"

    def __init__(self, position: int) -> None:
        super().__init__(
            f"no token is allowed at output position {position}: logit_bias, min_tokens and "
            "response_format together forbid all that the target can say"
        )


def shaped_logprobs(
    logits: torch.Tensor, params: SamplingParams, processor: LogitsProcessor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The support and log-probabilities of the distribution that ``params`` asks for.

    Order, as in transformers: the processor (bias, penalties, forbidden tokens), temperature, ``top_k``,
    ``top_p`` on what is left, ``min_p``, normalisation. Tokens rank by score and equal scores by id, lower
    first, so ``top_k`` keeps exactly k and ``top_k=1`` is greedy decoding. ``top_p`` keeps the shortest
    prefix of that ranking with at least this mass, at least one token. ``min_p`` keeps what is at least this
    share as probable as the most probable token, at this temperature. Temperature 0 is a point mass on the
    first maximum.

    The maximum is subtracted before the division, so no temperature overflows, and a whole vocabulary is
    never sorted.

    Args:
        logits: Raw target logits, float [V].
        params: The request's parameters.
        processor: The request's bias, penalties and grammar at this position; needed where ``params`` have
            any.

    Returns:
        Token ids, int64 [m], ascending, and their log-probabilities, float64 [m]. Tokens that the target
        masks may be among them, with ``-inf``.

    Raises:
        TargetNumericsError: The row's maximum is not finite.
        NoTokenError: The processor leaves nothing.
        GrammarError: The processor's grammar broke.
    """
    assert processor is not None or not processes_logits(params), "these parameters need a processor"
    best = logits.max()
    if not math.isfinite(peak := best.item()):
        raise TargetNumericsError(peak)
    if processor is not None:
        logits = processor.apply(logits)
        best = logits.max()
        if not math.isfinite(peak := best.item()):
            raise NoTokenError(processor.length)
    vocab_size = logits.shape[-1]
    if params.temperature == 0.0:
        ids = (logits == best).nonzero()[:1, 0]
        return ids, torch.zeros(1, dtype=torch.float64, device=logits.device)
    if 0 < params.top_k < vocab_size:
        ids = top_ids(logits, params.top_k)
        scores = logits[ids].double()
    else:
        ids = torch.arange(vocab_size, device=logits.device)
        scores = logits.double()
    logp = torch.log_softmax((scores - peak) / params.temperature, dim=-1)
    if params.top_p < 1.0:
        kept = _nucleus(logp, params.top_p)
        ids, logp = ids[kept], torch.log_softmax(logp[kept], dim=-1)
    if params.min_p > 0.0:
        kept = logp >= logp.max() + math.log(params.min_p)
        ids, logp = ids[kept], torch.log_softmax(logp[kept], dim=-1)
    return ids, logp


def top_ids(logits: torch.Tensor, k: int) -> torch.Tensor:
    """Ids of the k best logits, ascending; equal logits at the border go to the lower ids."""
    border = logits.topk(k).values[-1]
    ids = (logits >= border).nonzero()[:, 0]
    return ids if len(ids) == k else ids[_ranked_first(logits[ids], border, k)]


def _nucleus(logp: torch.Tensor, top_p: float) -> torch.Tensor:
    """Indices, ascending, of the shortest prefix of the ranking whose mass reaches ``top_p``.

    Tokens above a floor are a prefix of the ranking, so once their mass suffices only they need sorting.
    """
    for floor in _NUCLEUS_FLOORS:
        candidates = (logp >= floor).nonzero()[:, 0]
        scores = logp[candidates]
        if scores.exp().sum().item() >= top_p:
            break
    ranked = _descending(scores)
    mass = ranked.exp().cumsum(0)
    count = min(1 + int((mass < top_p).sum()), len(ranked))
    return candidates[_ranked_first(scores, ranked[count - 1], count)]


def _ranked_first(scores: torch.Tensor, border: torch.Tensor, count: int) -> torch.Tensor:
    """Mask of the first ``count`` of the ranking, whose last score is ``border``."""
    above, tied = scores > border, scores == border
    return above | (tied & (tied.cumsum(0) <= count - above.sum()))


def _descending(scores: torch.Tensor) -> torch.Tensor:
    """Sorted scores. numpy's sort of values alone is vectorised on CPUs; torch's carries indices."""
    if scores.device.type != "cpu":
        return scores.sort(descending=True).values
    return torch.from_numpy(np.sort(scores.numpy())).flip(0)
