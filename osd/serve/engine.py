"""The engine: one thread owns all model state and turns requests into tokens, step by step."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from drafts.errors import DraftDistributionError, PolydraftError
from drafts.proposal import EMPTY, Price, Proposal
from osd.ports import Assigner, Drafter, Observer, Worker
from osd.serve import rejection
from osd.serve.admission import Admission
from osd.serve.audit import check_books
from osd.serve.border import Calls, adopt_versions, feed_back, work_in_gap
from osd.serve.controller import StepCosts, why_silent
from osd.serve.evidence import keep_evidence
from osd.serve.grammar import GrammarCompiler
from osd.serve.intake import Intake
from osd.serve.lifecycle import Lifecycle
from osd.serve.logprobs import token_logprobs
from osd.serve.prefix import PrefixStore
from osd.serve.recovery import fail_row, pruned, run_pass, verify_each
from osd.serve.row import Row
from osd.serve.target import PassOutput, PassRow, TargetModel
from osd.serve.verify import Verdict, verify_batch
from osd.types import BASE_DOMAIN, Event, Round

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
        verification: ``invariant`` or ``rejection``, for sampled requests.
        prefix_cache_tokens: Tokens whose keys are kept for prompts that begin alike; 0 keeps none. Read once.
        max_tokens_in_flight: Most tokens that all running rows may reserve; ``None`` is slots times
            ``max_length``. Read once.
        request_timeout: Seconds from arrival after which a request that sets no limit ends. Read once.
    """

    prefill_chunk: int = 256
    max_depth: int = 8
    fixed_k: int | None = None
    evidence_k: int = 0
    verification: Literal["invariant", "rejection"] = "invariant"
    prefix_cache_tokens: int = 0
    max_tokens_in_flight: int | None = None
    request_timeout: float | None = None


