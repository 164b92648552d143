"""How near is a target pass to what this machine can do at all, and where does a step's time go?

A pass over one row must read every weight once, so its floor is the weights' bytes over the bandwidth at
which this machine reads these very tensors with the same threads: several ways are tried and the fastest
counts. A compiled pass reads the weights in a smaller form that decodes to them exactly, whose floor is
given too. Then: the plain pass against the floors, passes over more rows against the pass over one, where the
compiled pass that is served spends its time by group of kernels, a profile of the library pass that stands in
for it elsewhere, and the parts of the engine's step over real requests.

    python benchmarks/floor.py --dtype float32,bfloat16 --json floor.json

The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from floor_parts.machine import ONE_LINER, bandwidth, flops, weight_bytes
from floor_parts.passes import pass_costs, profile_pass
from floor_parts.served import served_profile
from floor_parts.steps import step_parts

from router.app.local import local_engine
from router.app.provenance import provenance
from router.app.replay import ReplaySettings
from router.app.traffic import TrafficItem, read_traffic
from router.config import load_config

MODES: dict[str, dict[str, Any]] = {
    "plain": {"sources": (), "learn": False, "k": None},
    "frozen": {"sources": None, "learn": False, "k": None},
    "learning": {"sources": None, "learn": True, "k": None},
}


def machine_and_passes(target: Any, seconds: float) -> dict[str, Any]:
    """Bandwidth, FLOP/s, floor, passes and profile of one target; runs on the engine's thread."""
    weights = target.weights()
    tensors = [matrix.plain for group in weights.values() for matrix in group]
    speeds = bandwidth(tensors, seconds)
    best = max(speeds.values())
    size = weight_bytes(tensors)
    costs = pass_costs(target, 2 * seconds)
    speeds_after = bandwidth(tensors, seconds)
    best = max(best, *speeds_after.values())
    floor = size / best / 1e6
    one = costs["one request"][1]
    return {
        "threads": torch.get_num_threads(),
        "weight_bytes": size,
        "gb_per_second": {name: max(speeds[name], speeds_after[name]) for name in speeds},
        "best_gb_per_second": best,
        "gflop_per_second": flops(target.dtype),
        "floor_ms": floor,
        "reading_again": ONE_LINER.format(dtype=str(target.dtype).removeprefix("torch.")),
        "stored": stored_form(target, best),
        "plain_pass_ms": one,
        "plain_pass_over_floor": {key: value / floor for key, value in one.items()},
        "passes_ms": costs,
        "passes_over_one_row": {
            kind: {count: ms["median"] / one["median"] for count, ms in by_count.items()}
            for kind, by_count in costs.items()
        },
        "products": getattr(getattr(target, "plan", None), "names", None),
        "served_profile": served_profile(target),
        "library_profile": library_profile(target, weights),
    }


def stored_form(target: Any, best: float) -> dict[str, Any] | None:
    """What a compiled pass reads instead: the weights in the form in which they decode exactly."""
    native = getattr(target, "native", None)
    if native is None:
        return None
    size = sum(tiles.data.numel() for tiles in native.tiles.values())
    return {
        "bytes": size,
        "formats": {role: tiles.format.key for role, tiles in native.tiles.items()},
        "floor_ms": size / best / 1e6,
        "most_tokens": target.limit,
    }


def library_profile(target: Any, weights: Any) -> list[Any]:
    """Where a pass of library calls spends its time, which compiled passes stand in for in serving."""
    limit = getattr(target, "limit", None)
    if limit is not None:
        target.limit = 0
    found = [profile_pass(target, weights, rows) for rows in (1, 4)]
    if limit is not None:
        target.limit = limit
    return found


