"""The embedded engine: target, drafts, router and learner of one deployment in this process."""

from __future__ import annotations

import itertools
import logging
import threading
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch

from drafts.config import ModelConfig
from drafts.errors import InvalidValueError, UnknownNameError
from drafts.kinds import names as kind_names
from osd.ports import Observer
from osd.serve.controller import StepCosts
from osd.serve.engine import Engine as Core
from osd.serve.engine import EngineSettings
from osd.serve.params import check_params
from osd.serve.row import Submission
from osd.serve.target import TargetModel
from osd.types import Event, GenerationRequest
from router.bodies.api import Completion, EngineOptions, Handle, Message
from router.bodies.buffers import DomainBuffers
from router.bodies.domains import DomainLife
from router.bodies.handle import RequestHandle
from router.bodies.learning_cost import LearningCost
from router.bodies.loop import EngineLoop
from router.bodies.parts import build_drafts
from router.bodies.prompts import PromptBuilder
from router.bodies.sampling import sampling_params
from router.bodies.state import StateKeeper
from router.bodies.target import configured_target, trunk_layers
from router.bodies.token_text import TokenBytes
from router.bodies.versions import DomainVersions
from router.config import PolydraftConfig, load_config
from router.mind.birth import Birth
from router.mind.router import Router
from router.mind.stats import Stats

log = logging.getLogger(__name__)
T = TypeVar("T")

COST_COUNTS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64)
"""Token counts at which the cost of a target pass is measured at load."""

EVIDENCE_K = 32
"""Target probabilities kept per emitted position for distillation."""

STUCK_SECONDS = 120.0
"""A step that takes longer than this means the engine is not ready any more."""


