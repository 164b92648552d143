"""Exact, drafter-invariant verification: one rule for chains and trees, greedy and sampled.

The token at an output position is ``argmax(log p + Gumbel noise)``, p being the target's shaped distribution
there; at temperature 0 simply the argmax. A proposed token is accepted if it equals that token. The text
therefore follows the target exactly and depends only on target, prompt, parameters and seed, never on what
was proposed (Daliri, Musco, Suresh, arXiv 2408.07978).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from drafts.errors import PolydraftError, as_typed
from drafts.proposal import ROOT, Proposal
from osd.serve.device_choice import SampledRow, answers, on_accelerator, sampled_rows
from osd.serve.noise import RequestNoise
from osd.serve.processor import LogitsProcessor, processes_logits
from osd.serve.shaping import TargetNumericsError, shaped_logprobs
from osd.types import SamplingParams

__all__ = ["TargetNumericsError", "Verdict", "target_token", "verify", "verify_batch"]


class Verdict(NamedTuple):
    """What one round emits.

    Attributes:
        emitted: Accepted tokens, then the correction or bonus token, unless the limit came first.
        accepted: Accepted nodes; ``len(path)``.
        tested: Accepted nodes plus the first rejection, if anything was proposed there
            (alpha = accepted / tested).
        path: Indices of the accepted nodes in the proposal, each the parent of the next.
    """

    emitted: tuple[int, ...]
    accepted: int
    tested: int
    path: tuple[int, ...]


def target_token(
    logits: torch.Tensor,
    params: SamplingParams,
    noise: RequestNoise | None,
    position: int,
    processor: LogitsProcessor | None = None,
) -> int:
    """The token the target says at output ``position`` (0 = first), whatever any draft proposed.

    Args:
        logits: The row's raw logits, float [V].
        params: The request's parameters.
        noise: The request's noise; may be ``None`` only at temperature 0.
        position: Output position.
        processor: The request's bias, penalties and grammar, advanced to this position; needed where
            ``params`` have any.

    Raises:
        TargetNumericsError: The logits hold NaN or +inf, or nothing finite.
        NoTokenError: The processor leaves no token.
        GrammarError: The processor's grammar broke.
    """
    if params.temperature == 0.0 and not processes_logits(params):
        tokens, peaks = _answers(logits.unsqueeze(0), ())
        return _finite(tokens[0], peaks[0], position)
    try:
        ids, logp = shaped_logprobs(logits, params, processor)
    except TargetNumericsError as error:
        raise TargetNumericsError(error.best, position) from None
    if len(ids) == 1:
        return int(ids[0])
    assert noise is not None, "a sampled request has noise"
    return int(ids[(logp + noise.gumbel(position, ids)).argmax()])


def verify(
    logits: torch.Tensor,
    proposal: Proposal,
    params: SamplingParams,
    noise: RequestNoise | None,
    position: int,
    limit: int | None = None,
    processor: LogitsProcessor | None = None,
) -> Verdict:
    """Walk the proposed tree along the target's own tokens.

    Only rows on the accepted path are judged, exactly those that plain decoding would compute; a sampled
    row is shaped only when the walk reaches it.

    Args:
        logits: Raw target logits, float [1 + nodes, V]; row 0 follows the root, row ``1 + i`` node ``i``.
        proposal: The proposed tree. Siblings may repeat a token; their subtrees are then followed together.
        params: The request's parameters.
        noise: The request's noise; may be ``None`` only at temperature 0.
        position: Output position of the first token to emit.
        limit: Most tokens to emit, at least 1; ``None`` for no limit. The round may then end on an accepted
            token, without correction or bonus.
        processor: The request's bias, penalties and grammar at ``position``; advanced with every emitted
            token, so that each row on the path is judged by its own counts.

    Raises:
        TargetNumericsError: A row on the path holds NaN or +inf, or nothing finite.
        NoTokenError: The processor leaves no token.
        GrammarError: The processor's grammar broke.
    """
    result = verify_batch(logits, [0], [proposal], [params], [noise], [position], [limit], [processor])[0]
    if isinstance(result, PolydraftError):
        raise result
    return result


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
    """:func:`verify` for every request of a pass; greedy requests share one argmax over all rows.

    Off the processor, sampled requests without a processor share it too (:mod:`osd.serve.device_choice`): the
    host then waits once a pass for all of them.

    Args:
        logits: Raw target logits of the pass, float [rows, V].
        offsets: First row of each request's block of ``1 + nodes`` rows.
        proposals: One a request, as are ``params``, ``noises``, ``positions``, ``limits``, ``processors``.

    Returns:
        A verdict a request, or the error that ends this request alone. Whatever a row raises is its own:
        other rows' processors have moved on by then and cannot be asked again.
    """
    tokens: list[int] = []
    peaks: list[float] = []
    shared = [not processes_logits(item) for item in params]
    sampled: list[SampledRow] = []
    if on_accelerator(logits):
        sampled = sampled_rows(shared, offsets, proposals, params, noises, positions)
    else:
        shared = [item.temperature == 0.0 and alike for item, alike in zip(params, shared, strict=True)]
    if any(shared):
        tokens, peaks = _answers(logits, sampled)
    results: list[Verdict | PolydraftError] = []
    for index, proposal in enumerate(proposals):
        start, request, noise = offsets[index], params[index], noises[index]
        if shared[index]:
            choose: Callable[[int, int], int] = partial(_choose, tokens, peaks, start)
        else:
            processor = processors[index] if processors else None
            choose = partial(_choose_shaped, logits, start, request, noise, processor)
        try:
            results.append(_walk(proposal, choose, positions[index], limits[index] if limits else None))
        except Exception as error:
            results.append(as_typed(error, "verification failed"))
    return results


def _choose(tokens: list[int], peaks: list[float], start: int, row: int, position: int) -> int:
    return _finite(tokens[start + row], peaks[start + row], position)


def _choose_shaped(
    logits: torch.Tensor,
    start: int,
    params: SamplingParams,
    noise: RequestNoise | None,
    processor: LogitsProcessor | None,
    row: int,
    position: int,
) -> int:
    token = target_token(logits[start + row], params, noise, position, processor)
    if processor is not None:
        processor.advance(token)
    return token


def _walk(proposal: Proposal, choose: Callable[[int, int], int], position: int, limit: int | None) -> Verdict:
    """Follow the tree; ``choose(row, position)`` is the target's token after node ``row - 1``.

    ``alive`` holds every node whose path spells the tokens emitted so far: one, or all duplicates of one.
    """
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(proposal.parents):
        children.setdefault(parent, []).append(node)
    emitted: list[int] = []
    alive = [ROOT]
    while True:
        token = choose(alive[0] + 1, position + len(emitted))
        emitted.append(token)
        proposed = [child for node in alive for child in children.get(node, ())]
        matching = [child for child in proposed if proposal.tokens[child] == token]
        if matching:
            alive = matching
        if not matching or len(emitted) == limit:
            break
    path: list[int] = []
    node = alive[0]
    while node != ROOT:
        path.append(node)
        node = proposal.parents[node]
    accepted = len(path)
    rejected = not matching and bool(proposed)
    return Verdict(tuple(emitted), accepted, accepted + rejected, tuple(reversed(path)))


def _answers(logits: torch.Tensor, sampled: Sequence[SampledRow]) -> tuple[list[int], list[float]]:
    """Every row's token (greedy but for ``sampled``), and its maximum (NaN if the row holds one).

    numpy's argmax is vectorised where torch's, on a CPU, is not: ten times faster over one vocabulary.
    """
    if on_accelerator(logits):
        found, values = answers(logits, sampled).tolist()
        return [int(token) for token in found], values
    best = torch.from_numpy(logits.detach().float().numpy().argmax(axis=-1))
    peaks: list[float] = logits.gather(-1, best.unsqueeze(-1)).squeeze(-1).tolist()
    tokens: list[int] = best.tolist()
    return tokens, peaks


def _finite(token: int, peak: float, position: int) -> int:
    if not math.isfinite(peak):
        raise TargetNumericsError(peak, position)
    return token
