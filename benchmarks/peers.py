"""Polydraft against the other ways to decode the same prompts, in one run.

Every arm has the same target in the same number type, the same token ids, the same limits, greedy, and the
same number of requests in flight. The prompts are cut into blocks; within a block every arm answers the
same prompts, in an order shuffled by the seed, while the others are idle. A ratio is the median over the
paired blocks with its 95 % bootstrap interval: a shared machine changes its speed from minute to minute, so
only neighbours in time are compared. Each concurrency begins with fresh engines and processes, so that
nothing that remembers answers (our memories, vLLM's suffix trees and prefix cache) meets a prompt again.
Within a block the learning engine comes after the frozen one, which shares its memories.

    python benchmarks/peers.py --traffic mix.jsonl --limit 64 --max-tokens 128 --concurrency 1,4,16

vLLM and FlashSpec run in an environment of their own (``make peers-venv``); an arm that cannot run is
listed as skipped, with the reason. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peer_arms.blocks import measure
from peer_arms.in_engine import MODES, EngineArm, rest
from peer_arms.in_processes import PeerProcesses
from peer_arms.in_transformers import transformers_arm
from peer_arms.measured import PeerArm, Prompt
from peer_arms.reference import TIES, Reference, equal_outputs
from peer_arms.show import plot, table
from peer_arms.summary import ARMS, Measurements, document
from peer_arms.venv import default_venv, ensure_venv, preloaded

from drafts.errors import InvalidValueError, UnknownNameError
from osd.serve.embedded import EMBEDDED, embedded_folder
from router.app.arms import ReplayEngine
from router.app.compare import block_size, split_blocks
from router.app.local import local_engine
from router.app.provenance import provenance
from router.app.replay import ReplaySettings
from router.app.traffic import TrafficItem, read_traffic
from router.config import PolydraftConfig, load_config

WARM_UP = (
    "Name three colours.",
    "What is 7 times 8?",
    "Write a short poem about rain.",
    "Say hello in French.",
)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line.

    Raises:
        UnknownNameError: an arm that does not exist.
        InvalidValueError: a concurrency that is no positive number, or a count below 1.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--traffic", default="examples/traffic/mixed.jsonl")
    parser.add_argument("--config", default="configs/demo.yaml")
    parser.add_argument("--limit", type=int, default=64, help="first N requests only")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--concurrency", default="1,4,16", help="requests in flight, a list")
    parser.add_argument("--arms", default=",".join(ARMS), help="a list; all by default")
    parser.add_argument("--dtype", choices=sorted(TIES), default="float32")
    parser.add_argument("--block", type=int, help="prompts a block instead of what the concurrency suggests")
    parser.add_argument("--assistant-layers", type=int, default=3, help="layers of the assisted arm's draft")
    parser.add_argument("--vllm-venv", type=Path, help="environment of vLLM and FlashSpec, made if absent")
    parser.add_argument("--vllm-eager", action="store_true", help="vLLM without compilation")
    parser.add_argument("--make-venv", action="store_true", help="only make the peers' environment")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the result to this file")
    parser.add_argument("--plot", type=Path, help="write a plot to this HTML file")
    found = parser.parse_args(arguments)
    found.concurrency = [_positive("--concurrency", text) for text in _listed(found.concurrency)]
    found.arms = _listed(found.arms)
    for name in found.arms:
        if name not in ARMS:
            raise UnknownNameError("--arms", name, list(ARMS))
    for name in ("limit", "max_tokens", "assistant_layers"):
        _positive("--" + name.replace("_", "-"), getattr(found, name))
    found.vllm_venv = found.vllm_venv or default_venv()
    return found


def bench_config(path: str, dtype: str) -> PolydraftConfig:
    """The deployment, in the wanted number type; no embedding is remembered, so every arm routes anew."""
    config = load_config(path)
    target = config.target.model_copy(update={"dtype": dtype, "device": "cpu"})
    router = config.router.model_copy(update={"cache_size": 1})
    return config.model_copy(update={"target": target, "router": router})


def usable_prompts(engine: ReplayEngine, items: Sequence[TrafficItem], max_tokens: int) -> list[Prompt]:
    """The requests whose prompt and longest answer fit."""
    found = []
    for item in items:
        try:
            ids = engine.prompt_ids(messages=item.messages)
        except InvalidValueError:
            continue
        if len(ids) + max_tokens <= engine.max_length:
            found.append(Prompt(item, ids))
    return found


def main() -> None:
    arguments = parse_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if arguments.make_venv:
        ensure_venv(arguments.vllm_venv)
        return
    config = bench_config(arguments.config, arguments.dtype)
    if config.target.model != EMBEDDED:
        raise InvalidValueError(
            "target.model", config.target.model, f"{EMBEDDED!r}: all arms load its folder"
        )
    folder = embedded_folder(config.target.cache_dir)
    items = read_traffic(arguments.traffic, arguments.limit)
    logs = Path(tempfile.mkdtemp(prefix="peers-"))
    limit = config.engine.max_length
    processes = PeerProcesses(arguments.vllm_venv, folder, arguments.dtype, limit, logs, arguments.vllm_eager)
    results: dict[int, Measurements] = {}
    gaps: dict[int, dict[str, dict[int, float | None]]] = {}
    reference: Reference | None = None
    prompts: list[Prompt] = []
    for concurrency in arguments.concurrency:
        settings = ReplaySettings(concurrency=concurrency, seed=arguments.seed)
        with local_engine(config, settings) as engine:
            rest(engine)
            if reference is None:
                prompts = usable_prompts(engine, items, arguments.max_tokens)
                reference = Reference(engine, folder)
                print(f"the reference answers {len(prompts)} prompts ...", flush=True)
                reference.answer(prompts, arguments.max_tokens)
            reference.engine = engine

            def make(name: str, engine: ReplayEngine = engine, concurrency: int = concurrency) -> PeerArm:
                if name in MODES:
                    return EngineArm(engine, name, concurrency)
                if name in ("generate", "prompt_lookup", "assisted"):
                    return transformers_arm(name, engine, concurrency, arguments.assistant_layers)
                return processes.arm(name, concurrency, sorted(engine.eos_token_ids))

            size = arguments.block or block_size(len(prompts), concurrency)
            by_item = {prompt.index: prompt for prompt in prompts}
            blocks = [
                [by_item[item.index] for item in block]
                for block in split_blocks([prompt.item for prompt in prompts], size)
            ]
            print(f"{concurrency} in flight, {len(blocks)} blocks of {size} prompts", flush=True)
            measured = results[concurrency] = measure(
                make,
                arguments.arms,
                blocks,
                warm_up_prompts(engine, concurrency),
                arguments.max_tokens,
                arguments.seed,
                say=lambda text: print("  " + text, flush=True),
            )
            gaps[concurrency] = {
                name: {
                    i: reference.gap(by_item[i], a.tokens)
                    for run in measured.runs(name)
                    for i, a in run.answers.items()
                }
                for name in measured.names()
            }
    result = document(results, arguments.seed)
    for name, by_concurrency in result["arms"].items():
        for concurrency, figures in by_concurrency.items():
            figures["equal_outputs"] = equal_outputs(gaps[int(concurrency)][name], TIES[arguments.dtype])
    result["settings"] = {
        "model": "SmolLM2-135M-Instruct",
        "dtype": arguments.dtype,
        "prompts": len(prompts),
        "left_out": len(items) - len(prompts),
        "max_tokens": arguments.max_tokens,
        "concurrency": arguments.concurrency,
        "vllm_preloads": preloaded(arguments.vllm_venv),
    }
    result["provenance"] = provenance(
        arguments.seed,
        config=Path(arguments.config).name,
        traffic=Path(arguments.traffic).name,
    )
    print(table(result))
    if arguments.plot:
        plot(result, arguments.plot)
    text = json.dumps(result, allow_nan=False)
    if arguments.json:
        arguments.json.write_text(text, encoding="utf-8")
    print(text)


def warm_up_prompts(engine: ReplayEngine, concurrency: int) -> list[Prompt]:
    """A few prompts that are no part of the traffic, one for each request in flight."""
    found = []
    for place in range(concurrency):
        text = WARM_UP[place % len(WARM_UP)] + " Please." * (place // len(WARM_UP))
        messages = ({"role": "user", "content": text},)
        item = TrafficItem(index=-1 - place, line=0, messages=messages)
        found.append(Prompt(item, engine.prompt_ids(messages=messages)))
    return found


def _listed(text: str) -> list[str]:
    return list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def _positive(name: str, value: Any) -> int:
    try:
        number = int(value)
    except ValueError:
        number = 0
    if number < 1:
        raise InvalidValueError(name, value, "a positive number")
    return number


if __name__ == "__main__":
    main()
