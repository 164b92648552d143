"""Milliseconds of a decode pass on a GPU by rows and tokens per row, launched kernel by kernel and replayed.

A pass of few tokens is bound by reading the weights, if launching its kernels does not take longer. So two
targets are timed: SmolLM2-135M, where launches are all, and an 8B model of Llama's shape with random
weights (built here, in bfloat16, nothing is downloaded), where the weights are. Both ways run in turn, the
whole round repeated; a figure is the median. `floor` is the time that reading the weights once takes at the
bandwidth that a plain copy on this device reaches.

    python benchmarks/gpu_steps.py --models embedded llama-8b

Tokens/s is rows * width / time: what verification could hand out if every draft were right; at width 1 it is
plain decoding. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from osd.serve.cache import SlotCache
from osd.serve.graphs import GraphedTarget
from osd.serve.load import build_target, load_target
from osd.serve.target import PassRow, timed
from router.app.provenance import provenance

LLAMA_8B: dict[str, Any] = {
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--models", nargs="+", choices=["embedded", "llama-8b"], default=["embedded", "llama-8b"]
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8, 16, 32])
    parser.add_argument("--widths", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--context", type=int, default=512, help="committed tokens per row")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--json", type=Path, help="write the result to this file")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("skipped: this benchmark times a CUDA device, and torch sees none here")
        sys.exit(0)
    device = torch.device("cuda")
    result: dict[str, Any] = {"provenance": provenance(0), "context": arguments.context, "models": {}}
    for name in arguments.models:
        target = make(name, device)
        floor = weight_bytes(target) / copy_bandwidth(device) * 1e3
        print(f"\n{name} ({target.dtype}), weights read once: {floor:.2f} ms")
        print(
            f"{'rows':>5} {'width':>6} {'launched':>9} {'replayed':>9} {'speed-up':>9} "
            f"{'tokens/s':>9} {'floor':>6}"
        )
        found = measure(target, arguments.rows, arguments.widths, arguments.context, arguments.repeats)
        for row in found:
            row["floor_share"] = floor / row["replayed_ms"]
            print(
                f"{row['rows']:5} {row['width']:6} {row['launched_ms']:9.3f} {row['replayed_ms']:9.3f} "
                f"{row['launched_ms'] / row['replayed_ms']:8.2f}× {row['tokens_per_second']:9.0f} "
                f"{row['floor_share']:5.0%}"
            )
        result["models"][name] = {"floor_ms": floor, "passes": found}
        del target
        torch.cuda.empty_cache()
    text = json.dumps(result)
    if arguments.json:
        arguments.json.write_text(text, encoding="utf-8")
    print(text)


def make(name: str, device: torch.device) -> GraphedTarget:
    """The target, its recorded passes proved equal by the probe."""
    if name == "embedded":
        target, _ = load_target(device="cuda", forward="lean")
    else:
        with device:
            model = AutoModelForCausalLM.from_config(LlamaConfig(**LLAMA_8B), dtype=torch.bfloat16)
        target = build_target(model, name=name, forward="lean")
    assert isinstance(target, GraphedTarget)
    if target.recorder is None:
        raise SystemExit(f"{name}: recorded passes did not prove equal; see the warning above")
    return target


def weight_bytes(target: GraphedTarget) -> int:
    """Bytes of the matrices that a pass reads."""
    return sum(
        matrix.plain.numel() * matrix.plain.element_size()
        for group in target.weights().values()
        for matrix in group
    )


def copy_bandwidth(device: torch.device, size: int = 1 << 30) -> float:
    """Bytes read per second by a plain copy, best of ten; reading and writing count alike."""
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / min(timed(partial(target.copy_, source), device) for _ in range(10))


def measure(
    target: GraphedTarget, rows: list[int], widths: list[int], context: int, repeats: int
) -> list[dict[str, float]]:
    """Median times of both ways for every shape."""
    slots = max(rows)
    cache = target.make_cache(slots, context + max(widths), keep_features=False)
    for _ in range(slots):
        row = cache.acquire()
        cache.reserve(row, 0, context)
        cache.commit(row, context)
    found: list[dict[str, float]] = []
    for count in rows:
        for width in widths:
            batch = [PassRow(slot, context, list(range(slot, slot + width))) for slot in range(count)]
            times: dict[bool, list[float]] = {True: [], False: []}
            for turn in range(repeats + 2):
                for replayed in (True, False):
                    seconds = one(target, cache, batch, replayed)
                    if turn >= 2:  # the first passes record, and load kernels
                        times[replayed].append(seconds * 1e3)
            replayed_ms, launched_ms = statistics.median(times[True]), statistics.median(times[False])
            found.append(
                {
                    "rows": count,
                    "width": width,
                    "replayed_ms": replayed_ms,
                    "launched_ms": launched_ms,
                    "tokens_per_second": count * width / replayed_ms * 1e3,
                }
            )
    return found


def one(target: GraphedTarget, cache: SlotCache, batch: list[PassRow], replayed: bool) -> float:
    """Seconds of one pass, replayed where a bucket holds it, or packed."""
    recorder = target.recorder
    if not replayed:
        target.recorder = None
    try:
        return timed(partial(target.forward, cache, batch), target.device)
    finally:
        target.recorder = recorder


if __name__ == "__main__":
    main()