def measure(arguments: argparse.Namespace, dtype: str, items: list[TrafficItem]) -> dict[str, Any]:
    """Everything for one number type."""
    config = load_config(arguments.config)
    target = config.target.model_copy(update={"dtype": dtype, "device": "cpu"})
    config = config.model_copy(update={"target": target})
    settings = ReplaySettings(concurrency=max(arguments.concurrency), seed=arguments.seed)
    with local_engine(config, settings) as engine:
        engine.set_mode(sources=(), learn=False, k=None)
        found = engine.compute(partial(machine_and_passes, engine.target, arguments.seconds))  # type: ignore[attr-defined]
        show_passes(dtype, found)
        found["steps"] = {}
        for concurrency in arguments.concurrency:
            for name, mode in MODES.items():
                entry = step_parts(engine, items, concurrency, arguments.max_tokens, mode)
                found["steps"][f"{name} {concurrency}"] = entry
                show_step(f"{name}, {concurrency} in flight", entry)
    return found


def show_passes(dtype: str, found: dict[str, Any]) -> None:
    """Print the machine's figures, the passes' and the profile."""
    print(f"\n{dtype}: {found['weight_bytes'] / 1e6:.1f} MB of weights, {found['threads']} threads")
    for name, speed in found["gb_per_second"].items():
        print(f"  read by {name:16} {speed:7.1f} GB/s")
    print(f"  product of squares      {found['gflop_per_second']:7.1f} GFLOP/s")
    least = found["plain_pass_ms"]["least"]
    print(
        f"  floor of a pass {found['floor_ms']:.2f} ms; plain pass {least:.2f} ms (least), "
        f"{found['plain_pass_ms']['median']:.2f} ms (median): {least / found['floor_ms']:.2f} times the floor"
    )
    if found["stored"] is not None:
        stored = found["stored"]
        print(
            f"  passes of up to {stored['most_tokens']} tokens read {stored['bytes'] / 1e6:.1f} MB "
            f"({', '.join(sorted(set(stored['formats'].values())))}): floor {stored['floor_ms']:.2f} ms, "
            f"plain pass {least / stored['floor_ms']:.2f} times that"
        )
    for kind, by_count in found["passes_ms"].items():
        ratios = found["passes_over_one_row"][kind]
        cells = (f"{n}: {ms['median']:.1f} ms ({ratios[n]:.2f}×)" for n, ms in by_count.items())
        print(f"  rows of {kind}: " + ", ".join(cells))
    for shape, entry in (found["served_profile"] or {}).items():
        parts = ", ".join(f"{name} {ms:.2f}" for name, ms in entry["groups_ms"].items())
        print(f"  the compiled pass over {shape}, {entry['pass_ms']:.2f} ms, by group of kernels: {parts}")
    for entry in found["library_profile"]:
        took = entry["profiled_ms"]
        print(
            f"  a pass of library calls over {entry['rows']} row(s), {entry['pass_ms']:.2f} ms, "
            f"{took:.2f} ms under the profiler, by kind of work:"
        )
        for name, ms in entry["groups"].items():
            print(f"    {name:22} {ms:7.2f} ms {100 * ms / took:5.1f} %")
    print("  the reading by max again, by itself:\n" + ONE_LINER.format(dtype=dtype), flush=True)


def show_step(title: str, entry: dict[str, Any]) -> None:
    """Print the parts of a step."""
    parts = ", ".join(f"{name} {ms:.2f}" for name, ms in entry["parts_ms"].items())
    print(
        f"  step ({title}): {entry['step_ms']:.2f} ms, {entry['tokens_per_step']:.2f} tokens, "
        f"{entry['tokens_per_second']:.1f} tokens/s; ms by part: {parts}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", default="float32", help="float32, bfloat16, or both as a list")
    parser.add_argument("--config", default="configs/demo.yaml")
    parser.add_argument("--traffic", default="examples/traffic/mixed.jsonl")
    parser.add_argument("--limit", type=int, default=12, help="requests served for the parts of a step")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--concurrency", default="1,8", help="requests in flight, a list")
    parser.add_argument("--seconds", type=float, default=3.0, help="time for reading the weights, twice")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the result to this file")
    arguments = parser.parse_args()
    arguments.concurrency = [int(part) for part in arguments.concurrency.split(",")]

    items = read_traffic(arguments.traffic, arguments.limit)
    result: dict[str, Any] = {dtype: measure(arguments, dtype, items) for dtype in arguments.dtype.split(",")}
    result["provenance"] = provenance(arguments.seed, traffic=Path(arguments.traffic).name)
    text = json.dumps(result)
    if arguments.json:
        arguments.json.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
