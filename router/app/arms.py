"""The arms of a comparison: the speculating engine, the same engine without drafts, ``model.generate``."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

import torch

from drafts.errors import InvalidValueError
from router.app.inflight import Served, keep_in_flight, request_seed
from router.app.traffic import TrafficItem
from router.bodies.api import Message, ServingEngine

T = TypeVar("T")


class ReplayEngine(ServingEngine, Protocol):
    """What a replay needs beyond serving: the plain model, and switching speculation off and on."""

    def prompt_ids(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        template: bool = True,
    ) -> tuple[int, ...]:
        """Token ids of a prompt exactly as :meth:`submit` makes them."""
        ...

    @property
    def max_length(self) -> int:
        """Most tokens of prompt and answer together."""
        ...

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""
        ...

    def reference(self) -> Any:
        """The plain Hugging Face model of the target."""
        ...

    def compute(self, work: Callable[[], T]) -> T:
        """Run ``work`` on the thread that owns the model and wait for it."""
        ...

    def set_mode(self, *, sources: tuple[str, ...] | None, learn: bool, k: int | None) -> None:
        """Switch drafts and learning at a step border, no request running.

        ``sources`` ``None`` takes the configured ones, ``()`` decodes plainly; ``k`` ``None`` lets the
        controller choose.
        """
        ...


@dataclass
class ArmRun:
    """One arm's run over one block.

    Attributes:
        answers: Emitted tokens by request index; refused or failed requests are absent.
        seconds: Wall time of the block, prefill included.
        each: Wall time by request index, where requests run one after the other.
    """

    answers: dict[int, tuple[int, ...]]
    seconds: float
    each: dict[int, float] = field(default_factory=dict)

    def over(self, indices: set[int]) -> tuple[int, float]:
        """Tokens and seconds of the given requests."""
        tokens = sum(len(answer) for index, answer in self.answers.items() if index in indices)
        if self.each:
            return tokens, sum(seconds for index, seconds in self.each.items() if index in indices)
        return tokens, self.seconds


class Arm(Protocol):
    """One way to answer a block of requests."""

    def warm_up(self) -> None:
        """Run something short so that the first block is not slower than the others."""
        ...

    def run(self, block: Sequence[TrafficItem]) -> ArmRun:
        """Answer every request of the block."""
        ...


@dataclass
class EngineArm:
    """The engine in one mode.

    Args:
        engine: The engine.
        mode: Arguments of ``set_mode``.
        concurrency: Requests in flight.
        seed: Seed of the run.
        sampling: Decoding parameters.
        store: False keeps the texts out of memories, so that this arm teaches nothing.
        on_served: Told of every result.
    """

    engine: ReplayEngine
    mode: dict[str, Any]
    concurrency: int
    seed: int
    sampling: dict[str, Any]
    store: bool = True
    on_served: Callable[[Served], None] = lambda served: None
    on_tick: Callable[[], None] = lambda: None

    def warm_up(self) -> None:
        """The engine times and warms its kernels at load."""

    def run(self, block: Sequence[TrafficItem]) -> ArmRun:
        """Serve the block; an engine that has run dry ends it, so arms never overlap."""
        self.engine.set_mode(**self.mode)
        begin = time.perf_counter()
        results = keep_in_flight(
            self.engine,
            block,
            concurrency=self.concurrency,
            seed=self.seed,
            sampling=self.sampling,
            store=self.store,
            on_served=self.on_served,
            on_tick=self.on_tick,
        )
        seconds = time.perf_counter() - begin
        answers = {r.item.index: r.completion.token_ids for r in results if r.completion is not None}
        return ArmRun(answers, seconds)


@dataclass
class GenerateArm:
    """``model.generate`` of the plain Hugging Face model, one request after the other.

    The engine is idle and its learning is off meanwhile: nothing else takes the processor.
    """

    engine: ReplayEngine
    max_tokens: int
    temperature: float
    seed: int

    def warm_up(self) -> None:
        """Generate four tokens."""
        self.engine.set_mode(sources=(), learn=False, k=None)
        ids = self.engine.prompt_ids(messages=[{"role": "user", "content": "Hello"}])
        self.engine.compute(lambda: self._generate(ids, 4, self.seed))

    def run(self, block: Sequence[TrafficItem]) -> ArmRun:
        """Generate every answer in turn, timed one by one."""
        self.engine.set_mode(sources=(), learn=False, k=None)
        answers: dict[int, tuple[int, ...]] = {}
        each: dict[int, float] = {}
        for item in block:
            try:
                ids = self.engine.prompt_ids(messages=item.messages)
            except InvalidValueError:
                continue
            room = min(self.max_tokens, self.engine.max_length - len(ids))
            begin = time.perf_counter()
            generate = partial(self._generate, ids, room, request_seed(self.seed, item.index))
            answers[item.index] = self.engine.compute(generate)
            each[item.index] = time.perf_counter() - begin
        return ArmRun(answers, sum(each.values()), each)

    def _generate(self, prompt: Sequence[int], max_tokens: int, seed: int) -> tuple[int, ...]:
        model = self.engine.reference()
        ids = torch.tensor([list(prompt)], device=model.device)
        eos = sorted(self.engine.eos_token_ids)
        choice: dict[str, Any]
        if self.temperature > 0:
            torch.manual_seed(seed % 2**63)
            choice = {"do_sample": True, "temperature": self.temperature, "top_p": 1.0, "top_k": 0}
        else:
            choice = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        with torch.inference_mode():
            output = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_tokens,
                eos_token_id=eos or None,
                pad_token_id=eos[0] if eos else 0,
                **choice,
            )
        return tuple(output[0, ids.shape[1] :].tolist())
