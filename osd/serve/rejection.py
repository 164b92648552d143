"""Exact verification by recursive rejection sampling: the option beside the drafter-invariant rule.

At a node the children are tested in order. Child x, drawn from q, is accepted with probability
``min(1, p(x) / q(x))``; otherwise p becomes ``normalise(max(p - q, 0))`` for the next child. When all are
rejected the token is drawn from what is left of p. So the text follows the target's distribution whatever
the tree (SpecInfer, arXiv 2305.09781; Jeon et al., "Recursive Speculative Decoding",
arXiv 2402.14160; EAGLE-2, arXiv 2406.16858), but the sample itself changes with the drafts.

Every node brings the q it was drawn from *given the siblings before it*: drawing without replacement needs no
rule of its own, and a token chosen without chance is a point mass, accepted with p(x).

Acceptance and drawing use streams of the request's seed, by output position and number of the test, so the
same seed with the same proposals gives the same text. Without any proposal it is the text of the
drafter-invariant rule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from drafts.errors import PolydraftError, as_typed
from drafts.proposal import POINT_MASS, ROOT, DraftDistribution, Proposal
from osd.serve import verify as invariant
from osd.serve.noise import RequestNoise
from osd.serve.processor import LogitsProcessor
from osd.serve.shaping import TargetNumericsError, shaped_logprobs
from osd.serve.verify import Verdict
from osd.types import SamplingParams

Floats = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]

Shape = Callable[[int, Sequence[int]], tuple[Ids, Floats]]
"""``shape(row, emitted)``: support (ascending ids) and log-probabilities of the target after ``emitted``."""

EMPTY_RESIDUAL = 1e-11
"""Mass of a residual below which it is rounding error, and p itself is drawn from."""


def verify_batch(
    logits: torch.Tensor,
    offsets: Sequence[int],
    proposals: Sequence[Proposal],
    params: Sequence[SamplingParams],
    noises: Sequence[RequestNoise | None],
    positions: Sequence[int],
    limits: Sequence[int | None] | None = None,
    processors: Sequence[LogitsProcessor | None] | None = None,
) -> list[Verdict | PolydraftError]:
    """As :func:`osd.serve.verify.verify_batch`, sampled requests by rejection sampling.

    Greedy requests follow the argmax as ever. A sampled request whose proposal does not say what it was drawn
    from gets a :class:`~drafts.errors.DraftDistributionError` for its result.
    """
    results: list[Verdict | PolydraftError | None] = [None] * len(proposals)
    greedy = [index for index, item in enumerate(params) if item.temperature == 0.0]
    if greedy:
        judged = invariant.verify_batch(
            logits,
            [offsets[index] for index in greedy],
            [proposals[index] for index in greedy],
            [params[index] for index in greedy],
            [noises[index] for index in greedy],
            [positions[index] for index in greedy],
            None if limits is None else [limits[index] for index in greedy],
            None if processors is None else [processors[index] for index in greedy],
        )
        for index, result in zip(greedy, judged, strict=True):
            results[index] = result
    for index, proposal in enumerate(proposals):
        if params[index].temperature == 0.0:
            continue
        noise = noises[index]
        assert noise is not None, "a sampled request has noise"
        processor = processors[index] if processors else None
        shape = partial(_shape, logits, offsets[index], params[index], processor, positions[index])
        advance = None if processor is None else processor.advance
        limit = None if limits is None else limits[index]
        try:
            drawn_from = proposal.check_distributions()
            results[index] = walk(proposal, drawn_from, shape, noise, positions[index], limit, advance)
        except Exception as error:
            results[index] = as_typed(error, "verification failed")
    return [result for result in results if result is not None]


def verify(
    logits: torch.Tensor,
    proposal: Proposal,
    params: SamplingParams,
    noise: RequestNoise | None,
    position: int,
    limit: int | None = None,
    processor: LogitsProcessor | None = None,
) -> Verdict:
    """:func:`verify_batch` for one request.

    Raises:
        DraftDistributionError: The proposal does not say what it was drawn from.
        TargetNumericsError: A row on the path holds NaN or +inf, or nothing finite.
    """
    result = verify_batch(logits, [0], [proposal], [params], [noise], [position], [limit], [processor])[0]
    if isinstance(result, PolydraftError):
        raise result
    return result


def walk(
    proposal: Proposal,
    drawn_from: Sequence[DraftDistribution],
    shape: Shape,
    noise: RequestNoise,
    position: int,
    limit: int | None = None,
    advance: Callable[[int], None] | None = None,
) -> Verdict:
    """Follow one request's tree; see :func:`osd.serve.verify.verify` for the arguments.

    ``drawn_from`` are the nodes' distributions; ``advance`` is told every emitted token.

    A child whose q is no distribution, or gives the child itself no chance, counts as not proposed: it is
    neither tested nor followed (case A18).

    Raises:
        TargetNumericsError: A row on the path defines no distribution.
    """
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(proposal.parents):
        children.setdefault(parent, []).append(node)
    emitted: list[int] = []
    alive = [ROOT]
    while True:
        at = position + len(emitted)
        ids, logp = shape(alive[0] + 1, emitted)
        proposed = [
            child
            for node in alive
            for child in children.get(node, ())
            if _tellable(proposal.tokens[child], drawn_from[child])
        ]
        candidates = [(proposal.tokens[child], drawn_from[child]) for child in proposed]
        hit, left = judge_children(ids, logp, candidates, _uniforms(noise, at, len(candidates)))
        token = _draw(ids, left, noise, at) if hit is None else proposal.tokens[proposed[hit]]
        emitted.append(token)
        if advance is not None:
            advance(token)
        if hit is None:
            break
        alive = [child for child in proposed if proposal.tokens[child] == token]
        if len(emitted) == limit:
            break
    path: list[int] = []
    node = alive[0]
    while node != ROOT:
        path.append(node)
        node = proposal.parents[node]
    rejected = hit is None and bool(proposed)
    return Verdict(tuple(emitted), len(path), len(path) + rejected, tuple(reversed(path)))


def judge_children(
    ids: Ids, logp: Floats, candidates: Sequence[tuple[int, DraftDistribution]], uniforms: Floats
) -> tuple[int | None, Floats]:
    """Test the children of one node in turn.

    Args:
        ids: Support of the target's distribution, ascending, [m].
        logp: Its log-probabilities, [m].
        candidates: The children: token, and what it was drawn from given those before it.
        uniforms: One a child, in (0, 1).

    Returns:
        Index of the accepted child, and the log of what the token is to be drawn from if none was (an
        unnormalised distribution over ``ids``).
    """
    if not candidates:
        return None, logp
    p = np.exp(logp)
    for index, (token, q) in enumerate(candidates):
        at = int(np.searchsorted(ids, token))
        chance = float(p[at]) if at < len(ids) and ids[at] == token else 0.0
        if uniforms[index] * (1.0 if q is POINT_MASS else q.of(token)) < chance:
            return index, logp
        left = p.copy()
        if q is POINT_MASS:
            if chance == 0.0:
                continue
            left[at] = 0.0
        else:
            where = np.searchsorted(ids, q.ids)
            where[where == len(ids)] = 0
            known = ids[where] == q.ids
            left[where[known]] = np.maximum(p[where[known]] - q.probabilities[known], 0.0)
        mass = float(left.sum())
        if mass <= EMPTY_RESIDUAL:
            break
        p = left / mass
    with np.errstate(divide="ignore"):
        return None, np.log(p)


def _tellable(token: int, q: DraftDistribution) -> bool:
    return q is POINT_MASS or (q.sound and q.of(token) > 0.0)


def _uniforms(noise: RequestNoise, position: int, count: int) -> Floats:
    stream = noise.acceptance
    stream.vocab_size = max(stream.vocab_size, count)
    return stream.uniform(position)


def _draw(ids: Ids, logp: Floats, noise: RequestNoise, position: int) -> int:
    """By the Gumbel-max rule, with the noise that plain decoding uses."""
    if len(ids) == 1:
        return int(ids[0])
    return int(ids[(logp + noise.gumbel(position, torch.from_numpy(ids)).numpy()).argmax()])


def _shape(
    logits: torch.Tensor,
    start: int,
    params: SamplingParams,
    processor: LogitsProcessor | None,
    position: int,
    row: int,
    emitted: Sequence[int],
) -> tuple[Ids, Floats]:
    try:
        ids, logp = shaped_logprobs(logits[start + row], params, processor)
    except TargetNumericsError as error:
        raise TargetNumericsError(error.best, position + len(emitted)) from None
    return ids.numpy(force=True), logp.numpy(force=True)
