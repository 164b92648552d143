"""What survives a restart: domains, events and statistics in SQLite, memories and buffers as files."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from drafts.config import ModelConfig
from drafts.errors import PolydraftError
from drafts.expert_key import split_key
from osd.serve.engine import Engine as Core
from osd.types import Event, FinishedRecord
from router.bodies.parts import DraftParts
from router.bodies.tensor_folder import TensorFolder, Tensors
from router.config import StateConfig
from router.mind.router import Router
from router.mind.stats import Stats
from router.storage import Storage

if TYPE_CHECKING:
    from drafts.draft_model import DraftModel

log = logging.getLogger(__name__)

OnEngine = Callable[[Callable[[], Any]], Any]
"""Runs work on the engine's thread and gives its result."""


class Engine(Protocol):
    """The parts of a body that have state."""

    core: Core
    parts: DraftParts
    router: Router
    stats_of: Stats


def own_model(parts: DraftParts, domain: str, saved: object) -> tuple[ModelConfig, DraftModel] | None:
    """The draft model that a domain was registered with.

    One that cannot be loaded now is left out, and kept in the state with the domain's adapters; one of a
    domain that the config gives a model is the config's.
    """
    if saved is None or domain in parts.configured:
        return None
    try:
        config = ModelConfig.model_validate(saved)
        return config, parts.load_model(config)
    except (PolydraftError, ValueError) as error:
        log.error(
            "domain %s: its draft model cannot be loaded, the base domain's stands in; what was saved of it "
            "and its adapters stay for the next start: %s",
            domain,
            error,
        )
        parts.leave_out(domain, saved)
        return None


