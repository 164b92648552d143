"""Replay: traffic from a file through an engine in this process, measured, compared and checked."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from drafts.errors import InvalidValueError
from router.app.arms import Arm, ArmRun, EngineArm, GenerateArm, ReplayEngine
from router.app.compare import SPECULATIVE, Comparison, block_size, sample, split_blocks
from router.app.inflight import Served
from router.app.summary import LearningShare, event_dict, output_line, summarise
from router.app.traffic import TrafficItem
from router.app.verify_replay import Verification, verify

LOOK_EVERY = 1.0
"""Seconds between two looks at the engine's events and domains, in every arm alike."""


@dataclass(frozen=True)
class ReplaySettings:
    """Options of a replay, as the command line offers them.

    Attributes:
        concurrency: Requests in flight.
        max_tokens: Most output tokens of a request.
        temperature: Sampling temperature; 0 is greedy.
        seed: Every request gets its own seed from this and its index.
        compare: Baselines to compare with.
        compare_limit: Compare on a seeded sample of this many prompts, served last and in blocks;
            ``None`` compares on all, and the whole run is made of blocks.
        verify: Requests to check against the plain model.
        freeze: Turn all learning off.
        k: Fixed speculation length, ``None`` for the controller's choice.
        nodes: Trees of this many nodes a request and step whatever they cost, ``None`` for what pays.
        sources: Draft sources, ``None`` for the configured ones, ``()`` for plain decoding.
        outputs: File that gets one line a request.
    """

    concurrency: int = 1
    max_tokens: int = 128
    temperature: float = 0.0
    seed: int = 0
    compare: tuple[str, ...] = ()
    compare_limit: int | None = None
    verify: int = 0
    freeze: bool = False
    k: int | None = None
    nodes: int | None = None
    sources: tuple[str, ...] | None = None
    outputs: Path | None = None

    def check(self) -> None:
        """Raise :class:`InvalidValueError` for options that contradict each other or are out of range."""
        for name, value, least in (
            ("--concurrency", self.concurrency, 1),
            ("--max-tokens", self.max_tokens, 1),
            ("--verify", self.verify, 0),
            ("--k", self.k or 0, 0),
            ("--nodes", 1 if self.nodes is None else self.nodes, 1),
            ("--compare-limit", 1 if self.compare_limit is None else self.compare_limit, 1),
        ):
            if value < least:
                raise InvalidValueError(name, value, f"at least {least}")
        if self.nodes is not None and self.k is not None:
            raise InvalidValueError("--nodes", self.nodes, f"nothing with --k {self.k}, which fixes a chain")
        if not 0 <= self.temperature <= 10:
            raise InvalidValueError("--temperature", self.temperature, "0 (greedy) to 10")


class Listener(Protocol):
    """Watches a replay, for example on a terminal."""

    def phase(self, name: str, total: int) -> None:
        """A part of the replay begins; ``total`` steps are expected."""
        ...

    def advance(self, done: int) -> None:
        """``done`` steps of the phase are finished."""
        ...

    def served(self, item: Served) -> None:
        """A request of the speculating run has ended."""
        ...

    def event(self, event: dict[str, Any]) -> None:
        """Something an operator wants to know, as it happens."""
        ...

    def domains(self, rows: Sequence[dict[str, Any]]) -> None:
        """The engine's own view of its domains, about once a second."""
        ...


class Silent:
    """A listener for scripts."""

    def phase(self, name: str, total: int) -> None:
        """Ignore."""

    def advance(self, done: int) -> None:
        """Ignore."""

    def served(self, item: Served) -> None:
        """Ignore."""

    def event(self, event: dict[str, Any]) -> None:
        """Ignore."""

    def domains(self, rows: Sequence[dict[str, Any]]) -> None:
        """Ignore."""


@dataclass
class Measured:
    """The speculating arm, with the engine's learning figures read before and after every block."""

    arm: EngineArm
    share: LearningShare

    def warm_up(self) -> None:
        """Nothing: the engine warms up at load."""

    def run(self, block: Sequence[TrafficItem]) -> ArmRun:
        """Serve the block."""
        before = self.arm.engine.stats().get("learning", {})
        result = self.arm.run(block)
        self.share.add(before, self.arm.engine.stats().get("learning", {}))
        return result


