"""Does learning while serving help? Tokens per target pass with learning and without, label by label.

For each label of the traffic, the same requests are served twice in the same order from an empty state:
once learning, once with everything frozen. What is compared is the mean accepted length τ (tokens per
target pass) over the last requests, which never taught anything before they were answered. The interval of
the difference is a paired bootstrap over requests.

    python benchmarks/learning.py --traffic a.jsonl b.jsonl --per-label 60

The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from router.app.inflight import keep_in_flight
from router.app.local import local_engine
from router.app.paired import RESAMPLES
from router.app.provenance import provenance
from router.app.replay import ReplaySettings
from router.app.traffic import TrafficItem, read_traffic

Counts = dict[int, tuple[int, int]]

LEARNED = ("updates", "published", "rolled_back", "rejected", "share_of_busy_time")
"""What of the engine's learning figures goes into the result."""


def by_label(files: list[str], count: int, labels: list[str] | None = None) -> dict[str, list[TrafficItem]]:
    """The first ``count`` requests of every label (or of the named ones), files in order."""
    groups: dict[str, list[TrafficItem]] = {}
    for file in files:
        for item in read_traffic(file):
            name = item.label or Path(file).stem
            if labels and name not in labels:
                continue
            group = groups.setdefault(name, [])
            if len(group) < count:
                group.append(item)
    return groups


def serve(
    items: list[TrafficItem], arguments: argparse.Namespace, freeze: bool
) -> tuple[Counts, dict[str, float]]:
    """Tokens and target passes of every request, from an empty state; and what was learned."""
    settings = ReplaySettings(
        concurrency=arguments.concurrency, seed=arguments.seed, freeze=freeze, k=arguments.k
    )
    sampling = {"max_tokens": arguments.max_tokens, "temperature": 0.0}
    with local_engine(arguments.config, settings) as engine:
        served = keep_in_flight(
            engine, items, concurrency=settings.concurrency, seed=settings.seed, sampling=sampling
        )
        learned = {name: engine.stats()["learning"].get(name, 0) for name in LEARNED}
    done = [s for s in served if s.completion is not None]
    counts = {
        at: (len(s.completion.token_ids), len(s.completion.rounds))
        for at, item in enumerate(items)
        for s in done
        if s.item is item and s.completion is not None
    }
    return counts, learned


def compare(learning: Counts, frozen: Counts, last: int, seed: int) -> dict[str, float]:
    """τ of the last requests in both runs, and the paired bootstrap interval of the difference."""
    places = sorted(set(learning) & set(frozen))[-last:]
    a, b = (np.array([run[at] for at in places], dtype=float) for run in (learning, frozen))
    picks = np.random.default_rng(seed).integers(0, len(places), size=(RESAMPLES, len(places)))

    def tau(counts: np.ndarray) -> np.ndarray:
        totals = counts.sum(axis=-2)
        return totals[..., 0] / totals[..., 1]

    low, high = np.quantile(tau(a[picks]) - tau(b[picks]), [0.025, 0.975])
    learned, plain = float(tau(a)), float(tau(b))
    return {
        "requests": len(places),
        "learning": learned,
        "frozen": plain,
        "gain": learned - plain,
        "low": float(low),
        "high": float(high),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--traffic", nargs="+", default=["examples/traffic/mixed.jsonl"])
    parser.add_argument("--config", default="configs/demo.yaml")
    parser.add_argument("--per-label", type=int, default=60)
    parser.add_argument("--labels", nargs="*", help="only these labels")
    parser.add_argument("--last", type=int, default=20)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("--k", type=int, help="fixed speculation length")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the result to this file")
    arguments = parser.parse_args()

    rows: dict[str, dict[str, float]] = {}
    print(f"{'label':15} {'requests':>8} {'frozen':>7} {'learning':>8} {'gain':>6}   95 % interval")
    for label, items in by_label(arguments.traffic, arguments.per_label, arguments.labels).items():
        learning, learned = serve(items, arguments, freeze=False)
        frozen, _ = serve(items, arguments, freeze=True)
        row = rows[label] = compare(learning, frozen, arguments.last, arguments.seed) | learned
        print(
            f"{label:15} {row['requests']:8} {row['frozen']:7.2f} {row['learning']:8.2f} "
            f"{row['gain']:+6.2f}   {row['low']:+.2f} … {row['high']:+.2f}   "
            f"{row['published']:.0f} of {row['updates']:.0f} updates published",
            flush=True,
        )
    text = json.dumps({"labels": rows, "provenance": provenance(arguments.seed, config=arguments.config)})
    if arguments.json:
        arguments.json.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
