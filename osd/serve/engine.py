"""The engine: one thread owns all model state and turns requests into tokens, step by step."""

from __future__ import annotations

import contextlib
import logging
import queue
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch

from drafts.errors import IntegrityError, PolydraftError
from drafts.kinds.base import DraftRow
from drafts.proposal import EMPTY, Price, Proposal
from osd.ports import Assigner, Drafter, Observer, Worker
from osd.serve.audit import check_books
from osd.serve.controller import StepCosts
from osd.serve.detokenize import OutputStream
from osd.serve.evidence import keep_evidence
from osd.serve.intake import Intake
from osd.serve.noise import RequestNoise, fresh_seed
from osd.serve.row import Outcome, Row, Submission
from osd.serve.target import PassOutput, PassRow, TargetModel
from osd.serve.verify import Verdict, verify_batch
from osd.types import BASE_DOMAIN, Event, FinishReason, GenerationRequest, Round

log = logging.getLogger(__name__)

IDLE_WAIT = 0.05
"""Seconds the idle engine sleeps before it looks again for background work."""


@dataclass
class EngineSettings:
    """The knobs of the step loop.

    Attributes:
        prefill_chunk: Most prompt tokens processed in one step, so that decoding rows do not stall.
        max_depth: Deepest proposal, in tokens.
        fixed_k: Fixed speculation length; ``None`` lets goodput decide.
        evidence_k: Target probabilities kept per emitted position; 0 keeps none.
    """

    prefill_chunk: int = 256
    max_depth: int = 8
    fixed_k: int | None = None
    evidence_k: int = 0


