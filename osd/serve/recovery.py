"""What fails in a step ends the request that it belongs to, and no other."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch

from drafts.proposal import Proposal
from osd.serve.cache import SlotCache
from osd.serve.lifecycle import as_typed
from osd.serve.row import Row
from osd.serve.target import PassOutput, PassRow, TargetModel
from osd.types import BASE_DOMAIN, Event, FinishReason

log = logging.getLogger(__name__)


def run_pass(
    target: TargetModel,
    cache: SlotCache,
    batch: Sequence[tuple[Row, PassRow]],
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
    parts: list[torch.Tensor] = [torch.empty(0, target.vocab_size, device=target.device)]
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


def fail_row(row: Row, error: Exception, what: str = "the request failed") -> None:
    """Mark ``row`` as failed; it ends with this step."""
    log.error("request %s ends: %s", row.draft.request_id, what, exc_info=error)
    row.finish, row.error = FinishReason.ERROR, as_typed(error, what)
