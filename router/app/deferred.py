"""An engine that is still loading: the service answers ``/health`` and ``/ready`` meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from drafts.config import ModelConfig
from router.app.problems import NotReadyError
from router.bodies.api import Handle, Message, ServingEngine
from router.bodies.buffers import DomainBuffers
from router.bodies.versions import DomainVersions


class DeferredEngine:
    """Implements :class:`router.bodies.api.ServingEngine` over one that a thread loads.

    Args:
        load: Makes the engine; runs once, on the thread that :meth:`start` begins.
        model_name: Name to show until the engine knows its own.
        on_failure: Called on that thread with the exception when loading fails.
    """

    def __init__(
        self,
        load: Callable[[], ServingEngine],
        *,
        model_name: str = "",
        on_failure: Callable[[BaseException], None] = lambda error: None,
    ) -> None:
        self._load = load
        self._model_name = model_name
        self._on_failure = on_failure
        self._engine: ServingEngine | None = None
        self._closed = False
        self._lock = threading.Lock()

    def start(self) -> DeferredEngine:
        """Begin to load."""
        threading.Thread(target=self._run, name="engine-loader", daemon=True).start()
        return self

    def _run(self) -> None:
        try:
            engine = self._load()
        except BaseException as error:
            self._on_failure(error)
            return
        with self._lock:
            self._engine = engine
            closed = self._closed
        if closed:
            engine.close()

    def _loaded(self) -> ServingEngine:
        if self._engine is None or self._closed:
            state = "shutting down" if self._closed else "loading the target model"
            raise NotReadyError(f"the engine is {state}; ask /ready")
        return self._engine

    @property
    def model_name(self) -> str:
        """Name of the target."""
        return self._model_name if self._engine is None else self._engine.model_name

    @property
    def ready(self) -> bool:
        """Whether the engine is loaded, warm and alive."""
        return self._engine is not None and not self._closed and self._engine.ready

    def submit(
        self,
        prompt: str | Sequence[int] | None = None,
        *,
        messages: Sequence[Message] | None = None,
        domain: str | None = None,
        store: bool = True,
        request_id: str | None = None,
        **sampling: Any,
    ) -> Handle:
        """Queue one request. Raises :class:`NotReadyError` while loading."""
        engine = self._loaded()
        return engine.submit(
            prompt, messages=messages, domain=domain, store=store, request_id=request_id, **sampling
        )

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of one token."""
        return self._loaded().token_bytes(token_id)

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Tokens that an answer's text leaves out."""
        return self._loaded().special_token_ids

    @property
    def versions(self) -> DomainVersions:
        """Versions of the domains' experts."""
        return self._loaded().versions

    @property
    def buffers(self) -> DomainBuffers:
        """What is kept of the domains' answers to learn from."""
        return self._loaded().buffers

    def stats(self) -> dict[str, Any]:
        """Statistics of the engine."""
        return self._loaded().stats()

    def domains(self) -> list[dict[str, Any]]:
        """Registered domains."""
        return self._loaded().domains()

    def add_domain(
        self,
        name: str,
        *,
        description: str = "",
        examples: Sequence[str] = (),
        draft: ModelConfig | None = None,
    ) -> None:
        """Register a domain."""
        self._loaded().add_domain(name, description=description, examples=examples, draft=draft)

    def remove_domain(self, name: str) -> None:
        """Forget a domain."""
        self._loaded().remove_domain(name)

    def close(self) -> None:
        """Close the engine, or have it closed as soon as it has loaded. Idempotent."""
        with self._lock:
            first, self._closed = not self._closed, True
        if first and self._engine is not None:
            self._engine.close()
