"""Where the engine's steps spend their time, over real requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from drafts.errors import InvalidValueError
from router.app.inflight import keep_in_flight
from router.app.traffic import TrafficItem

PARTS: dict[str, tuple[str, str]] = {
    "border": ("requests", "border"),
    "admit": ("requests", "admit"),
    "propose": ("", "_propose"),
    "plan": ("", "_plan"),
    "target pass": ("target", "forward"),
    "verify": ("", "_verify"),
    "commit": ("", "_commit"),
    "evidence": ("", "_keep_evidence"),
    "observe": ("drafter", "observe"),
    "retire": ("requests", "retire"),
    "learning": ("worker", "work"),
}
"""By part what does it: an attribute of the engine (itself where empty), and that one's method.

``evidence`` is called by ``commit`` and taken off it.
"""

LEARNING = "learning"
"""The learner's turn, which follows a step and is no part of its time."""

OPTIONAL = ("drafter", "worker")
"""What an engine may have none of."""


class Stopwatch:
    """Times the parts of an engine's steps by wrapping its methods; :meth:`release` undoes that.

    Raises:
        InvalidValueError: A method that the engine does not have: its time would hide among the rest.
    """

    def __init__(self, core: Any) -> None:
        self.seconds: dict[str, float] = {}
        self._wrapped: list[tuple[Any, str]] = []
        for part, (attribute, method) in PARTS.items():
            owner = getattr(core, attribute) if attribute else core
            if owner is None and attribute in OPTIONAL:
                continue
            self._wrap(owner, method, part)

    def release(self) -> None:
        """Put the methods back."""
        for owner, method in self._wrapped:
            delattr(owner, method)
        self._wrapped.clear()

    def _wrap(self, owner: Any, method: str, part: str) -> None:
        inner: Callable[..., Any] | None = getattr(owner, method, None)
        if inner is None:
            self.release()
            raise InvalidValueError(
                f"part {part}", f"{type(owner).__name__}.{method}", "a method of the engine"
            )
        self.seconds[part] = 0.0

        def timed(*arguments: Any, **options: Any) -> Any:
            begin = time.perf_counter()
            try:
                return inner(*arguments, **options)
            finally:
                self.seconds[part] += time.perf_counter() - begin

        setattr(owner, method, timed)
        self._wrapped.append((owner, method))


def step_parts(
    engine: Any, items: Sequence[TrafficItem], concurrency: int, max_tokens: int, mode: dict[str, Any]
) -> dict[str, Any]:
    """Milliseconds a step by part while the requests are served in a mode.

    ``rest`` is what the parts leave of the engine's busy time, which learning is no part of. Steps with
    prefill count like all others.
    """
    engine.set_mode(**mode)
    core = engine.core
    watch = engine.compute(lambda: Stopwatch(core))
    steps, busy = core.steps, core.busy_seconds
    begin = time.perf_counter()
    try:
        served = keep_in_flight(
            engine,
            items,
            concurrency=concurrency,
            seed=0,
            sampling={"max_tokens": max_tokens, "temperature": 0.0},
            store=mode["learn"],
        )
        wall = time.perf_counter() - begin
    finally:
        engine.compute(watch.release)
    steps, busy = core.steps - steps, core.busy_seconds - busy
    engine.set_mode(sources=(), learn=False, k=None)
    tokens = sum(len(one.completion.token_ids) for one in served if one.completion is not None)
    return {
        "concurrency": concurrency,
        "steps": steps,
        "tokens": tokens,
        "tokens_per_step": tokens / steps if steps else 0.0,
        "tokens_per_second": tokens / wall,
        "step_ms": 1e3 * busy / steps if steps else 0.0,
        "parts_ms": split(watch.seconds, busy, steps),
        "between_steps_ms": 1e3 * (wall - busy) / steps if steps else 0.0,
    }


def split(seconds: dict[str, float], busy: float, steps: int) -> dict[str, float]:
    """Milliseconds a step by part, nested parts taken off what holds them, the rest, and learning besides."""
    parts = {name: value for name, value in seconds.items() if name != LEARNING}
    if "commit" in parts:
        parts["commit"] -= parts.get("evidence", 0.0)
    parts["rest"] = busy - sum(parts.values())
    if LEARNING in seconds:
        parts[LEARNING] = seconds[LEARNING]
    return {name: 1e3 * value / max(steps, 1) for name, value in parts.items()}
