"""The router: assigns requests to domains, and lets the set of domains follow the traffic."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

from drafts.errors import InvalidValueError, UnknownNameError
from osd.types import BASE_DOMAIN, Assignment, Event, FinishedRecord, FinishReason, GenerationRequest
from router.config import DomainConfig, RouterConfig
from router.mind.background import background_texts
from router.mind.birth import Birth
from router.mind.classify import Classifier
from router.mind.domain import Domain, declared, registered
from router.mind.embed import Embedder, SentenceEncoder, single_threaded
from router.mind.nursery import Nursery
from router.mind.router_state import restore_prototype, saved_prototype
from router.mind.unknown import PoolItem

CONFIDENT = 0.8
"""Confidence from which a request may widen its domain."""

log = logging.getLogger(__name__)
T = TypeVar("T")


class Router:
    """Assigns requests (:class:`osd.ports.Assigner`) and learns from them (:class:`osd.ports.Observer`).

    All of its state belongs to one worker thread on one core: decisions, changes of the domains,
    births. Other threads hand it work and wait or not, so there is one decision path for the engine,
    the API and the command line, and no locks to forget.

    Args:
        embedder: Embeds prompts.
        config: Thresholds, births, bounds.
        domains: The declared domains.
        learn: False freezes the router: no refinement, no births.
        on_birth: Called on the worker thread right after a birth, before any request is routed to
            the new domain, so that memory and expert can be made. Must not call the router back.
        on_event: Called on the worker thread with every event.
    """

    def __init__(
        self,
        embedder: Embedder,
        config: RouterConfig | None = None,
        domains: Sequence[DomainConfig] = (),
        *,
        learn: bool = True,
        on_birth: Callable[[Birth], None] | None = None,
        on_event: Callable[[Event], None] | None = None,
    ) -> None:
        self.embedder = embedder
        self.config = config or RouterConfig()
        self.learn = learn
        self.on_birth = on_birth
        self.on_event = on_event
        self.processor_seconds = 0.0
        self.failures = 0
        self._domains: dict[str, Domain] = {}
        self._names_lock = threading.Lock()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="router", initializer=single_threaded)
        self._classifier = self._run(self._make_classifier)
        self._nursery = Nursery(self.config.birth, self._classifier)
        for domain in domains:
            self._run(self._register, declared(domain))

    @classmethod
    def from_config(
        cls, config: RouterConfig, domains: Sequence[DomainConfig] = (), **options: Any
    ) -> Router:
        """A router with the embedder that ``config`` names; loading it takes seconds."""
        encoder = SentenceEncoder(config.embedder)
        return cls(Embedder(encoder, cache_size=config.cache_size), config, domains, **options)

    def assign(self, request: GenerationRequest) -> Future[Assignment]:
        """Start to decide on a request; the future never raises.

        A domain named by the client is taken as it is. Check it with :meth:`check_domain` where the
        request is built; one that has gone in the meantime is decided like any other.
        """
        if request.domain is not None and request.domain in self.names():
            done: Future[Assignment] = Future()
            done.set_result(Assignment(request.domain, 1.0, None, True, 0.0))
            return done
        try:
            return self._worker.submit(self._route_safely, request.routing_text)
        except RuntimeError:
            after_close: Future[Assignment] = Future()
            after_close.set_result(Assignment())
            return after_close

    def route(self, text: str) -> Assignment:
        """Decide on a text now, exactly as :meth:`assign` would."""
        return self._run(self._route, text)

    def take(self, record: FinishedRecord) -> None:
        """Learn from a finished request, later and on the worker; nothing of it if it may not be stored."""
        usable = record.finish in (FinishReason.STOP, FinishReason.LENGTH) and record.request.domain is None
        if not (self.learn and usable and record.request.store):
            return
        item = PoolItem(
            record.request.routing_text,
            self._nothing,
            record.request.request_id,
            record.request.prompt_ids,
            record.output_ids,
        )
        try:
            self._worker.submit(self._learn_safely, item, record.assignment)
        except RuntimeError:
            log.debug("router closed; request %s teaches nothing", record.request.request_id)

    def names(self) -> list[str]:
        """Registered domains, the base domain first."""
        with self._names_lock:
            return [BASE_DOMAIN, *self._domains]

    def domains(self) -> list[Domain]:
        """Registered domains without the base domain."""
        with self._names_lock:
            return list(self._domains.values())

    def check_domain(self, name: str) -> None:
        """Raise :class:`UnknownNameError` unless ``name`` is a registered domain or ``base``."""
        names = self.names()
        if name not in names:
            raise UnknownNameError("domain", name, names)

    def add_domain(self, name: str, *, description: str = "", examples: Sequence[str] = ()) -> Domain:
        """Register a domain while serving.

        Raises:
            InvalidValueError: a bad or used name, a blank example, or too many domains.
        """
        domain = registered(name, description, examples, time.time())
        self._run(self._register, domain)
        return domain

    def check_new(self, name: str, *, description: str = "", examples: Sequence[str] = ()) -> None:
        """Raise what :meth:`add_domain` would; for whoever has work to do before a domain is added."""
        self._run(self._check_room, registered(name, description, examples, time.time()))

    def remove_domain(self, name: str) -> None:
        """Forget a domain; nothing is routed to it any more.

        Raises:
            UnknownNameError: not registered.
            InvalidValueError: the base domain, which always exists.
        """
        self._run(self._unregister, name)

    def flush(self) -> None:
        """Wait until everything taken so far has been learned from."""
        self._run(lambda: None)

    def close(self) -> None:
        """Finish what was handed in and stop. Idempotent."""
        self._worker.shutdown(wait=True)

    def state(self) -> dict[str, Any]:
        """Domains, what traffic has added to them, and the pool of unknowns, as JSON."""
        return self._run(self._state)

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state` returned.

        Examples of declared domains are the config's; declared domains that the config no longer
        names are gone; registered and born ones come back.
        """
        self._run(self._load_state, state)

    def _run(self, work: Callable[..., T], *arguments: Any) -> T:
        return self._worker.submit(work, *arguments).result()

    def _make_classifier(self) -> Classifier:
        background = self.embedder.embed_many(background_texts())
        self._nothing = background[0] * 0
        threshold = self.config.unknown_threshold
        return Classifier(background, unknown_threshold=None if threshold == "auto" else threshold)

    def _route(self, text: str) -> Assignment:
        start = time.thread_time()
        verdict = self._classifier.classify(self.embedder.embed(text))
        seconds = time.thread_time() - start
        self.processor_seconds += seconds
        if verdict.known and verdict.domain is not None:
            return Assignment(verdict.domain, verdict.confidence, verdict.runner_up, True, seconds)
        return Assignment(BASE_DOMAIN, 1.0 - verdict.confidence, verdict.domain, False, seconds)

    def _route_safely(self, text: str) -> Assignment:
        try:
            return self._route(text)
        except Exception:
            self.failures += 1
            log.exception("routing failed; the base domain serves the request")
            return Assignment()

    def _learn_safely(self, item: PoolItem, assignment: Assignment) -> None:
        start = time.thread_time()
        try:
            self._learn(item, assignment)
        except Exception:
            self.failures += 1
            log.exception("the router could not learn from request %s", item.request_id)
        self.processor_seconds += time.thread_time() - start

    def _learn(self, item: PoolItem, assignment: Assignment) -> None:
        vector = self.embedder.embed(item.text)
        if vector is None:
            return
        if assignment.known:
            if self.config.refine and assignment.confidence >= CONFIDENT:
                self._classifier.refine(assignment.domain, vector)
            return
        room = len(self._domains) < self.config.max_domains
        outcome = self._nursery.take(replace(item, vector=vector), self.domains(), room)
        if isinstance(outcome, Birth):
            self._bear(outcome)
            self._tell(outcome.event)
        elif outcome is not None:
            self._tell(outcome)

    def _bear(self, birth: Birth) -> None:
        """Let the body make memory and expert first, then route to the new domain."""
        if self.on_birth is not None:
            self.on_birth(birth)
        born = Domain(birth.domain, birth.description, birth.examples, "born", False, birth.event.time)
        self._register(born)
        for item in birth.members:
            self._classifier.refine(birth.domain, item.vector)
        self._classifier.refit()

    def _tell(self, event: Event) -> None:
        log.info("%s %s: %s", event.kind, event.domain, event.reason)
        if self.on_event is not None:
            self.on_event(event)

    def _check_room(self, domain: Domain) -> None:
        if domain.name in self.names():
            raise InvalidValueError("name", domain.name, "a name that no domain has yet")
        if len(self._domains) >= self.config.max_domains:
            raise InvalidValueError("domains", domain.name, f"at most {self.config.max_domains} domains")

    def _register(self, domain: Domain) -> None:
        self._check_room(domain)
        self._classifier.add(domain.name, self.embedder.embed_many(domain.anchor_texts()))
        with self._names_lock:
            self._domains[domain.name] = domain

    def _unregister(self, name: str) -> None:
        if name == BASE_DOMAIN:
            raise InvalidValueError("name", name, "a domain other than base, which always exists")
        self.check_domain(name)
        with self._names_lock:
            del self._domains[name]
        self._classifier.remove(name)

    def _state(self) -> dict[str, Any]:
        return {
            "domains": [
                {**domain.as_dict(), "traffic": saved_prototype(self._classifier.prototypes[domain.name])}
                for domain in self._domains.values()
            ],
            "pool": [item.as_dict() for item in self._nursery.pool],
        }

    def _load_state(self, state: dict[str, Any]) -> None:
        for row in state.get("domains", ()):
            fields = dict(row)
            traffic = fields.pop("traffic", None)
            domain = Domain(**{**fields, "examples": tuple(fields.get("examples", ()))})
            if domain.name not in self._domains:
                if domain.origin == "declared":
                    continue
                self._register(domain)
            if traffic is not None:
                restore_prototype(self._classifier.prototypes[domain.name], traffic)
        self._classifier.refit()
        for row in state.get("pool", ()):
            vector = self.embedder.embed(row["text"])
            if vector is not None:
                ids = tuple(row["prompt_ids"]), tuple(row["output_ids"])
                self._nursery.pool.add(PoolItem(row["text"], vector, row["request_id"], *ids))
