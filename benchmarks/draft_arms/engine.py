"""One arm's drafts, learner and counters around the one target; requests are served one after the other.

The engine core is stepped on the calling thread: all arms share the loaded target and OpenMP's one team.
"""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from draft_arms.order import Asked
from draft_arms.plans import Plan
from osd.serve.controller import StepCosts
from osd.serve.engine import Engine as Core
from osd.serve.engine import EngineSettings
from osd.serve.row import Outcome, Submission
from osd.serve.target import TargetModel
from osd.types import Assignment, Event, GenerationRequest, SamplingParams, Tally
from router.bodies.embedded import EVIDENCE_K
from router.bodies.learning_cost import LearningCost
from router.bodies.parts import build_drafts
from router.mind.router import Router


class Routed:
    """Routes by the shared router, and adds up what this arm's requests took."""

    def __init__(self, router: Router) -> None:
        self.router = router
        self.processor_seconds = 0.0

    def assign(self, request: GenerationRequest) -> Future[Assignment]:
        """See :class:`osd.ports.Assigner`."""
        future = self.router.assign(request)
        future.add_done_callback(self._count)
        return future

    def _count(self, future: Future[Assignment]) -> None:
        self.processor_seconds += future.result().seconds


class Unrouted:
    """The base domain serves everything; nothing is embedded."""

    processor_seconds = 0.0

    def assign(self, request: GenerationRequest) -> Future[Assignment]:
        """See :class:`osd.ports.Assigner`."""
        future: Future[Assignment] = Future()
        future.set_result(Assignment())
        return future


@dataclass(frozen=True)
class Served:
    """What one arm made of one request.

    Attributes:
        asked: The request.
        block: Number of its block.
        tally: Its counters; ``seconds`` is wall time from arrival to end, learning in the gaps included.
        answer: Emitted tokens.
        domain: The domain that served it.
        most_nodes: Most nodes that one pass verified of it.
    """

    asked: Asked
    block: int
    tally: Tally
    answer: tuple[int, ...]
    domain: str
    most_nodes: int = 0


@dataclass(frozen=True)
class Ready:
    """A request as the engine takes it: prompt tokens, and what the router reads."""

    asked: Asked
    ids: tuple[int, ...]
    text: str


class DraftArm:
    """One arm.

    Args:
        plan: What it is.
        target: The target, shared by all arms.
        tokenizer: Its tokenizer.
        router: The router, frozen and shared.
        costs: What a pass costs, learned by all arms together: it is the machine's, and an arm that
            happened to believe it cheaper would propose more and look better by that alone.
        max_length: Longest prompt and answer together.
        max_tokens: Longest answer.
        seed: Of the learner.
    """

    def __init__(
        self,
        plan: Plan,
        target: TargetModel,
        tokenizer: Any,
        router: Router,
        costs: StepCosts,
        max_length: int,
        max_tokens: int,
        seed: int,
    ) -> None:
        self.plan = plan
        self.params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        self.events: list[Event] = []
        self.parts = build_drafts(
            plan.config,
            target,
            tokenizer,
            sources=plan.sources,
            learn=True,
            versions_dir=None,
            on_event=self.events.append,
            seed=seed,
            add_own=False,
        )
        routing = Routed(router) if plan.routed else Unrouted()
        scheduler = self.parts.scheduler
        self.core = Core(
            target=target,
            tokenizer=tokenizer,
            assigner=routing,
            costs=costs,
            slots=1,
            max_length=max_length,
            drafter=self.parts.mixture,
            on_event=self.events.append,
            observers=[] if scheduler is None else [scheduler],
            worker=scheduler,
            wants_evidence=lambda: scheduler is not None and scheduler.wants_records,
            settings=EngineSettings(
                prefill_chunk=plan.config.engine.prefill_chunk,
                max_depth=plan.config.drafts.max_depth,
                evidence_k=0 if scheduler is None else EVIDENCE_K,
                prefix_cache_tokens=plan.config.engine.prefix_cache_tokens,
            ),
        )
        self.routing = routing
        # Every learning arm has the same budget to train with: embedding is not taken out of it here, but
        # counts in the arm's seconds.
        self.costs = LearningCost(self.core, self.parts, Unrouted())

    def serve(self, ready: Ready, block: int) -> Served:
        """Answer one request; it teaches after it has been counted."""
        outcomes: list[Outcome] = []
        begin = time.perf_counter()
        request = GenerationRequest(
            str(ready.asked.index), ready.ids, self.params, ready.text, arrived=time.monotonic()
        )
        self.core.intake.put(Submission(request, lambda *_: None, outcomes.append))
        while not outcomes:
            self.core.step()
            self.costs.charge()
        record = outcomes[0].record
        if outcomes[0].error is not None:
            raise outcomes[0].error
        tally = Tally(requests=1, seconds=time.perf_counter() - begin)
        for item in record.rounds:
            tally.add_round(item)
        most = max((item.proposed for item in record.rounds), default=0)
        return Served(ready.asked, block, tally, record.output_ids, record.domain, most)

    def learned(self) -> dict[str, Any]:
        """What was learned, and how large memory and experts are."""
        figures = self.costs.as_dict()
        names = ("updates", "published", "rolled_back", "rejected", "scored", "share_of_busy_time")
        found: dict[str, Any] = {name: figures[name] for name in names if name in figures}
        found["seconds_by_part"] = {**figures["seconds_by_part"], "routing": self.routing.processor_seconds}
        described = [self.parts.mixture.describe(domain) for domain in self.domains]
        found["memory_bytes"] = sum(row.get("ngram", {}).get("bytes", 0) for row in described)
        found["expert_bytes"] = sum(row.get("eagle", {}).get("expert_bytes", 0) for row in described)
        return found

    @property
    def domains(self) -> list[str]:
        """Domains that it serves, the base domain first."""
        return ["base", *(domain.name for domain in self.plan.config.domains)]