class Engine:
    """Serves requests with routed drafts that learn; implements ``router.bodies.api.ServingEngine``.

    Use :meth:`from_config`, and the engine as a context manager so that its state is saved::

        with Engine.from_config("configs/demo.yaml") as engine:
            print(engine.generate("What is 6 times 7?", max_tokens=32).text)

    Args:
        config: The deployment.
        target: A loaded target, with its tokenizer.
        tokenizer: The target's tokenizer.
        options: Overrides for this run.
        thread: The one thread that computes; the one this is called on, where given.
    """

    def __init__(
        self,
        config: PolydraftConfig,
        target: TargetModel,
        tokenizer: Any,
        options: EngineOptions | None = None,
        thread: ThreadPoolExecutor | None = None,
    ) -> None:
        options = options or EngineOptions()
        self.config = config
        self.options = options
        self.target = target
        self.tokenizer = tokenizer
        self._ids = itertools.count()
        self._closed = threading.Event()
        state_dir = self._state_dir()
        self.stats_of = Stats()
        self.state = StateKeeper(state_dir, config.state)
        seed = config.seed if options.seed is None else options.seed
        self.parts = build_drafts(
            config,
            target,
            tokenizer,
            sources=self._sources(options.sources),
            learn=self._may_learn,
            versions_dir=None if state_dir is None else state_dir / "versions",
            on_event=self._on_event,
            seed=seed,
            add_own=options.sources is None,
        )
        self.parts.mixture.forced_nodes = self._forced_nodes(options.nodes)
        self.router = Router.from_config(
            config.router,
            config.domains,
            learn=self._may_learn,
            on_birth=self._on_birth,
            on_event=self._on_event,
        )
        limit = min(config.engine.max_length, target.max_positions)
        self._prompts = PromptBuilder(tokenizer, limit)
        self._token_bytes = TokenBytes(tokenizer)
        self.core = Core(
            target=target,
            tokenizer=tokenizer,
            assigner=self.router,
            costs=StepCosts(target.measure_costs(COST_COUNTS)),
            slots=options.slots or config.engine.slots,
            max_length=limit,
            queue=config.engine.queue,
            drafter=self.parts.mixture,
            on_event=self._on_event,
            settings=EngineSettings(
                prefill_chunk=config.engine.prefill_chunk,
                max_depth=config.drafts.max_depth,
                verification=config.engine.verification,
                prefix_cache_tokens=config.engine.prefix_cache_tokens,
                max_tokens_in_flight=config.engine.max_tokens_in_flight,
                request_timeout=config.engine.request_timeout,
            ),
        )
        self.costs = LearningCost(self.core, self.parts, self.router)
        self.life = DomainLife(self.core, self.parts, self.router)
        self.versions = DomainVersions(self.parts.registry, self.parts.checks(), self._on_event)
        self.buffers = DomainBuffers(
            self.router.names,
            self.parts.scheduler,
            self.parts.ngram,
            on_engine=lambda work: self.core.call(work).result(),
            rewrite=lambda domain: self.state.rewrite(self, domain),
            on_event=self._on_event,
        )
        self.state.restore(self)
        self._apply_mode(self._sources(options.sources), options.learn, self._fixed_k(options.k))
        self._loop = EngineLoop(self.core, self.costs.charge)
        self._loop.start(thread or compute_thread())
        self.state.start(self)

    @classmethod
    def from_config(
        cls, config: str | Path | PolydraftConfig, options: EngineOptions | None = None
    ) -> Engine:
        """Load target, drafts and state of a deployment and start serving.

        Args:
            config: A config file, the name of a packaged one (``demo``), or a loaded config.
            options: Overrides for this run.

        Raises:
            ConfigError: The file is not a valid config.
            InvalidValueError: A model that cannot be served.
            CheckpointError: Weights that cannot be used.
        """
        loaded = config if isinstance(config, PolydraftConfig) else load_config(config)
        thread = compute_thread()

        def load() -> Engine:
            if loaded.engine.threads is not None:
                torch.set_num_threads(loaded.engine.threads)
            target, tokenizer = configured_target(loaded, trunk_layers(loaded))
            return cls(loaded, target, tokenizer, options, thread)

        try:
            return thread.submit(load).result()
        except BaseException:
            thread.shutdown(wait=False)
            raise

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def model_name(self) -> str:
        """Name of the target model."""
        return self.target.name

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""
        return self.target.eos_token_ids

    @property
    def max_length(self) -> int:
        """Most tokens of prompt and answer together."""
        return self.core.max_length

    @property
    def ready(self) -> bool:
        """Whether the engine serves and its loop is not stuck."""
        return (
            not self._closed.is_set() and self._loop.alive and self._loop.seconds_since_beat < STUCK_SECONDS
        )

    def prompt_ids(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        template: bool = True,
    ) -> tuple[int, ...]:
        """Token ids of a prompt exactly as :meth:`submit` makes them."""
        return self._prompts.build(prompt, messages, template)[0]

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token, see :class:`router.bodies.token_text.TokenBytes`."""
        return self._token_bytes(token_id)

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Tokens that an answer's text leaves out."""
        return self._token_bytes.special

    def submit(
        self,
        prompt: str | Sequence[int] | None = None,
        *,
        messages: Sequence[Message] | None = None,
        domain: str | None = None,
        store: bool = True,
        request_id: str | None = None,
        template: bool = True,
        **sampling: Any,
    ) -> Handle:
        """Queue one request; see :meth:`router.bodies.api.ServingEngine.submit`.

        ``max_tokens`` beyond what the slot can hold is cut to what fits, and the answer then ends with
        ``finish_reason`` ``length``.
        """
        params = sampling_params(sampling)
        check_params(params, self.target.vocab_size, self.target.eos_token_ids)
        for name in params.sources or ():
            if name not in self.parts.mixture.sources:
                raise UnknownNameError("sources", name, list(self.parts.mixture.sources))
        if domain is not None:
            self.router.check_domain(domain)
        ids, text = self._prompts.build(prompt, messages, template)
        request = GenerationRequest(
            request_id=request_id or f"{next(self._ids)}-{uuid.uuid4().hex[:8]}",
            prompt_ids=ids,
            sampling=params,
            routing_text=text,
            domain=domain,
            store=store,
        )
        wanted = params.response_format
        grammar = None if wanted is None else self.core.grammars.compile(wanted)
        request = self.core.requests.admission.cut(request)
        handle = RequestHandle(request.request_id, self.core.intake.cancel)
        self.core.intake.put(Submission(request, handle.push, handle.finish, grammar))
        return handle

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[Message]],
        **sampling: Any,
    ) -> Completion | list[Completion]:
        """Answer one prompt, or several at once; results in the order of the prompts.

        Args:
            prompts: A user message, a list of them, or a list of conversations.
            sampling: Fields of :class:`osd.types.SamplingParams`, and those of :meth:`submit`.

        Raises:
            PolydraftError: The first request that failed.
        """
        if isinstance(prompts, str):
            return self.submit(prompts, **sampling).result()
        handles = []
        for item in prompts:
            if isinstance(item, str):
                handles.append(self.submit(item, **sampling))
            else:
                handles.append(self.submit(messages=item, **sampling))
        return [handle.result() for handle in handles]

    def reference(self) -> Any:
        """The plain Hugging Face model of the target (same weights), for ``model.generate``."""
        return self.target.reference

    def compute(self, work: Callable[[], T]) -> T:
        """Run ``work`` on the thread that owns the model, between two steps, and wait for it.

        OpenMP keeps a team of threads per calling thread, and a second team costs both half their
        speed; so whatever else runs the model (a reference, a check) runs here.
        """
        result: T = self.core.call(work).result()
        return result

    def set_mode(self, *, sources: tuple[str, ...] | None, learn: bool, k: int | None) -> None:
        """Switch drafts and learning at a step border, no request running; stored prefixes are forgotten.

        Args:
            sources: Sources to use of those built, ``None`` for all, ``()`` for plain decoding.
            learn: Whether memories, experts, router and statistics take what is served.
                Without, drafts are frozen, but the mixture goes on adapting what it asks of them: how sources
                are weighed, and what calls and passes cost. Only a fixed ``k`` with one source proposes the
                same for a request whatever was served before.
            k: Fixed speculation length; ``None`` lets the controller choose.
        """

        def switch() -> None:
            if self.core.rows or len(self.core.intake):
                raise InvalidValueError("mode", "switch while requests run", "wait until they have finished")
            self._apply_mode(self._sources(sources), learn, self._fixed_k(k))

        self.core.call(switch).result()

    def _apply_mode(self, sources: tuple[str, ...], learn: bool, fixed_k: int | None) -> None:
        learn = learn and self._may_learn
        self.core.prefixes.clear()
        mixture, scheduler = self.parts.mixture, self.parts.scheduler
        mixture.learn = learn
        mixture.only = None if sources == self._sources(None) else frozenset(sources)
        speculate = bool(sources) and fixed_k != 0
        self.core.drafter = mixture if speculate else None
        self.core.settings.fixed_k = fixed_k
        observers: list[Observer] = [self.stats_of, self.state] if speculate or learn else []
        if learn and scheduler is not None:
            observers.append(scheduler)
        if learn:
            observers.append(self.router)
        self.core.observers = observers
        self.core.worker = scheduler if learn else None
        self.core.wants_evidence = lambda: scheduler is not None and scheduler.wants_records
        self.core.settings.evidence_k = EVIDENCE_K if learn and scheduler is not None else 0

    def stats(self) -> dict[str, Any]:
        """Statistics since the state was empty; see :class:`router.mind.stats.Stats`."""
        extras = {str(row["name"]): row for row in self.domains()}
        report = self.stats_of.snapshot(extras, list(extras))
        report["learning"] = self.costs.as_dict()
        report["matrix"] = self.parts.matrix()
        report["running"], report["waiting"] = len(self.core.rows), len(self.core.intake)
        report["prefix_cache"] = self.core.prefixes.as_dict()
        report["k"] = {
            "step_ms": self.core.costs.as_dict(),
            "step_ms_by_rows": self.core.costs.by_rows(),
            "drift": self.core.costs.drift,
            "by_rows": self.parts.mixture.control.pacing.figures(),
        }
        return report

    def domains(self) -> list[dict[str, Any]]:
        """Domains with description, sources, version, memory and buffer; the base domain last."""
        return self.life.rows()

    def add_domain(
        self,
        name: str,
        *,
        description: str = "",
        examples: Sequence[str] = (),
        draft: ModelConfig | None = None,
    ) -> None:
        """Register a domain while serving; idempotent for equal arguments.

        Raises:
            InvalidValueError: A name that is taken, reserved or not allowed, or a draft that does not fit.
        """
        self.life.add(name, description, tuple(examples), draft)

    def remove_domain(self, name: str) -> None:
        """Forget a domain; its running requests finish on what they began with.

        Raises:
            UnknownNameError: No such domain.
            InvalidValueError: The base domain cannot be removed.
        """
        self.life.remove(name)

    def close(self) -> None:
        """Finish running requests, save the state and stop. Idempotent."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._loop.stop()
        self.router.flush()
        self.state.close(self)
        self.router.close()

    def _on_birth(self, birth: Birth) -> None:
        self.life.born(birth)

    def _on_event(self, event: Event) -> None:
        log.info("%s %s: %s %s", event.kind, event.domain, event.reason, event.numbers)
        self.stats_of.add_event(event)
        self.state.event(event)

    def _state_dir(self) -> Path | None:
        if not self.options.keep_state:
            return None
        if self.options.state_dir is not None:
            return Path(self.options.state_dir)
        return self.config.state.dir

    def _sources(self, sources: tuple[str, ...] | None) -> tuple[str, ...]:
        chosen = tuple(self.config.drafts.sources) if sources is None else tuple(sources)
        for name in chosen:
            if name not in kind_names():
                raise UnknownNameError("sources", name, kind_names())
        return chosen

    def _fixed_k(self, k: int | None) -> int | None:
        limit = self.config.drafts.max_depth
        if k is not None:
            if not 0 <= k <= limit:
                raise InvalidValueError("k", k, f"0..{limit} (drafts.max_depth), or auto")
            return k
        return None if self.config.engine.k == "auto" else int(self.config.engine.k)

    def _forced_nodes(self, nodes: int | None) -> int | None:
        if nodes is not None and nodes < 1:
            raise InvalidValueError("nodes", nodes, "at least 1")
        if nodes is not None and not self.config.drafts.trees:
            raise InvalidValueError("nodes", nodes, "nothing with drafts.trees: false")
        return nodes

    @property
    def _may_learn(self) -> bool:
        """Whether config and options let anything learn."""
        return self.options.learn and self.config.learn.enabled


def compute_thread() -> ThreadPoolExecutor:
    """The one thread on which a deployment's models are loaded, timed and run."""
    return ThreadPoolExecutor(1, thread_name_prefix="polydraft-engine")
