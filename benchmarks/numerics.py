"""What rounding does to answers, and what it costs to have none of it: ``fast`` against ``strict``.

Every prompt is answered greedily alone and beside others, plainly and with drafts, under ``fast`` numerics;
the first ``--strict-limit`` of them under ``strict`` too. An answer counts as different if its tokens are not
those of the same numerics alone without drafts; the gap between the two tokens in the plain model's scores
says whether it was a near tie. Costs are ratios of neighbours in time, their median with its 95 % bootstrap
interval: of single passes (decode steps of 1, 4 and 16 rows, a prompt of 256 tokens), and of whole blocks of
requests. Without options that is 300 prompts in float32 and 60 in bfloat16, of a file that holds as many.

    python benchmarks/numerics.py --traffic mix.jsonl --json out/numerics.json

The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from numerics_parts.cost import computes_by, pass_ratios, strict_beside

from drafts.errors import InvalidValueError
from osd.serve.controller import StepCosts
from osd.serve.ties import tie_bound
from router.app.inflight import keep_in_flight
from router.app.paired import median_interval
from router.app.provenance import provenance
from router.app.traffic import TrafficItem, read_traffic
from router.bodies.api import EngineOptions
from router.bodies.embedded import COST_COUNTS, Engine
from router.config import load_config

LIMITS = {"float32": 300, "bfloat16": 60}
"""Requests by number type, unless the command says otherwise."""


class Arm(NamedTuple):
    """One way of answering."""

    numerics: str
    drafts: str
    concurrency: int


Answers = dict[Arm, dict[int, tuple[int, ...]]]


class Numerics:
    """One engine whose target is exchanged between blocks, so that both use one thread and one memory."""

    def __init__(self, engine: Engine, arguments: argparse.Namespace) -> None:
        self.engine = engine
        self.arguments = arguments
        fast = engine.core.target
        begin = time.perf_counter()
        strict = engine.compute(partial(strict_beside, fast, engine.config))
        self.seconds_to_load = time.perf_counter() - begin
        self.kernel = computes_by(strict)
        self.passes = engine.compute(partial(pass_ratios, fast, strict, arguments.rounds, arguments.seed))
        costs = engine.compute(lambda: StepCosts(strict.measure_costs(COST_COUNTS)))
        self.targets = {"fast": (fast, engine.core.costs), "strict": (strict, costs)}

    def serve(self, arm: Arm, items: Sequence[TrafficItem]) -> tuple[dict[int, tuple[int, ...]], float]:
        """Answers by index, and the seconds they took."""
        core = self.engine.core
        self.engine.set_mode(sources=() if arm.drafts == "none" else None, learn=False, k=None)

        def exchange() -> None:
            core.target, core.costs = self.targets[arm.numerics]

        self.engine.compute(exchange)
        begin = time.perf_counter()
        served = keep_in_flight(
            self.engine,
            items,
            concurrency=arm.concurrency,
            seed=self.arguments.seed,
            sampling={"max_tokens": self.arguments.max_tokens, "temperature": 0.0},
            store=False,
        )
        seconds = time.perf_counter() - begin
        return {s.item.index: s.completion.token_ids for s in served if s.completion is not None}, seconds

    def gap(self, item: TrafficItem, a: Sequence[int], b: Sequence[int]) -> float:
        """Difference of the plain model's scores between two answers' first different tokens."""
        at = next((i for i, pair in enumerate(zip(a, b, strict=False)) if pair[0] != pair[1]), None)
        if at is None:
            return float("inf")  # one goes on where the other ended: no rounding of scores does that

        prompt = self.engine.prompt_ids(messages=item.messages)

        def scores() -> torch.Tensor:
            model = self.engine.reference()
            ids = torch.tensor([[*prompt, *a[:at]]], device=model.device)
            with torch.inference_mode():
                found: torch.Tensor = model(ids, use_cache=False).logits[0, -1].float()
            return found

        row = self.engine.compute(scores)
        return abs(float(row[a[at]] - row[b[at]]))


def measure(engine: Engine, items: Sequence[TrafficItem], arguments: argparse.Namespace) -> dict[str, Any]:
    """Everything about one dtype."""
    work = Numerics(engine, arguments)
    arms = [
        Arm(numerics, drafts, concurrency)
        for concurrency in (1, arguments.concurrency)
        for drafts in ("none", "trees")
        for numerics in ("fast", "strict")
    ]
    answers: Answers = {arm: {} for arm in arms}
    ratios: dict[tuple[str, int], list[float]] = defaultdict(list)
    for begin in range(0, len(items), arguments.block):
        block = items[begin : begin + arguments.block]
        seconds: dict[Arm, float] = {}
        turn = (begin // arguments.block) % 2
        asked = [arm for arm in arms if arm.numerics == "fast" or begin < arguments.strict_limit]
        for arm in asked[:: -1 if turn else 1]:
            found, seconds[arm] = work.serve(arm, block)
            answers[arm].update(found)
        for arm in asked:
            if arm.numerics == "strict":
                fast = arm._replace(numerics="fast")
                ratios[arm.drafts, arm.concurrency].append(seconds[arm] / seconds[fast])
    bound = tie_bound(engine.target.dtype)
    return {
        "kernel": work.kernel,
        "strict_seconds_to_load": work.seconds_to_load,
        "bound": bound,
        "answers": [differences(work, items, answers, arm, bound) for arm in arms if answers[arm]],
        "any_fast_arm": different_anywhere(answers),
        "passes": work.passes,
        "cost": [
            {"drafts": drafts, "concurrency": concurrency, "blocks": len(values)}
            | dict(zip(("ratio", "low", "high"), median_interval(values), strict=True))
            for (drafts, concurrency), values in ratios.items()
        ],
    }


def different_anywhere(answers: Answers) -> dict[str, Any]:
    """Requests that some arm of ``fast`` answers otherwise than ``fast`` does alone without drafts."""
    plain = answers[Arm("fast", "none", 1)]
    others = [found for arm, found in answers.items() if arm.numerics == "fast"]
    count = sum(any(found.get(at, answer) != answer for found in others) for at, answer in plain.items())
    return {"requests": len(plain), "different": count, "share": count / max(1, len(plain))}


def differences(
    work: Numerics, items: Sequence[TrafficItem], answers: Answers, arm: Arm, bound: float
) -> dict[str, Any]:
    """How many answers of ``arm`` are not those of the same numerics alone without drafts."""
    plain = answers[Arm(arm.numerics, "none", 1)]
    gaps = [
        work.gap(item, plain[item.index], answers[arm][item.index])
        for item in items
        if item.index in plain and item.index in answers[arm]
        if plain[item.index] != answers[arm][item.index]
    ]
    return {
        **arm._asdict(),
        "requests": len(answers[arm]),
        "different": len(gaps),
        "share": len(gaps) / max(1, len(answers[arm])),
        "largest_gap": max(gaps, default=0.0),
        "beyond_bound": sum(gap > bound for gap in gaps),
    }


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line.

    Raises:
        InvalidValueError: A number that is out of range, or limits that do not go with the number types.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--traffic", default="examples/traffic/mixed.jsonl")
    parser.add_argument("--config", default="configs/demo.yaml")
    parser.add_argument(
        "--limit",
        type=int,
        nargs="+",
        help="first N requests, a number for each dtype [300 float32, 60 others]",
    )
    parser.add_argument(
        "--strict-limit", type=int, default=32, help="requests answered under strict too, whole blocks"
    )
    parser.add_argument("--rounds", type=int, default=30, help="pairs of passes timed of each shape")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--concurrency", type=int, default=16, help="of the batched arms")
    parser.add_argument("--block", type=int, default=16, help="requests that every arm answers in turn")
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"], help="number types")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the result to this file")
    found = parser.parse_args(arguments)
    for name, least in (
        ("max_tokens", 1),
        ("concurrency", 2),
        ("block", 1),
        ("rounds", 2),
        ("strict_limit", 0),
    ):
        if getattr(found, name) < least:
            raise InvalidValueError("--" + name.replace("_", "-"), getattr(found, name), f"at least {least}")
    if found.limit is None:
        found.limit = [LIMITS.get(dtype, LIMITS["bfloat16"]) for dtype in found.dtype]
    if min(found.limit) < 1 or len(found.limit) != len(found.dtype):
        raise InvalidValueError("--limit", found.limit, f"a positive number for each of {found.dtype}")
    return found


def main(words: Sequence[str] | None = None) -> None:
    arguments = parse_arguments(words)
    config = load_config(arguments.config)
    result: dict[str, Any] = {"provenance": provenance(arguments.seed, config=arguments.config)}
    options = EngineOptions(learn=False, keep_state=False, slots=arguments.concurrency, seed=arguments.seed)
    for dtype, limit in zip(arguments.dtype, arguments.limit, strict=True):
        items = read_traffic(arguments.traffic, limit)
        target = config.target.model_copy(update={"dtype": dtype, "numerics": "fast"})
        with Engine.from_config(config.model_copy(update={"target": target}), options) as engine:
            result[dtype] = found = measure(engine, items, arguments)
        show(dtype, found)
    text = json.dumps(result, default=str)
    if arguments.json:
        arguments.json.write_text(text, encoding="utf-8")
    print(text)


def show(dtype: str, found: dict[str, Any]) -> None:
    """Print what was found of one number type."""
    print(f"{dtype}: strict by {found['kernel']}, checked in {found['strict_seconds_to_load']:.1f} s")
    for shape, row in found["passes"].items():
        print(
            f"  {shape}: fast {row['fast_ms']:.2f} ms, strict {row['strict_ms']:.2f} ms, "
            f"{row['ratio']:.2f} × ({row['low']:.2f} to {row['high']:.2f})"
        )
    anywhere = found["any_fast_arm"]
    print(f"  fast: {anywhere['different']} of {anywhere['requests']} differ in some arm")
    for row in found["answers"]:
        print(
            f"  {row['numerics']:>6}, drafts {row['drafts']:>5}, {row['concurrency']:2} at once: "
            f"{row['different']:3} of {row['requests']} differ, largest gap {row['largest_gap']:.2g}, "
            f"{row['beyond_bound']} beyond the bound of {found['bound']:g}"
        )
    for row in found["cost"]:
        print(
            f"  strict takes {row['ratio']:.2f} × the time of fast ({row['low']:.2f} to {row['high']:.2f}), "
            f"drafts {row['drafts']}, {row['concurrency']} at once",
            flush=True,
        )


if __name__ == "__main__":
    main()