@dataclass
class Engine:
    """Continuous batching over a slot cache with routed, lossless speculation.

    A step is: admit, propose, verify, commit, feed back, learn in the gap. Only the thread that calls
    :meth:`step` may touch model state; other threads use :attr:`intake`.

    Args:
        target: The target model.
        tokenizer: Its tokenizer, for incremental text.
        assigner: Gives every request its domain while the target prefills.
        costs: Cost of a target pass by token count.
        drafter: Proposes; ``None`` decodes plainly.
        observers: Take finished requests.
        worker: Background work done between steps.
        on_event: Receives events (swaps, failures).
        wants_evidence: Asked at admission whether learning has room for one more request; where it has
            none, nothing is kept of it.
        slots: Rows that run at once; ``max_length`` is the longest prompt plus output of a row.
    """

    target: TargetModel
    tokenizer: object
    assigner: Assigner
    costs: StepCosts
    slots: int
    max_length: int
    queue: int = 256
    drafter: Drafter | None = None
    observers: Sequence[Observer] = ()
    worker: Worker | None = None
    on_event: Callable[[Event], None] = lambda event: None
    wants_evidence: Callable[[], bool] = lambda: True
    settings: EngineSettings = field(default_factory=EngineSettings)

    def __post_init__(self) -> None:
        self.intake = Intake(self.queue)
        self.rows: list[Row] = []
        self.evidence_seconds = 0.0
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self.steps = 0
        self.busy_seconds = 0.0
        keep_features = self.drafter is not None and self.drafter.needs_features
        self.cache = self.target.make_cache(self.slots, self.max_length, keep_features)
        self.target.prepare(self.cache)

    def call(self, work: Callable[[], Any]) -> Future[Any]:
        """Run ``work`` on the engine's thread at the next step border; safe from any thread."""
        future: Future[Any] = Future()
        self._calls.put((work, future))
        self.intake.wake()
        return future

    def step(self) -> bool:
        """One round for every running row; returns whether there was anything to do."""
        begin = time.perf_counter()
        self._run_calls()
        self._cancel()
        self._swap()
        self._admit()
        if not self.rows:
            return self.worker.work(0.0, idle=True) if self.worker is not None else False
        try:
            self._round(begin)
        except Exception as error:
            log.exception("step failed; its requests are answered with an error")
            self._fail_all(error)
        busy = time.perf_counter() - begin
        self.busy_seconds += busy
        self.steps += 1
        if self.worker is not None:
            self.worker.work(busy, idle=False)
        return True

    def _round(self, begin: float) -> None:
        decoding = [row for row in self.rows if row.decoding]
        proposals = self._propose(decoding)
        batch, verifying = self._plan(decoding, proposals)
        started = time.perf_counter()
        output = self.target.forward(self.cache, [item for _, item in batch])
        tokens = sum(len(item.tokens) for _, item in batch)
        self.costs.record(tokens, (time.perf_counter() - started) * 1e3)
        verdicts = self._verify(batch, output, verifying)
        self._commit(batch, output, verifying, verdicts)
        self._observe(decoding, proposals, verdicts)
        self._share_time(batch, tokens, time.perf_counter() - begin)
        self._retire()

    def _run_calls(self) -> None:
        while not self._calls.empty():
            work, future = self._calls.get()
            try:
                future.set_result(work())
            except Exception as error:
                future.set_exception(error)

    def _cancel(self) -> None:
        ids, waiting = self.intake.take_cancelled()
        for submission in waiting:
            self._answer_unstarted(submission, FinishReason.CANCELLED, None)
        for row in [row for row in self.rows if row.request.request_id in ids]:
            row.cancelled = True
            self._end(row, FinishReason.CANCELLED)

    def _swap(self) -> None:
        if self.drafter is None:
            return
        for swap in self.drafter.swap():
            numbers = {**swap.numbers, "old": swap.old, "new": swap.new}
            self.on_event(Event("swap", swap.domain, swap.reason, numbers))
            for row in self.rows:
                if row.draft.domain == swap.domain and row.decoding:
                    row.note_version(swap.new)

    def _admit(self) -> None:
        while len(self.rows) < self.slots:
            submission = self.intake.take()
            if submission is None:
                return
            request = submission.request
            try:
                self.rows.append(self._start(submission, request))
            except PolydraftError as error:
                self._answer_unstarted(submission, FinishReason.ERROR, error)

    def _start(self, submission: Submission, request: GenerationRequest) -> Row:
        params = request.sampling
        noise = None
        if params.temperature > 0:
            seed = fresh_seed() if params.seed is None else params.seed
            noise = RequestNoise(seed, vocab_size=self.target.vocab_size)
        output = OutputStream(self.tokenizer, params, self.target.eos_token_ids)
        slot = self.cache.acquire()
        draft = DraftRow(
            request_id=request.request_id,
            domain=BASE_DOMAIN,
            tokens=list(request.prompt_ids),
            prompt_length=len(request.prompt_ids),
            temperature=params.temperature,
            noise=noise,
            store=request.store,
        )
        row = Row(submission, slot, draft, output, self.assigner.assign(request), noise)
        row.keep_evidence = request.store and self.settings.evidence_k > 0 and self.wants_evidence()
        self._bind_features(row)
        return row

    def _bind_features(self, row: Row) -> None:
        if self.cache.features is not None:
            row.draft.features = self.cache.features[row.slot]

    def _propose(self, decoding: list[Row]) -> list[Proposal]:
        for row in self.rows:
            row.settle_domain(self._version)
        if self.drafter is None or not decoding:
            return [EMPTY] * len(decoding)
        limits = [self._limit(row) for row in decoding]
        price = Price(len(decoding), self.costs.ms, self.settings.fixed_k)
        try:
            proposals = self.drafter.propose([row.draft for row in decoding], limits, price)
        except Exception:
            log.exception("drafting failed; this step decodes plainly")
            return [EMPTY] * len(decoding)
        size = self.target.vocab_size
        proposals = [p if all(0 <= t < size for t in p.tokens) else EMPTY for p in proposals]
        room = [self.max_length - len(row.draft.tokens) for row in decoding]
        return [proposal.first(max(count, 0)) for proposal, count in zip(proposals, room, strict=True)]

    def _version(self, domain: str) -> int:
        return 0 if self.drafter is None else self.drafter.version(domain)

    def _limit(self, row: Row) -> int:
        """Deepest proposal: room is left for the bonus token in output and cache."""
        cap = row.request.sampling.k
        depth = self.settings.max_depth if cap is None else min(cap, self.settings.max_depth)
        return max(min(depth, row.remaining - 1, self.max_length - len(row.draft.tokens)), 0)

    def _plan(
        self, decoding: list[Row], proposals: list[Proposal]
    ) -> tuple[list[tuple[Row, PassRow]], dict[int, Proposal]]:
        """The rows of this pass, and the proposal of every batch index whose logits are verified."""
        batch: list[tuple[Row, PassRow]] = []
        verifying: dict[int, Proposal] = {}
        for row, proposal in zip(decoding, proposals, strict=True):
            parents = None if proposal.is_chain else proposal.parents
            verifying[len(batch)] = proposal
            tokens = [row.draft.tokens[-1], *proposal.tokens]
            batch.append((row, PassRow(row.slot, row.processed, tokens, parents)))
        budget = self.settings.prefill_chunk
        for row in self.rows:
            if row.decoding or budget <= 0:
                continue
            chunk = row.draft.tokens[row.processed : row.processed + budget]
            budget -= len(chunk)
            complete = row.processed + len(chunk) == row.draft.prompt_length
            if complete:
                verifying[len(batch)] = EMPTY
            logits_from = len(chunk) - 1 if complete else len(chunk)
            batch.append((row, PassRow(row.slot, row.processed, chunk, None, logits_from)))
        return batch, verifying

    def _verify(
        self,
        batch: list[tuple[Row, PassRow]],
        output: PassOutput,
        verifying: dict[int, Proposal],
    ) -> dict[int, Verdict]:
        rows = [batch[index][0] for index in verifying]
        results = verify_batch(
            output.logits,
            [output.offsets[index] for index in verifying],
            list(verifying.values()),
            [row.request.sampling for row in rows],
            [row.noise for row in rows],
            [row.draft.output_length for row in rows],
        )
        verdicts: dict[int, Verdict] = {}
        for index, row, result in zip(verifying, rows, results, strict=True):
            if isinstance(result, PolydraftError):
                row.finish, row.error = FinishReason.ERROR, result
            else:
                verdicts[index] = result
        return verdicts

    def _commit(
        self,
        batch: list[tuple[Row, PassRow]],
        output: PassOutput,
        verifying: dict[int, Proposal],
        verdicts: dict[int, Verdict],
    ) -> None:
        kept_logits: list[tuple[Row, list[int]]] = []
        for index, (row, item) in enumerate(batch):
            if row.error is not None:
                continue
            if index not in verifying:
                row.processed += len(item.tokens)
                self.cache.commit(row.slot, row.processed)
                continue
            verdict = verdicts[index]
            path = list(verdict.path)
            kept = self._emit(row, verdict, verifying[index])
            if item.parents is None:
                row.processed += len(item.tokens) - len(verifying[index]) + len(path)
                self.cache.commit(row.slot, row.processed)
            else:
                self.cache.commit_path(row.slot, item.start, [0, *(node + 1 for node in path)])
                row.processed += 1 + len(path)
            first = output.offsets[index]
            kept_logits.append((row, [first, *(first + 1 + node for node in path)][:kept]))
        self._keep_evidence(output, kept_logits)

    def _emit(self, row: Row, verdict: Verdict, proposal: Proposal) -> int:
        """Commit a verdict's tokens to the row's text; returns how many were kept before a stop."""
        now = time.monotonic()
        first = not row.decoding
        if first:
            row.first_token = row.prefilled_at = now
        push = row.output.push(verdict.emitted)
        tokens = verdict.emitted[: push.kept]
        accepted = min(verdict.accepted, push.kept)
        cut = push.kept < len(verdict.emitted)
        row.draft.tokens.extend(tokens)
        row.rounds.append(
            Round(
                proposed=len(proposal),
                accepted=accepted,
                tested=accepted if cut else verdict.tested,
                emitted=len(tokens),
                source="prefill" if first else (proposal.sources[0] if len(proposal) else "none"),
                version=row.versions[-1] if row.versions else 0,
            )
        )
        row.finish = push.finish
        if push.delta or tokens:
            row.submission.on_tokens(push.delta, tuple(tokens))
        return push.kept

    def _keep_evidence(self, output: PassOutput, kept: list[tuple[Row, list[int]]]) -> None:
        if self.settings.evidence_k:
            begin = time.perf_counter()
            keep_evidence(output.logits, kept, self.settings.evidence_k)
            self.evidence_seconds += time.perf_counter() - begin

    def _observe(self, decoding: list[Row], proposals: list[Proposal], verdicts: dict[int, Verdict]) -> None:
        """Feed back only the tokens that were kept, for every row that is still running."""
        if self.drafter is None or not decoding:
            return
        rows: list[DraftRow] = []
        emitted: list[Sequence[int]] = []
        for index, row in enumerate(decoding):
            rows.append(row.draft)
            count = row.rounds[-1].emitted if index in verdicts else 0
            emitted.append(row.draft.tokens[len(row.draft.tokens) - count :] if count else ())
        self.drafter.observe(rows, proposals, emitted)

    def _share_time(self, batch: list[tuple[Row, PassRow]], tokens: int, seconds: float) -> None:
        for row, item in batch:
            row.seconds += seconds * len(item.tokens) / tokens

    def _retire(self) -> None:
        """End finished and failed rows; only now, since ending one moves others to new slots."""
        for row in [row for row in self.rows if row.finish is not None]:
            assert row.finish is not None
            self._end(row, row.finish, row.error)

    def _end(self, row: Row, reason: FinishReason, error: PolydraftError | None = None) -> None:
        """Free the row's slot, hand its record to whoever learns or waits."""
        row.settle_domain(self._version)
        failed = error is not None or row.cancelled
        if failed:
            row.draft.store = False
        tail = row.output.close() if error is None else ""
        if tail:
            row.submission.on_tokens(tail, ())
        record = row.record(reason, None if failed else self._features(row))
        if self.drafter is not None:
            try:
                self.drafter.finish(row.draft)
            except Exception:
                log.exception(
                    "a draft failed to learn from request %s; its answer stands", row.draft.request_id
                )
        self.rows.remove(row)
        moved = self.cache.release(row.slot)
        if moved is not None:
            other = next(item for item in self.rows if item.slot == moved)
            other.slot = row.slot
            self._bind_features(other)
        if not failed:
            for observer in self.observers:
                observer.take(record)
        row.submission.on_done(Outcome(record, row.output.text, error))

    def _features(self, row: Row) -> torch.Tensor | None:
        if self.cache.features is None or not row.evidence:
            return None
        return self.cache.features[row.slot, : len(row.draft.tokens) - 1].to("cpu", torch.float16, copy=True)

    def _answer_unstarted(
        self, submission: Submission, reason: FinishReason, error: PolydraftError | None
    ) -> None:
        request = submission.request
        row = Row(
            submission,
            -1,
            DraftRow(request.request_id, BASE_DOMAIN, list(request.prompt_ids), len(request.prompt_ids)),
            OutputStream(self.tokenizer, request.sampling, self.target.eos_token_ids),
            self.assigner.assign(request),
        )
        submission.on_done(Outcome(row.record(reason, None), "", error))

    def _fail_all(self, error: Exception) -> None:
        shown = error if isinstance(error, PolydraftError) else PolydraftError(f"the step failed: {error!r}")
        self.on_event(Event("step_failed", BASE_DOMAIN, str(shown)))
        for row in list(self.rows):
            with contextlib.suppress(IntegrityError):
                self._end(row, FinishReason.ERROR, shown)

    def check(self) -> None:
        """Audit the engine's books; raises :class:`IntegrityError` with both sides of what differs."""
        check_books(self.cache, self.rows)
