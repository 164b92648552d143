"""What fails in a step ends the request that it belongs to, and no other."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from drafts.errors import as_typed
from drafts.proposal import EMPTY, Proposal
from osd.serve.cache import SlotCache
from osd.serve.row import Row
from osd.serve.target import PassOutput, PassRow, TargetModel
from osd.serve.verify import Verdict
from osd.types import BASE_DOMAIN, Event, FinishReason

log = logging.getLogger(__name__)

Batch = list[tuple[Row, PassRow]]


def run_pass(
    target: TargetModel,
    cache: SlotCache,
    batch: Batch,
    verifying: dict[int, Proposal],
    on_event: Callable[[Event], None],
) -> tuple[PassOutput, dict[int, Proposal]]:
    """One target pass; if it raises, one pass a row, and the rows that fail alone are marked as failed.

    A pass writes behind the committed length only, so doing it again is the same as doing it once.

    Args:
        target: The target.
        cache: Its cache.
        batch: Rows and what they ask of the pass.
        verifying: Proposals by index into ``batch``.
        on_event: Told of a pass that failed.

    Returns:
        The result, and ``verifying`` without the rows that failed.
    """
    try:
        return target.forward(cache, [item for _, item in batch]), verifying
    except Exception as error:
        log.exception("a pass over %d rows failed; each is run alone", len(batch))
        whole = as_typed(error, "the step failed")
    parts = [torch.empty(0, target.vocab_size, dtype=torch.float32, device=target.device)]
    offsets: list[int] = []
    left: dict[int, Proposal] = {}
    for index, (row, item) in enumerate(batch):
        offsets.append(sum(len(part) for part in parts))
        try:
            parts.append(target.forward(cache, [item]).logits)
        except Exception as error:
            fail_row(row, error, "the step failed")
            continue
        if index in verifying:
            left[index] = verifying[index]
    numbers = {"rows": len(batch), "failed": sum(row.error is not None for row, _ in batch)}
    on_event(Event("step_failed", BASE_DOMAIN, str(whole), numbers))
    return PassOutput(torch.cat(parts), offsets), left


def verify_each(
    verify: Callable[[Batch, PassOutput, dict[int, Proposal]], dict[int, Verdict]],
    batch: Batch,
    output: PassOutput,
    verifying: dict[int, Proposal],
) -> dict[int, Verdict]:
    """Verify all rows; if that raises, each alone, and those that fail alone are marked as failed.

    Args:
        verify: Verifies the named rows of a pass. It holds what a single row raises itself; where it raises,
            it does so before any row has moved on, so that doing it again gives the same.
        batch: Rows and what they asked of the pass.
        output: The pass.
        verifying: Proposals by index into ``batch``.
    """
    try:
        return verify(batch, output, verifying)
    except Exception:
        log.exception("verifying %d rows failed; each is verified alone", len(verifying))
    verdicts: dict[int, Verdict] = {}
    for index, proposal in verifying.items():
        try:
            verdicts |= verify(batch, output, {index: proposal})
        except Exception as error:
            fail_row(batch[index][0], error, "verification failed")
    return verdicts


def pruned(row: Row, proposal: Proposal) -> Proposal:
    """``proposal`` without what the row's grammar forbids; none where the grammar cannot tell.

    A broken grammar ends its request where the answer is verified; drafting costs the others nothing.
    """
    if row.processor is None or row.processor.grammar is None:
        return proposal
    try:
        return row.processor.grammar.prune(proposal)
    except Exception:
        log.exception("request %s: its grammar could not judge a proposal", row.draft.request_id)
        return EMPTY


def fail_row(row: Row, error: Exception, what: str = "the request failed") -> None:
    """Mark ``row`` as failed; it ends with this step."""
    log.error("request %s ends: %s", row.draft.request_id, what, exc_info=error)
    row.finish, row.error = FinishReason.ERROR, as_typed(error, what)
