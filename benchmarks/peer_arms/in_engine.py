"""Polydraft's own arms: one engine, switched between blocks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from peer_arms.measured import Answer, ArmUnavailableError, BlockRun, Prompt
from router.app.arms import ReplayEngine
from router.app.inflight import Served, keep_in_flight

MODES: dict[str, dict[str, Any]] = {
    "polydraft_plain": {"sources": (), "learn": False, "k": None},
    "polydraft_frozen": {"sources": None, "learn": False, "k": None},
    "polydraft": {"sources": None, "learn": True, "k": None},
}
"""Arguments of ``set_mode`` by arm."""

NOTES = {
    "polydraft_plain": "the engine without drafts",
    "polydraft_frozen": "drafts on, learning off; knows what `polydraft` has learned in the blocks before",
    "polydraft": "drafts and learning on, from an empty state; learns while it serves, never in idle time",
}


@dataclass
class EngineArm:
    """The engine in one mode.

    Args:
        engine: The engine.
        name: One of :data:`MODES`.
        concurrency: Requests in flight.
    """

    engine: ReplayEngine
    name: str
    concurrency: int
    note: str = field(init=False)

    def __post_init__(self) -> None:
        self.note = NOTES[self.name]

    def run(self, block: Sequence[Prompt], max_tokens: int, *, store: bool | None = None) -> BlockRun:
        """Serve the block, then leave the engine at rest so that it learns in no other arm's time."""
        mode = MODES[self.name]
        self.engine.set_mode(**mode)
        begin = time.perf_counter()
        served = keep_in_flight(
            self.engine,
            [prompt.item for prompt in block],
            concurrency=self.concurrency,
            seed=0,
            sampling={"max_tokens": max_tokens, "temperature": 0.0},
            store=mode["learn"] if store is None else store,
        )
        seconds = time.perf_counter() - begin
        rest(self.engine)
        return BlockRun({one.item.index: _answer(one) for one in served}, seconds)

    def close(self) -> None:
        """Nothing: who opened the engine closes it."""


def rest(engine: ReplayEngine) -> None:
    """Nothing drafts and nothing learns, so that the engine's thread sleeps."""
    engine.set_mode(sources=(), learn=False, k=None)


def _answer(served: Served) -> Answer:
    done = served.completion
    if done is None:
        raise ArmUnavailableError(f"request {served.item.index} failed: {served.error}")
    return Answer(done.token_ids, done.total_seconds, done.first_token_seconds, len(done.rounds))
