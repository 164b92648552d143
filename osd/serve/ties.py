"""Near ties: where two roundings of the same scores may say different tokens, and by how much.

Under ``numerics: fast`` a pass over other rows may take another kernel, and scores move in their last
digits. That changes a token only where two (perturbed) scores nearly tie, or where a token lies so near
the border of top-k, top-p or min-p that it may or may not be kept: then the distribution itself differs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from drafts.errors import InvalidValueError
from osd.serve.noise import RequestNoise
from osd.serve.shaping import shaped_logprobs
from osd.serve.verify import target_token
from osd.types import SamplingParams

BOUNDS = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 0.06, torch.bfloat16: 0.5}
"""By dtype of the weights, the most by which rounding may move one raw score against another.

For scores of some tens, as language models give: 1e-3 is about 500 units in the last place of a float32
score of 30; a bfloat16 score of 30 is itself a multiple of 0.125.
"""

Kind = Literal["same", "gap", "border", "different"]


def tie_bound(dtype: torch.dtype) -> float:
    """The bound of ``dtype``.

    Raises:
        InvalidValueError: No bound is stated for it.
    """
    if dtype not in BOUNDS:
        raise InvalidValueError("dtype", dtype, f"one of {', '.join(str(known) for known in BOUNDS)}")
    return BOUNDS[dtype]


@dataclass(frozen=True, slots=True)
class Judgement:
    """How a served token relates to a reference row of scores.

    Attributes:
        kind: ``same`` token; within the bound of the choice (``gap``); chosen once a token within the
            bound of a border changes sides (``border``); ``different`` beyond all that.
        chosen: The token that the reference says.
        gap: Raw score that the served token lacks for being chosen, where both tokens are kept.
    """

    kind: Kind
    chosen: int
    gap: float | None

    @property
    def is_tie(self) -> bool:
        """Whether rounding explains the token."""
        return self.kind in ("gap", "border")


def judge(
    logits: Tensor,
    token: int,
    params: SamplingParams,
    noise: RequestNoise | None,
    position: int,
    bound: float,
) -> Judgement:
    """Compare a served token with the reference's row.

    Borders are not searched for one by one: the serving rule itself is asked about rows within the
    bound of this one, so whatever shapes the distribution is covered. A token is called a tie only with
    such a row as witness.

    Args:
        logits: The reference's raw scores, float [V].
        token: What was served.
        params: The request's parameters.
        noise: The request's noise; may be ``None`` only at temperature 0.
        position: Output position.
        bound: See :func:`tie_bound`.
    """
    chosen = target_token(logits, params, noise, position)
    if chosen == token:
        return Judgement("same", chosen, 0.0)
    if params.temperature == 0.0:
        gap = float(logits[chosen] - logits[token])
        return Judgement("gap" if gap <= bound else "different", chosen, gap)
    assert noise is not None
    gap_found = _perturbed_gap(logits, chosen, token, params, noise, position)
    for row in _rows_within(logits, chosen, token, bound):
        if target_token(row, params, noise, position) == token:
            kind: Kind = "border" if gap_found is None or gap_found > bound else "gap"
            return Judgement(kind, chosen, gap_found)
    return Judgement("different", chosen, gap_found)


def _perturbed_gap(
    logits: Tensor, chosen: int, token: int, params: SamplingParams, noise: RequestNoise, position: int
) -> float | None:
    """The gap in raw scores, the noise counted in; ``None`` if one of the two is not kept."""
    ids, logp = shaped_logprobs(logits, params)
    scores = logp + noise.gumbel(position, ids)
    pair = [scores[ids == wanted] for wanted in (chosen, token)]
    if any(not len(score) for score in pair):
        return None
    return float(pair[0] - pair[1]) * params.temperature


def _rows_within(logits: Tensor, chosen: int, token: int, bound: float) -> Iterator[Tensor]:
    """Rows in which no score has moved against another by more than ``bound``."""
    raised = logits.clone()
    raised[token] += bound
    yield raised
    lowered = logits.clone()
    lowered[chosen] -= bound
    yield lowered
    yield torch.where(logits > logits[token], logits - bound / 2, logits + bound / 2)
    sharper = torch.where(logits > logits[chosen], logits + bound / 2, logits - bound / 2)
    yield sharper
    sharper = sharper.clone()
    sharper[token] = logits[token] + bound / 2
    yield sharper
