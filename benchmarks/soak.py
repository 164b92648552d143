"""Does anything leak, and is every answer right, when thousands of requests of every fate share an engine?

A tiny target of random weights, with lookup, n-gram and eagle drafts whose versions are swapped under way,
answers requests of random shape: prompts that begin alike or not, greedy and sampled, and among them ones
that are cancelled (waiting, in prefill, running), that run out of time, are too long, cannot start, break the
pass, give no finite logits, or whose receiver fails. After every step the engine audits its books. Every
answer must be the beginning of what the same request gives alone, without drafts and stored prefixes, and
all of it where nothing ended it early. A step is one second of the engine's clock. Seeds fix what is asked
of the engine, not how deep it speculates, which follows measured time; so two runs differ in their steps.

    python benchmarks/soak.py --requests 10000 --seed 0 --json soak.json

The last line is JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from soak_parts import FIRST, NO_NUMBERS, RAISES, VOCAB, Letters, Told, tiny_drafts, tiny_target

from drafts.errors import InvalidValueError
from drafts.mixture import Mixture
from drafts.registry import Registry
from osd.serve.controller import StepCosts
from osd.serve.engine import Engine, EngineSettings
from osd.serve.row import Outcome, Submission
from osd.types import FinishReason, GenerationRequest, SamplingParams
from router.app.provenance import provenance

ROOM, PREFIX_TOKENS = 160, 1024

FATES = {
    "plain": 72,
    "cancelled": 10,
    "timeout": 6,
    "overlong": 3,
    "cannot start": 2,
    "raises": 2,
    "no numbers": 2,
    "receiver fails": 3,
}
"""How many of a hundred requests meet which fate."""

MEGABYTES = 64
"""Growth of the process from the first quarter to the end that is put down to allocators."""


@dataclass
class Shape:
    """What is asked, apart from its fate; few enough of them that each is computed alone once."""

    prompt: tuple[int, ...]
    sampling: dict[str, Any]
    domain: str
    store: bool
    alone: tuple[int, ...] | None = None


@dataclass
class Soak:
    """One run.

    Args:
        requests: How many.
        seed: Of everything.
    """

    requests: int
    seed: int = 0
    fates: Counter[str] = field(default_factory=Counter)
    finishes: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        # Apart, since the number of steps depends on timing and what is asked must not.
        self.arrivals = random.Random(self.seed)
        self.target = tiny_target(self.seed)
        self.now = 0.0
        self.registry = Registry(None)
        self.bank, drafter = tiny_drafts(self.target, self.registry, self.seed)
        self.engine = self._engine(
            drafter, slots=6, prefix_cache_tokens=PREFIX_TOKENS, max_tokens_in_flight=700
        )
        self.plain = self._engine(None, slots=1)
        starts = [self._tokens(length) for length in (24, 40, 70, 90)]
        self.shapes = [self._shape(starts) for _ in range(max(self.requests // 10, 20))]
        self.answered: set[str] = set()
        self.ended: list[tuple[str, str, Shape, Outcome]] = []
        self.cancel_at: dict[int, list[str]] = {}
        self.steps = 0

    def _engine(self, drafter: Mixture | None, slots: int, **settings: Any) -> Engine:
        return Engine(
            target=self.target,
            tokenizer=Letters(),
            assigner=Told(),
            costs=StepCosts({1: 1.0, 2: 1.1, 8: 2.0}),
            slots=slots,
            max_length=ROOM,
            queue=64,
            drafter=drafter,
            settings=EngineSettings(prefill_chunk=48, **settings),
            clock=lambda: self.now,
        )

    def _tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self.random.randrange(FIRST, VOCAB) for _ in range(count))

    def _shape(self, starts: list[tuple[int, ...]]) -> Shape:
        pick = self.random
        tail = self._tokens(pick.randint(1, 40))
        if pick.random() < 0.3:
            tail = (tail * 4)[:40]
        prompt = (pick.choice(starts) if pick.random() < 0.5 else ()) + tail
        sampling: dict[str, Any] = {"max_tokens": pick.randint(1, 24), "ignore_eos": pick.random() < 0.7}
        if pick.random() < 0.4:
            sampling |= {"temperature": 0.9, "top_p": 0.95, "seed": pick.randrange(1000)}
        if pick.random() < 0.2:
            sampling["k"] = pick.randint(0, 4)
        return Shape(prompt, sampling, pick.choice(("base", "math")), pick.random() < 0.8)

    def _submit(self, name: str) -> None:
        """Submit one request of random shape and fate."""
        shape = self.random.choice(self.shapes)
        fate = self.random.choices(list(FATES), list(FATES.values()))[0]
        self.fates[fate] += 1
        prompt, sampling = shape.prompt, dict(shape.sampling)
        if fate == "overlong":
            prompt = self._tokens(self.random.randint(ROOM, 2 * ROOM))
        elif fate == "cannot start":
            sampling["stop"] = ("",)
        elif fate in ("raises", "no numbers"):
            prompt = (RAISES if fate == "raises" else NO_NUMBERS, *self._tokens(10))
        elif fate == "timeout":
            sampling["timeout"] = float(self.random.randint(1, 8))
        elif fate == "cancelled":
            when = self.steps + self.random.randint(0, 12)
            self.cancel_at.setdefault(when, []).append(name)

        def on_tokens(text: str, ids: tuple[int, ...], logprobs: object) -> None:
            if fate == "receiver fails":
                raise ConnectionError("the receiver hung up")

        def on_done(outcome: Outcome) -> None:
            self.ended.append((name, fate, shape, outcome))

        request = GenerationRequest(
            name,
            prompt,
            SamplingParams(**sampling),
            domain=shape.domain,
            store=shape.store,
            arrived=self.now,
        )
        try:
            self.engine.intake.put(Submission(request, on_tokens, on_done))
        except InvalidValueError:
            assert fate == "overlong", f"{name} ({fate}) is refused"
            self.answered.add(name)
            self.finishes["refused"] += 1

    def _judge(self, fate: str, shape: Shape, outcome: Outcome) -> None:
        """The outcome is what the fate demands, and its tokens are those of the request alone."""
        finish = outcome.record.finish
        self.finishes[finish.value] += 1
        if fate in ("cannot start", "raises", "no numbers", "receiver fails"):
            assert finish is FinishReason.ERROR, (fate, finish)
            return
        allowed = {
            "cancelled": {FinishReason.CANCELLED},
            "timeout": {FinishReason.TIMEOUT},
        }.get(fate, set()) | {FinishReason.STOP, FinishReason.LENGTH}
        assert finish in allowed, (fate, finish, outcome.error)
        found = outcome.record.output_ids
        expected = self._alone(shape)
        if finish in (FinishReason.CANCELLED, FinishReason.TIMEOUT):
            expected = expected[: len(found)]
        assert found == expected, f"{outcome.record.request}: {found}, alone {expected}"

    def _alone(self, shape: Shape) -> tuple[int, ...]:
        if shape.alone is None:
            ended: list[Outcome] = []
            request = GenerationRequest("alone", shape.prompt, SamplingParams(**shape.sampling))
            self.plain.intake.put(Submission(request, lambda *_: None, ended.append))
            while not ended:
                self.plain.step()
            shape.alone = ended[0].record.output_ids
        return shape.alone

    def _swap(self) -> None:
        noisy = {
            name: tensor + 0.1 * torch.randn_like(tensor) if tensor.is_floating_point() else tensor
            for name, tensor in self.bank.tensors("math").items()
        }
        self.registry.publish("math", noisy, reason="soak")

    def step(self) -> bool:
        """One step of the engine, with whatever is cancelled before it; an audit and a verdict after it.

        The verdict is not given in the receiver, since the engine holds what a receiver raises.
        """
        for name in self.cancel_at.pop(self.steps, ()):
            self.engine.intake.cancel(name)
        worked = self.engine.step()
        self.engine.check()
        for name, fate, shape, outcome in self.ended:
            assert name not in self.answered, f"{name} is answered twice"
            self.answered.add(name)
            self._judge(fate, shape, outcome)
        self.ended.clear()
        self.steps += 1
        self.now += 1.0
        return worked or bool(self.engine.rows) or len(self.engine.intake) > 0

    def run(self) -> dict[str, Any]:
        """Serve everything; raises ``AssertionError`` at the first thing that is wrong."""
        begin, threads = time.perf_counter(), threading.active_count()
        memory: list[int] = []
        submitted = 0
        while submitted < self.requests:
            for _ in range(min(self.arrivals.choice((0, 0, 1, 1, 2, 12)), self.requests - submitted)):
                if len(self.engine.intake) < 48:
                    self._submit(str(submitted))
                    submitted += 1
            if self.steps % max(self.requests // 8, 1) == 0:
                self._swap()
            self.step()
            if submitted * 4 >= self.requests * (len(memory) + 1):
                gc.collect()
                memory.append(psutil.Process().memory_info().rss)
        while self.step():
            pass
        return self._report(memory, threads, time.perf_counter() - begin)

    def _report(self, memory: list[int], threads: int, seconds: float) -> dict[str, Any]:
        engine = self.engine
        assert len(self.answered) == self.requests, f"{len(self.answered)} of {self.requests} are answered"
        assert engine.cache.free == engine.slots, f"{engine.cache.active} slots are still taken"
        assert not engine.intake._cancelled, f"{engine.intake._cancelled} wait to be cancelled"
        assert threading.active_count() <= threads, f"{threading.active_count()} threads, {threads} before"
        stored = engine.prefixes.as_dict()
        assert stored["tokens_held"] <= stored["tokens_room"] <= PREFIX_TOKENS, stored
        grown = (memory[-1] - memory[0]) / 2**20
        assert grown < MEGABYTES, f"the process grew by {grown:.0f} MiB after the first quarter"
        return {
            "requests": self.requests,
            "seed": self.seed,
            "steps": self.steps,
            "seconds": round(seconds, 1),
            "fates": dict(self.fates),
            "finishes": dict(self.finishes),
            "versions": engine.version_of("math"),
            "prefix_cache": stored,
            "grown_mib": round(grown, 1),
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the result to this file")
    arguments = parser.parse_args()
    report = Soak(arguments.requests, arguments.seed).run()
    text = json.dumps({**report, "provenance": provenance(arguments.seed)})
    if arguments.json:
        arguments.json.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