@dataclass
class Replay:
    """One replay. Use :func:`replay`."""

    engine: ReplayEngine
    settings: ReplaySettings
    listener: Listener
    served: list[Served] = field(default_factory=list)
    started: float = field(default_factory=time.time)
    _output: Any = None
    _seen: set[str] = field(default_factory=set)
    _looked: float = 0.0
    _share: LearningShare = field(default_factory=LearningShare)

    def run(self, items: Sequence[TrafficItem], provenance: dict[str, Any]) -> dict[str, Any]:
        """Serve, compare, check and summarise."""
        settings, engine = self.settings, self.engine
        settings.check()
        before = engine.stats()
        self._seen = {_event_key(event_dict(event)) for event in before.get("events", ())}
        comparison = Comparison(settings.seed)
        with ExitStack() as stack:
            if settings.outputs is not None:
                self._output = stack.enter_context(open(settings.outputs, "w", encoding="utf-8"))
            self._serve(items, comparison)
        after = engine.stats()
        checked = Verification()
        if settings.verify:
            self.listener.phase("verify", settings.verify)
            checked = verify(
                engine,
                self.served,
                settings.verify,
                settings.max_tokens,
                lambda done, total: self.listener.advance(done),
                settings.temperature,
            )
        return summarise(
            self.served,
            domains=[str(row["name"]) for row in engine.domains()],
            stats_before=before,
            stats_after=after,
            share=self._share,
            started=self.started,
            compare=comparison.as_dict(),
            verify=checked.as_dict(),
            provenance=provenance,
        )

    def _serve(self, items: Sequence[TrafficItem], comparison: Comparison) -> None:
        settings = self.settings
        ours = self._engine_arm(
            {"sources": settings.sources, "learn": not settings.freeze, "k": settings.k},
            on_served=self._on_served,
        )
        first, compared = list(items), list(items)[:0]
        if settings.compare:
            first, compared = sample(items, settings.compare_limit, settings.seed)
        if first:
            self.listener.phase("replay", len(first))
            Measured(ours, self._share).run(first)
        if compared:
            blocks = split_blocks(compared, block_size(len(compared), settings.concurrency))
            self.listener.phase("compare", len(blocks))
            arms: dict[str, Arm] = {SPECULATIVE: Measured(ours, self._share)}
            for name in settings.compare:
                arms[name] = self._baseline(name)
            comparison.run(arms, blocks, lambda done, total: self.listener.advance(done))
        self._on_tick(force=True)

    def _baseline(self, name: str) -> Arm:
        settings = self.settings
        if name == "generate":
            return GenerateArm(self.engine, settings.max_tokens, settings.temperature, settings.seed)
        return self._engine_arm({"sources": (), "learn": False, "k": None}, store=False)

    def _engine_arm(self, mode: dict[str, Any], **options: Any) -> EngineArm:
        settings = self.settings
        sampling = {"max_tokens": settings.max_tokens, "temperature": settings.temperature}
        options = {"on_tick": self._on_tick, **options}
        return EngineArm(self.engine, mode, settings.concurrency, settings.seed, sampling, **options)

    def _on_served(self, item: Served) -> None:
        self.served.append(item)
        if self._output is not None:
            self._output.write(json.dumps(output_line(item), ensure_ascii=False) + "\n")
            self._output.flush()
        self.listener.served(item)

    def _on_tick(self, force: bool = False) -> None:
        now = time.monotonic()
        if not force and now - self._looked < LOOK_EVERY:
            return
        self._looked = now
        for event in map(event_dict, self.engine.stats().get("events", ())):
            key = _event_key(event)
            if key not in self._seen:
                self._seen.add(key)
                self.listener.event(event)
        self.listener.domains(self.engine.domains())


def _event_key(event: dict[str, Any]) -> str:
    return f"{event.get('time')}/{event.get('kind')}/{event.get('domain')}"


def replay(
    engine: ReplayEngine,
    items: Sequence[TrafficItem],
    settings: ReplaySettings,
    *,
    provenance: dict[str, Any] | None = None,
    listener: Listener | None = None,
) -> dict[str, Any]:
    """Serve ``items`` and return the result of the replay contract as a dictionary.

    Raises:
        InvalidValueError: settings that contradict each other.
        PolydraftError: the engine failed as a whole; single failed requests are listed in ``failed``.
    """
    return Replay(engine, settings, listener or Silent()).run(items, provenance or {})
