"""The embedded engine in this process, opened as replays and benchmarks need it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from router.app.arms import ReplayEngine
from router.app.replay import ReplaySettings
from router.bodies.api import EngineOptions

if TYPE_CHECKING:
    from router.config import PolydraftConfig


@contextlib.contextmanager
def local_engine(
    config: PolydraftConfig | str | Path, settings: ReplaySettings, state: Path | None = None
) -> Iterator[ReplayEngine]:
    """An engine with the overrides of ``settings``; closed, and its state saved, at the end.

    Args:
        config: The config or its file.
        settings: Options of the run; the batch has as many rows as requests are in flight.
        state: State folder; ``None`` is an empty state that is kept nowhere.
    """
    from router.bodies.embedded import Engine

    options = EngineOptions(
        learn=not settings.freeze,
        k=settings.k,
        nodes=settings.nodes,
        sources=settings.sources,
        state_dir=None if state is None else str(state),
        keep_state=state is not None,
        slots=settings.concurrency,
        seed=settings.seed,
    )
    with Engine.from_config(config, options) as engine:
        yield engine
