"""Which draft models of domains are in memory: the latest used, as many as fit; the others wait.

Weights come back on a thread of their own, since that takes from a tenth of a second (from the host's
memory) to seconds (from files). They are put to use between two chains only, and a row's entries belong to
the model that made them, so no chain ever mixes two models.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

from drafts.errors import InvalidValueError

logger = logging.getLogger(__name__)

FIRST_WAIT = 1.0
"""Seconds before weights that could not be brought back are sent for again; doubled with every failure."""

LONGEST_WAIT = 600.0
"""Seconds that such a wait takes at most."""


class Movable(Protocol):
    """A model whose weights can be let go and brought back."""

    label: str

    @property
    def nbytes(self) -> int: ...  # noqa: D102

    @property
    def resident(self) -> bool: ...  # noqa: D102

    def release(self) -> None:
        """Let go of the weights."""
        ...

    def fetch(self) -> list[Any]:
        """Bring the weights along; runs on another thread and changes nothing."""
        ...

    def take(self, weights: list[Any]) -> None:
        """Use what was fetched."""
        ...


class Residents:
    """Keeps the models that domains brought within a bound.

    Args:
        max_bytes: Most memory of weights, ``always`` included; ``None`` for no bound.
        always: Bytes of the base domain's draft, which stays.
        start: Runs ``fetch`` elsewhere.
        clock: Seconds, for the wait after a failure.
    """

    def __init__(
        self,
        max_bytes: int | None,
        always: int = 0,
        start: Callable[[Callable[[], list[Any]]], Future[list[Any]]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.max_bytes = max_bytes
        self.always = always
        self._start = start
        self._models: list[Movable] = []
        self._clock = clock
        self._coming: dict[int, Future[list[Any]]] = {}
        self._failed: dict[int, tuple[int, float]] = {}
        self.check("drafts.model.path", "the base domain's draft", 0)

    @property
    def nbytes(self) -> int:
        """Memory of weights that are here or on their way."""
        return self.always + sum(m.nbytes for m in self._models if m.resident or id(m) in self._coming)

    def check(self, field: str, label: str, nbytes: int) -> None:
        """Raise :class:`InvalidValueError` if a model of ``nbytes`` could never be here."""
        if self.max_bytes is not None and self.always + nbytes > self.max_bytes:
            allowed = (
                f"at most drafts.max_resident_bytes ({self.max_bytes}) bytes, not {self.always + nbytes}"
            )
            raise InvalidValueError(field, label, allowed)

    def add(self, model: Movable) -> None:
        """A model that was just loaded: the latest used of all."""
        self.check("draft.path", model.label, model.nbytes)
        self._make_room(model.nbytes, kept=())
        self._models.append(model)

    def drop(self, model: Movable) -> None:
        """Forget a model."""
        self._models = [other for other in self._models if other is not model]
        self._coming.pop(id(model), None)
        self._failed.pop(id(model), None)

    def use(self, wanted: Collection[Movable]) -> None:
        """Before a batch: put to use what has arrived, and send for what is ``wanted`` and can have room.

        A model that a row of this batch drafts with is never sent away. One that could not be brought back
        is left alone for a while, longer each time.
        """
        for model in wanted:
            self._models.sort(key=lambda other, model=model: other is model)  # type: ignore[misc]
            coming = self._coming.get(id(model))
            if coming is not None and coming.done():
                del self._coming[id(model)]
                self._take(model, coming)
            elif coming is not None or model.resident or self._waits(model):
                continue
            elif self._make_room(model.nbytes, wanted):
                self._coming[id(model)] = self._begin(model)

    def _waits(self, model: Movable) -> bool:
        """Whether bringing the model back failed a short while ago."""
        return id(model) in self._failed and self._clock() < self._failed[id(model)][1]

    def _take(self, model: Movable, coming: Future[list[Any]]) -> None:
        try:
            model.take(coming.result())
        except Exception as error:
            failures = self._failed.get(id(model), (0, 0.0))[0]
            wait = min(FIRST_WAIT * 2.0 ** min(failures, 20), LONGEST_WAIT)
            self._failed[id(model)] = failures + 1, self._clock() + wait
            logger.error(
                "draft model %s cannot be brought back: %s; it is sent for again in %.0f s at the earliest",
                model.label,
                error,
                wait,
            )
        else:
            self._failed.pop(id(model), None)

    def _begin(self, model: Movable) -> Future[list[Any]]:
        if self._start is None:
            pool = ThreadPoolExecutor(1, thread_name_prefix="draft-weights")
            self._start = pool.submit
        return self._start(model.fetch)

    def _make_room(self, nbytes: int, kept: Collection[Movable]) -> bool:
        """Let the models go that were not used for longest until ``nbytes`` more fit; whether they do."""
        if self.max_bytes is None:
            return True
        spare = [m for m in self._models if m.resident and not any(m is other for other in kept)]
        free = self.max_bytes - self.nbytes
        if free + sum(model.nbytes for model in spare) < nbytes:
            return False
        for model in spare:
            if free >= nbytes:
                break
            model.release()
            free += model.nbytes
        return True