class StateKeeper:
    """Restores a state folder and keeps it up to date from a thread of its own.

    Statistics and events are written every ``stats_every_seconds``, router, memories and buffers every
    ``memory_every_seconds``, one domain at a time and only where something was learned. Draft versions
    are the registry's, which writes them before they are served. A write that fails is logged and
    counted, and serving goes on.

    Args:
        folder: The state folder; ``None`` keeps nothing.
        config: How often to write.
    """

    def __init__(self, folder: Path | None, config: StateConfig) -> None:
        self.config = config
        self.failures = 0
        self._storage = None if folder is None else Storage(folder)
        self._memories = None if folder is None else TensorFolder(folder / "memories")
        self._buffers = None if folder is None else TensorFolder(folder / "buffers")
        self._events: deque[Event] = deque()
        self._records: deque[FinishedRecord] = deque()
        self._sizes: dict[str, object] = {}
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._writing = threading.RLock()

    def rewrite(self, engine: Engine, domain: str) -> None:
        """Write a domain's memory and buffers now, so that nothing that was purged is left on disk.

        Raises:
            OSError: It could not be written.
        """
        if self._storage is None:
            return
        with self._writing:
            for key in list(self._sizes):
                if split_key(key.partition("/")[2])[0] == domain:
                    del self._sizes[key]
            self._save_rest(engine, lambda work: engine.core.call(work).result(60))

    def restore(self, engine: Engine) -> None:
        """Bring back what was saved; before the engine's thread runs."""
        if self._storage is None or self._memories is None or self._buffers is None:
            return
        stats = self._storage.load_stats()
        if stats is not None:
            engine.stats_of.load_state(stats)
        engine.router.load_state(self._storage.load_router())
        models = self._storage.load_document("models") or {}
        for domain in engine.router.domains():
            own = own_model(engine.parts, domain.name, models.get(domain.name))
            engine.parts.add_domain(domain.name, own)
        known = set(engine.router.names())
        if engine.parts.ngram is not None:
            memories = self._memories.load()
            engine.parts.ngram.load_state({name: t for name, t in memories.items() if name in known})
        engine.parts.load_matrix(self._storage.load_document("matrix") or {}, engine.router.names())
        if engine.parts.scheduler is not None:
            buffers = self._buffers.load()
            engine.parts.scheduler.load_state(
                {key: t for key, t in buffers.items() if split_key(key)[0] in known}
            )
            engine.parts.scheduler.load_history(self._storage.load_document("learning") or {})
        engine.parts.mixture.load_state(self._storage.load_document("drafts") or {})
        engine.parts.mixture.swap()

    def start(self, engine: Engine) -> None:
        """Begin to write in the background."""
        if self._storage is not None:
            self._thread = threading.Thread(target=self._run, args=(engine,), name="state", daemon=True)
            self._thread.start()

    def event(self, event: Event) -> None:
        """Queue an event for the log."""
        if self._storage is not None:
            self._events.append(event)

    def take(self, record: FinishedRecord) -> None:
        """Queue a finished request for the log, which holds none of its text (an ``Observer``)."""
        if self._storage is not None:
            self._records.append(record)

    def close(self, engine: Engine) -> None:
        """Write everything a last time, when the engine's thread has ended, and let go of the folder."""
        if self._storage is None:
            return
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self._guarded(lambda: self._save_stats(engine))
        self._guarded(lambda: self._save_rest(engine, lambda work: work()))
        self._storage.close()

    def _run(self, engine: Engine) -> None:
        rest = time.monotonic()
        while not self._stop.wait(self.config.stats_every_seconds):
            self._guarded(lambda: self._save_stats(engine))
            if time.monotonic() - rest >= self.config.memory_every_seconds:
                self._guarded(lambda: self._save_rest(engine, lambda work: engine.core.call(work).result(60)))
                rest = time.monotonic()

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except (PolydraftError, OSError, TimeoutError) as error:
            self.failures += 1
            log.error("state was not saved: %s", error)

    def _save_stats(self, engine: Engine) -> None:
        assert self._storage is not None
        events, records = list(self._events), list(self._records)
        if not events and not records:
            return
        self._storage.append_events(events)
        self._storage.append_requests(records)
        self._storage.save_stats(engine.stats_of.state())
        for _ in events:
            self._events.popleft()
        for _ in records:
            self._records.popleft()

    def _save_rest(self, engine: Engine, on_engine: OnEngine) -> None:
        """Router, drafts, memories and buffers; copied on the engine's thread, written on this one."""
        with self._writing:
            self._write_rest(engine, on_engine)

    def _write_rest(self, engine: Engine, on_engine: OnEngine) -> None:
        assert self._storage is not None
        assert self._memories is not None
        assert self._buffers is not None
        self._storage.save_router(engine.router.state())
        ngram, scheduler = engine.parts.ngram, engine.parts.scheduler
        self._storage.save_document("drafts", on_engine(engine.parts.mixture.state))
        self._storage.save_document("matrix", on_engine(engine.parts.matrix_state))
        loaded = {name: config.model_dump() for name, config in dict(engine.parts.own_models).items()}
        self._storage.save_document("models", {**dict(engine.parts.left_out), **loaded})
        if ngram is not None:
            sizes = {d: ngram.describe(d).get("tokens", 0) for d in engine.router.names()}
            self._save_changed("memory", self._memories, sizes, ngram.domain_state, on_engine)
        if scheduler is not None:
            self._storage.save_document("learning", on_engine(scheduler.history))
            learning = dict(scheduler.domains)
            scored = {name: domain.buffer.arrived for name, domain in learning.items()}
            self._save_changed(
                "buffer", self._buffers, scored, lambda name: learning[name].buffer.state(), on_engine
            )

    def _save_changed(
        self,
        kind: str,
        folder: TensorFolder,
        sizes: Mapping[str, object],
        state: Callable[[str], Tensors],
        on_engine: OnEngine,
    ) -> None:
        for domain, size in sizes.items():
            if self._sizes.get(f"{kind}/{domain}") != size:
                folder.save(domain, on_engine(lambda domain=domain: state(domain)))  # type: ignore[misc]
                self._sizes[f"{kind}/{domain}"] = size
        for path in folder.folder.glob("*.safetensors"):
            if path.stem not in sizes:
                folder.remove(path.stem)
