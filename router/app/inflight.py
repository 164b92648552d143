"""A load generator: keeps N requests in flight on an engine, submitted in the order given."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

from drafts.errors import PolydraftError
from osd.types import FinishReason
from router.app.traffic import TrafficItem
from router.bodies.api import Completion, Handle, ServingEngine

TICK = 0.5
"""Seconds between two looks at the engine while nothing ends."""


@dataclass(frozen=True)
class Served:
    """One request of the traffic and what became of it.

    Attributes:
        item: The request.
        seed: Its own sampling seed.
        completion: The answer, ``None`` when the request was refused or failed.
        error: Why there is no answer.
        refused: True when the engine did not take the request (a fault of the request, for example
            an over-long prompt), False when it failed while running.
    """

    item: TrafficItem
    seed: int
    completion: Completion | None = None
    error: str | None = None
    refused: bool = False


def request_seed(seed: int, index: int) -> int:
    """The seed of request ``index`` of a run: a hash, so that runs share no noise; 48 bits, exact in JSON."""
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=6).digest()
    return int.from_bytes(digest, "big")


def keep_in_flight(
    engine: ServingEngine,
    items: Sequence[TrafficItem],
    *,
    concurrency: int,
    seed: int,
    sampling: dict[str, Any],
    store: bool = True,
    on_served: Callable[[Served], None] = lambda served: None,
    on_tick: Callable[[], None] = lambda: None,
) -> list[Served]:
    """Serve ``items``, submitting the next one when one ends; results in order of completion.

    The next request is on its way before anyone is told of the one that ended, so that watching a run
    does not slow it.

    Args:
        engine: Who answers.
        items: The requests; submitted in this order.
        concurrency: Most requests in flight.
        seed: Seed of the run; every request gets its own from it and its index.
        sampling: Decoding parameters shared by all requests.
        store: Whether memories and buffers may keep the texts.
        on_served: Told of every result, on the calling thread.
        on_tick: Called every :data:`TICK` seconds at most, on the calling thread.
    """
    waiting = deque(items)
    running: dict[Future[Completion], tuple[Served, Handle]] = {}
    ended: list[tuple[Served, Future[Completion]]] = []
    results: list[Served] = []

    def settle(served: Served) -> None:
        results.append(served)
        on_served(served)

    with ThreadPoolExecutor(concurrency, thread_name_prefix="replay") as pool:
        try:
            while waiting or running:
                while waiting and len(running) < concurrency:
                    asked = Served(waiting[0], request_seed(seed, waiting[0].index))
                    waiting.popleft()
                    try:
                        handle = _submit(engine, asked, sampling, store)
                    except PolydraftError as error:
                        if error.status >= 500:
                            raise
                        settle(Served(asked.item, asked.seed, error=str(error), refused=True))
                        continue
                    running[pool.submit(handle.result)] = (asked, handle)
                for asked, future in ended:
                    settle(_outcome(asked, future))
                on_tick()
                done, _ = wait(running, timeout=TICK, return_when=FIRST_COMPLETED)
                ended = [(running.pop(future)[0], future) for future in done]
            for asked, future in ended:
                settle(_outcome(asked, future))
        except BaseException:
            for _, handle in running.values():
                handle.cancel()
            raise
    return results


def _submit(engine: ServingEngine, asked: Served, sampling: dict[str, Any], store: bool) -> Handle:
    return engine.submit(messages=asked.item.messages, store=store, seed=asked.seed, **sampling)


def _outcome(asked: Served, future: Future[Completion]) -> Served:
    try:
        completion = future.result()
    except PolydraftError as error:
        return Served(asked.item, asked.seed, error=str(error), refused=error.status < 500)
    if completion.finish_reason in (FinishReason.ERROR, FinishReason.CANCELLED):
        return Served(asked.item, asked.seed, error=completion.error or completion.finish_reason.value)
    return Served(asked.item, asked.seed, completion=completion)