@dataclass
class Engine:
    """Continuous batching over a slot cache with routed, lossless speculation.

    A step is: let go, admit, propose, verify, commit, feed back, learn in the gap. Only the thread that calls
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
        clock: Seconds, on the scale of a request's ``arrived``; deadlines are read off it.
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
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        admission = Admission(self.slots, self.max_length, self.settings.max_tokens_in_flight)
        self.intake = Intake(self.queue, admission.check, self.settings.request_timeout)
        target = self.target
        self.grammars = GrammarCompiler(self.tokenizer, target.vocab_size, target.eos_token_ids)
        self._refused: set[str] = set()
        self.rows: list[Row] = []
        self.evidence_seconds = 0.0
        self._calls = Calls()
        self.steps = 0
        self.busy_seconds = 0.0
        keep_features = self.drafter is not None and self.drafter.needs_features
        self.cache = self.target.make_cache(self.slots, self.max_length, keep_features)
        self.prefixes = PrefixStore(self.cache, self.settings.prefix_cache_tokens)
        self.requests = Lifecycle(self, admission, self.intake, self.prefixes)
        self.target.prepare(self.cache)

    def call(self, work: Callable[[], Any]) -> Future[Any]:
        """Run ``work`` on the engine's thread at the next step border; safe from any thread."""
        future = self._calls.put(work)
        self.intake.wake()
        return future

    def step(self) -> bool:
        """One round for every running row; returns whether there was anything to do."""
        begin = time.perf_counter()
        self._calls.run()
        self.requests.border()
        adopt_versions(self.drafter, self.rows, self.on_event)
        self.requests.admit()
        if not self.rows:
            return self._fill_gap(0.0, idle=True)
        try:
            self._round(begin)
        except Exception as error:
            log.exception("step failed; its requests are answered with an error")
            self.on_event(Event("step_failed", BASE_DOMAIN, repr(error), {"rows": len(self.rows)}))
            self.requests.fail_all(error)
        busy = time.perf_counter() - begin
        self.busy_seconds += busy
        self.steps += 1
        self._fill_gap(busy, idle=False)
        return True

    def _fill_gap(self, busy: float, idle: bool) -> bool:
        self.worker, worked = work_in_gap(self.worker, busy, idle, self.on_event)
        return worked

    def _round(self, begin: float) -> None:
        decoding = [row for row in self.rows if row.decoding]
        proposals = self._propose(decoding)
        batch, verifying = self._plan(decoding, proposals)
        started = time.perf_counter()
        tokens = sum(len(item.tokens) for _, item in batch)
        output, verifying = run_pass(self.target, self.cache, batch, verifying, self.on_event)
        verdicts = verify_each(self._verify, batch, output, verifying)
        decoded = sum(len(item.tokens) for _, item in batch[: len(decoding)])
        elapsed = (time.perf_counter() - started) * 1e3
        self.costs.record(len(decoding), decoded, elapsed, tokens - decoded)
        self._commit(batch, output, verifying, verdicts)
        feed_back(self.drafter, decoding, proposals, verdicts)
        self._share_time(batch, tokens, time.perf_counter() - begin)
        self.requests.retire()

    def _propose(self, decoding: list[Row]) -> list[Proposal]:
        for row in self.rows:
            row.settle_domain(self.version_of)
        if self.drafter is None or not decoding:
            return [EMPTY] * len(decoding)
        limits = [self._limit(row) for row in decoding]
        price = self._price(decoding)
        try:
            found = self.drafter.propose([row.draft for row in decoding], limits, price)
            size = self.target.vocab_size
            proposals = [
                p if all(0 <= t < size for t in p.tokens) else EMPTY
                for p, _ in zip(found, decoding, strict=True)
            ]
        except Exception:
            log.exception("drafting failed; this step decodes plainly")
            return [EMPTY] * len(decoding)
        if self.settings.verification == "rejection":
            proposals = [self._told(row, p) for row, p in zip(decoding, proposals, strict=True)]
        proposals = [pruned(row, p) for row, p in zip(decoding, proposals, strict=True)]
        room = [self.max_length - len(row.draft.tokens) for row in decoding]
        return self._fitted(
            [proposal.first(max(count, 0)) for proposal, count in zip(proposals, room, strict=True)]
        )

    def _fitted(self, proposals: list[Proposal]) -> list[Proposal]:
        """Cut to what one pass of the target holds; the later rows of a step that is too wide give way."""
        if self.target.most_tokens is None:
            return proposals
        left = self.target.most_tokens - len(proposals)
        fitted: list[Proposal] = []
        for proposal in proposals:
            fitted.append(proposal.first(max(left, 0)))
            left -= len(proposal.tokens)
        return fitted

    def _told(self, row: Row, proposal: Proposal) -> Proposal:
        """The proposal, or none where rejection sampling could not verify it."""
        if row.draft.temperature > 0:
            try:
                proposal.check_distributions()
            except DraftDistributionError as error:
                if error.source not in self._refused:
                    self._refused.add(error.source)
                    log.error("refused, here and from now on: %s", error)
                return EMPTY
        return proposal

    def _price(self, decoding: list[Row]) -> Price:
        """What one more token costs in the coming pass, prompts read in it included."""
        prompts = sum(row.draft.prompt_length - row.processed for row in self.rows if not row.decoding)
        return Price(
            rows=len(decoding),
            step_ms=self.costs.price(len(decoding), min(prompts, self.settings.prefill_chunk)),
            fixed_k=self.settings.fixed_k,
            silenced=[
                why_silent(row.request.sampling.k, row.remaining, self.max_length - len(row.draft.tokens))
                for row in decoding
            ],
            slowdown=self.costs.drift,
            measured_ms=lambda: self.costs.last_ms,
        )

    def version_of(self, domain: str) -> int:
        """The expert version that serves ``domain`` now."""
        return 0 if self.drafter is None else self.drafter.version(domain)

    def _limit(self, row: Row) -> int:
        """Deepest proposal: room is left for the bonus token in output and cache."""
        if row.draft.sources == ():
            return 0
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
        if self.target.most_tokens is not None:
            budget = min(budget, self.target.most_tokens - sum(len(item.tokens) for _, item in batch))
        for row in self.rows:
            if row.decoding or budget <= 0 or not self.requests.ready_to_prefill(row):
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
        judge = rejection.verify_batch if self.settings.verification == "rejection" else verify_batch
        results = judge(
            output.logits,
            [output.offsets[index] for index in verifying],
            list(verifying.values()),
            [row.request.sampling for row in rows],
            [row.noise for row in rows],
            [row.draft.output_length for row in rows],
            processors=[row.processor for row in rows],
        )
        verdicts: dict[int, Verdict] = {}
        for index, row, result in zip(verifying, rows, results, strict=True):
            if isinstance(result, PolydraftError):
                fail_row(row, result, "verification failed")
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
            first = output.offsets[index]
            places = [first, *(first + 1 + node for node in path)]
            try:
                kept = self._emit(row, verdict, verifying[index], output.logits, places)
            except Exception as error:
                fail_row(row, error)
                continue
            if item.parents is None:
                row.processed += len(item.tokens) - len(verifying[index]) + len(path)
                self.cache.commit(row.slot, row.processed)
            else:
                self.cache.commit_path(row.slot, item.start, [0, *(node + 1 for node in path)])
                row.processed += 1 + len(path)
            if len(row.rounds) == 1:
                self.requests.keep_prefix(row)
            kept_logits.append((row, places[:kept]))
        self._keep_evidence(output, kept_logits)

    def _emit(
        self, row: Row, verdict: Verdict, proposal: Proposal, logits: torch.Tensor, places: Sequence[int]
    ) -> int:
        """Commit a verdict's tokens to the row's text; returns how many were kept before a stop.

        ``places`` are the rows of ``logits`` that chose the tokens.
        """
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
        asked = row.request.sampling.logprobs
        logprobs = () if asked is None else token_logprobs(logits, places[: push.kept], tokens, asked)
        row.logprobs.extend(logprobs)
        if push.delta or tokens:
            row.submission.on_tokens(push.delta, tuple(tokens), logprobs)
        return push.kept

    def _keep_evidence(self, output: PassOutput, kept: list[tuple[Row, list[int]]]) -> None:
        if self.settings.evidence_k:
            begin = time.perf_counter()
            keep_evidence(output.logits, kept, self.settings.evidence_k)
            self.evidence_seconds += time.perf_counter() - begin

    def _share_time(self, batch: list[tuple[Row, PassRow]], tokens: int, seconds: float) -> None:
        for row, item in batch:
            row.seconds += seconds * len(item.tokens) / tokens

    def check(self) -> None:
        """Audit the engine's books; raises :class:`IntegrityError` with both sides of what differs."""
        check_books(self.cache, self.rows)
        self.requests.check()
