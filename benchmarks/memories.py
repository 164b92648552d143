"""Do memories specialise? The memory of every label drafting for the prompts of every other.

The target answers some requests of each label once. An ngram memory of each label learns all but the last
``--held-out`` answers; then every memory is scored on every label's held-out answers: tokens per target
pass had that memory alone drafted chains of ``--depth``. No model is needed for scoring, since verified
text tells what would have been accepted.

    python benchmarks/memories.py --traffic a.jsonl b.jsonl --per-label 60

With ``--suffix`` the back-off counts are compared with suffix trees (``suffix_memory.py``): every request is
scored before it is learned. ``--shards`` takes answers recorded in shards (:mod:`osd.learn.pretrain_data`)
instead of asking the target:

    python benchmarks/memories.py --shards answers/*.json --labels math code sql translation qa --suffix

The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from learning import by_label
from suffix_memory import Text, compare

from drafts.kinds.ngram import NgramSource
from router.app.inflight import keep_in_flight
from router.app.local import local_engine
from router.app.provenance import provenance
from router.app.replay import ReplaySettings
from router.app.traffic import TrafficItem


def answers(groups: dict[str, list[TrafficItem]], arguments: argparse.Namespace) -> dict[str, list[Text]]:
    """The target's own answers by label, in order."""
    settings = ReplaySettings(concurrency=arguments.concurrency, seed=arguments.seed, freeze=True, sources=())
    sampling = {"max_tokens": arguments.max_tokens, "temperature": 0.0}
    texts: dict[str, list[Text]] = {}
    with local_engine(arguments.config, settings) as engine:
        for label, items in groups.items():
            served = keep_in_flight(
                engine,
                items,
                concurrency=settings.concurrency,
                seed=settings.seed,
                sampling=sampling,
                store=False,
            )
            done = sorted((s for s in served if s.completion is not None), key=lambda s: s.item.index)
            texts[label] = []
            for item in done:
                prompt = engine.prompt_ids(messages=item.item.messages)
                texts[label].append(([*prompt, *item.completion.token_ids], len(prompt)))
    return texts


def recorded(shards: list[Path], arguments: argparse.Namespace) -> dict[str, list[Text]]:
    """The first answers of every label in shards, cut to ``--max-tokens``."""
    texts: dict[str, list[Text]] = {label: [] for label in arguments.labels or ()}
    for shard in shards:
        for entry in json.loads(shard.read_text(encoding="utf-8")):
            if arguments.labels and entry["domain"] not in texts:
                continue
            group = texts.setdefault(entry["domain"], [])
            if len(group) < arguments.per_label:
                tokens = [*entry["ids"], *entry["out"][: arguments.max_tokens]]
                group.append((tokens, len(entry["ids"])))
    return {label: group for label, group in texts.items() if len(group) > arguments.held_out}


def print_memories(found: dict[str, dict[str, dict[str, float]]]) -> None:
    """τ, microseconds of a proposal and kilobytes by label and kind of memory."""
    names = list(next(iter(found.values())))
    print("τ · microseconds a proposal (95th percentile) · KiB, every request scored before it is learned")
    print(" " * 15 + "".join(f"{name:>28}" for name in names))
    for label, row in found.items():
        cells = [
            f"{m['tau']:.3f} · {m['microseconds']:.0f} ({m['microseconds_p95']:.0f}) · {m['bytes'] // 1024}"
            for m in row.values()
        ]
        print(f"{label:15}" + "".join(f"{cell:>28}" for cell in cells))


def cross_table(texts: dict[str, list[Text]], held_out: int, depth: int) -> dict[str, dict[str, float]]:
    """τ by label of the prompts (outer) and label of the memory (inner)."""
    source = NgramSource()
    for label, group in texts.items():
        source.add_domain(f"memory of {label}")
        for tokens, prompt in group[:-held_out]:
            source.teach(f"memory of {label}", tokens, prompt)

    def mean(memory: str, group: list[Text]) -> float:
        scores = [source.score(f"memory of {memory}", tokens, prompt, depth) for tokens, prompt in group]
        return sum(scores) / len(scores)

    return {
        label: {memory: mean(memory, group[-held_out:]) for memory in texts} for label, group in texts.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--traffic", nargs="+", default=["examples/traffic/mixed.jsonl"])
    parser.add_argument("--config", default="configs/demo.yaml")
    parser.add_argument("--per-label", type=int, default=60)
    parser.add_argument("--labels", nargs="*", help="only these labels")
    parser.add_argument("--held-out", type=int, default=20)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--suffix", action="store_true", help="compare with suffix trees instead")
    parser.add_argument("--shards", nargs="+", type=Path, help="answers recorded in these shards (.json)")
    parser.add_argument("--json", type=Path, help="write the result to this file")
    arguments = parser.parse_args()

    if arguments.shards:
        texts = recorded(arguments.shards, arguments)
    else:
        texts = answers(by_label(arguments.traffic, arguments.per_label, arguments.labels), arguments)
    if arguments.suffix:
        found = compare(texts, arguments.depth)
        print_memories(found)
        finish(arguments, {"memories": found})
        return
    table = cross_table(texts, arguments.held_out, arguments.depth)
    print("τ on prompts of (row) with the memory of (column); * = the best memory of the row")
    print(" " * 15 + "".join(f"{name:>15}" for name in table))
    for label, row in table.items():
        best = max(row.values())
        print(
            f"{label:15}"
            + "".join(f"{value:13.2f} {'*' if value == best else ' '}" for value in row.values())
        )
    own_best = [label for label, row in table.items() if max(row, key=row.__getitem__) == label]
    print(f"own memory best for {len(own_best)} of {len(table)}: {', '.join(own_best)}")
    finish(arguments, {"tau": table, "own_best": own_best})


def finish(arguments: argparse.Namespace, result: dict[str, Any]) -> None:
    """Write the result with where it comes from, and print it as the last line."""
    text = json.dumps({**result, "provenance": provenance(arguments.seed)})
    if arguments.json:
        arguments.json.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
