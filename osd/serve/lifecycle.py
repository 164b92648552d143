"""A request's life in the engine: it waits, enters a slot, ends, and harms no other on the way.

Everything here that calls code of others (a receiver, a draft, an observer, a tokenizer) holds what that code
raises: it ends the request that it belongs to, or is logged where it belongs to none.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from drafts.errors import PolydraftError, as_typed
from drafts.kinds.base import DraftRow
from osd.serve.admission import Admission
from osd.serve.detokenize import OutputStream
from osd.serve.intake import Intake
from osd.serve.noise import RequestNoise, fresh_seed
from osd.serve.params import check_params
from osd.serve.prefix import BLOCK, PrefixStore
from osd.serve.processor import LogitsProcessor, processes_logits
from osd.serve.row import Outcome, Row, Submission
from osd.serve.stopping import with_special_stops
from osd.types import BASE_DOMAIN, Assignment, FinishedRecord, FinishReason, GenerationRequest

if TYPE_CHECKING:
    from osd.serve.engine import Engine

log = logging.getLogger(__name__)

WORTH_WAITING = 4 * BLOCK
"""Prompt tokens that a row ahead must be computing for one behind it to wait for them instead."""


class Lifecycle:
    """Admits, starts and ends the requests of one engine, on the engine's thread.

    Args:
        engine: The engine; its rows, cache and parts are read at every call, as they may be exchanged.
        admission: Who may enter.
        intake: Where requests wait.
        prefixes: Texts that need not be computed again.
    """

    def __init__(self, engine: Engine, admission: Admission, intake: Intake, prefixes: PrefixStore) -> None:
        self._engine = engine
        self.admission = admission
        self.intake = intake
        self.prefixes = prefixes

    def border(self) -> None:
        """Let the cancelled and the late go, before the waiting enter and the pass is made."""
        ids, waiting = self.intake.take_cancelled()
        for submission in waiting:
            self._answer_unstarted(submission, FinishReason.CANCELLED)
        for row in [row for row in self._engine.rows if row.request.request_id in ids]:
            row.cancelled = True
            self.end(row, FinishReason.CANCELLED)
        now = self._engine.clock()
        for submission in self.intake.take_expired(now):
            self._answer_unstarted(submission, FinishReason.TIMEOUT)
        for row in [row for row in self._engine.rows if row.submission.deadline <= now]:
            self.end(row, FinishReason.TIMEOUT)

    def admit(self) -> None:
        """Start the oldest waiting requests while they fit."""
        rows = self._engine.rows
        while len(rows) < self._engine.slots:
            submission = self.intake.take(
                lambda item: self.admission.fits(item.request, [row.request for row in rows])
            )
            if submission is None:
                return
            try:
                submission.request = self._completed(submission.request)
                rows.append(self._start(submission, submission.request))
            except Exception as error:
                self._answer_unstarted(submission, FinishReason.ERROR, as_typed(error, "could not start"))

    def _completed(self, request: GenerationRequest) -> GenerationRequest:
        """``request`` cut to a slot, with the stop tokens that its stop strings name."""
        engine, request = self._engine, self.admission.cut(request)
        params = with_special_stops(request.sampling, engine.tokenizer, engine.target.vocab_size)
        return request if params is request.sampling else replace(request, sampling=params)

    def _start(self, submission: Submission, request: GenerationRequest) -> Row:
        engine = self._engine
        params = request.sampling
        check_params(params, engine.target.vocab_size, engine.target.eos_token_ids)
        processor = self._processor(submission) if processes_logits(params) else None
        noise = None
        if params.temperature > 0:
            seed = fresh_seed() if params.seed is None else params.seed
            noise = RequestNoise(seed, params.choice, engine.target.vocab_size)
        shared = engine.settings.verification == "invariant"
        output = OutputStream(engine.tokenizer, params, engine.target.eos_token_ids)
        draft = DraftRow(
            request_id=request.request_id,
            domain=BASE_DOMAIN,
            tokens=list(request.prompt_ids),
            prompt_length=len(request.prompt_ids),
            temperature=params.temperature,
            noise=noise if shared or noise is None else noise.draft,
            store=request.store,
            sources=params.sources,
            noise_is_shared=shared,
        )
        row = Row(submission, -1, draft, output, self._assign(request), noise, processor)
        row.keep_evidence = request.store and engine.settings.evidence_k > 0 and engine.wants_evidence()
        row.slot = engine.cache.acquire()
        self._bind_features(row)
        return row

    def _processor(self, submission: Submission) -> LogitsProcessor:
        request, target, grammar = submission.request, self._engine.target, submission.grammar
        if grammar is None and request.sampling.response_format is not None:
            grammar = self._engine.grammars.compile(request.sampling.response_format)
        return LogitsProcessor(
            request.sampling,
            request.prompt_ids,
            target.eos_token_ids,
            target.vocab_size,
            target.device,
            grammar,
        )

    def _assign(self, request: GenerationRequest) -> Future[Assignment]:
        """The router's verdict to come; of a router that fails, the base domain."""
        try:
            return self._engine.assigner.assign(request)
        except Exception:
            log.exception("routing failed for request %s; the base domain serves it", request.request_id)
            failed: Future[Assignment] = Future()
            failed.set_result(Assignment())
            return failed

    def _bind_features(self, row: Row) -> None:
        features = self._engine.cache.features
        if features is not None:
            row.draft.features = features[row.slot]

    def ready_to_prefill(self, row: Row) -> bool:
        """Whether ``row`` computes its prompt in this step; takes over what is stored of it at the first yes.

        Where a row ahead is computing much of the same prompt (the choices of one request, a burst behind one
        system prompt), the row waits for it and reuses the result.
        """
        if row.prefix_read or not self.prefixes.blocks:
            return True
        prompt = row.draft.tokens
        found = self.prefixes.match(prompt)
        worth = len(found) * BLOCK + WORTH_WAITING
        if worth < len(prompt):
            for other in self._engine.rows:
                if other is row:
                    break
                if other.decoding or not other.request.store:
                    continue
                if other.draft.tokens[:worth] == prompt[:worth]:
                    return False
        row.cached_tokens = row.processed = self.prefixes.load(row.slot, found)
        row.prefix_read = True
        return True

    def keep_prefix(self, row: Row) -> None:
        """Store a row's committed and processed text for others, unless the request forbids it."""
        if row.request.store and row.error is None and row.processed:
            self.prefixes.keep(row.slot, row.draft.tokens[: row.processed])

    def retire(self) -> None:
        """End finished and failed rows; only now, since ending one moves others to new slots."""
        for row in [row for row in self._engine.rows if row.finish is not None]:
            assert row.finish is not None
            self.end(row, row.finish, row.error)

    def end(self, row: Row, reason: FinishReason, error: PolydraftError | None = None) -> None:
        """Free the row's slot, hand its record to whoever learns or waits."""
        engine = self._engine
        row.error = error
        row.settle_domain(engine.version_of)
        failed = error is not None or row.cancelled
        if failed:
            row.draft.store = False
        if error is None:
            self._held(row, "text", lambda: self._flush(row))
            self._held(row, "prefix", lambda: self.keep_prefix(row))
        record = row.record(reason, None if failed else self._features(row))
        drafter = engine.drafter
        if drafter is not None:
            self._held(row, "draft", lambda: drafter.finish(row.draft))
        engine.rows.remove(row)
        moved = engine.cache.release(row.slot)
        if moved is not None:
            other = next(item for item in engine.rows if item.slot == moved)
            other.slot = row.slot
            self._bind_features(other)
        if not failed and row.rounds:
            for observer in engine.observers:
                self._held(row, "observer", lambda observer=observer: observer.take(record))  # type: ignore[misc]
        self._held(row, "receiver", lambda: row.submission.on_done(Outcome(record, row.output.text, error)))

    def fail_all(self, error: Exception) -> None:
        """The last resort: end every row with ``error``."""
        shown = as_typed(error, "the step failed")
        for row in list(self._engine.rows):
            self._held(row, "row", lambda row=row: self.end(row, FinishReason.ERROR, shown))  # type: ignore[misc]

    def check(self) -> None:
        """Audit reservations and stored prefixes; raises :class:`~drafts.errors.IntegrityError`."""
        self.admission.audit([row.request for row in self._engine.rows])
        self.prefixes.check()

    def _flush(self, row: Row) -> None:
        tail = row.output.close()
        if tail:
            row.submission.on_tokens(tail, (), ())

    def _features(self, row: Row) -> torch.Tensor | None:
        features = self._engine.cache.features
        if features is None or not row.evidence:
            return None
        return features[row.slot, : len(row.draft.tokens) - 1].to("cpu", torch.float16, copy=True)

    def _answer_unstarted(
        self, submission: Submission, reason: FinishReason, error: PolydraftError | None = None
    ) -> None:
        waited = max(time.monotonic() - submission.request.arrived, 0.0)
        record = FinishedRecord(
            request=submission.request,
            domain=BASE_DOMAIN,
            assignment=Assignment(),
            output_ids=(),
            finish=reason,
            rounds=(),
            versions=(),
            evidence=None,
            features=None,
            seconds=0.0,
            routing_wait=0.0,
            first_token_seconds=waited,
            total_seconds=waited,
        )
        try:
            submission.on_done(Outcome(record, "", error))
        except Exception:
            log.exception("nobody took the answer of request %s", submission.request.request_id)

    def _held(self, row: Row, part: str, work: Callable[[], None]) -> None:
        """Do ``work`` for an ending request; what it raises is logged and stops nobody."""
        try:
            work()
        except Exception:
            log.exception("the %s of request %s failed as it ended", part, row.draft.request_id)
