"""Speed against ``model.generate`` and against this engine without drafts.

At concurrency 1 a target pass is bound by reading the weights, so every accepted draft token is nearly
free; at concurrency 8 on a CPU it is bound by arithmetic, and the controller must know when to stop
guessing. Requests run in blocks that every way of decoding answers in turn; a figure is the median of the
paired ratios, with the lower end of its 95 % bootstrap interval.

    python benchmarks/speed.py --traffic examples/traffic/mixed.jsonl --limit 80

The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from router.app.local import local_engine
from router.app.provenance import provenance
from router.app.replay import ReplaySettings, replay
from router.app.traffic import read_traffic


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--traffic", default="examples/traffic/mixed.jsonl")
    parser.add_argument("--config", default="configs/demo.yaml")
    parser.add_argument("--limit", type=int, help="first N requests only")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--freeze", action="store_true", help="no learning")
    parser.add_argument("--json", type=Path, help="write the result to this file")
    arguments = parser.parse_args()

    items = read_traffic(arguments.traffic, arguments.limit)
    result = {"provenance": provenance(arguments.seed, config=arguments.config)}
    print(
        f"{'concurrency':>11} {'against':>9} {'tokens/s':>9} {'polydraft':>9} "
        f"{'speed-up':>9} {'lower':>7} {'τ':>6}"
    )
    for concurrency in arguments.concurrency:
        settings = ReplaySettings(
            concurrency=concurrency,
            max_tokens=arguments.max_tokens,
            seed=arguments.seed,
            compare=("plain", "generate") if concurrency == 1 else ("plain",),
            freeze=arguments.freeze,
        )
        with local_engine(arguments.config, settings) as engine:
            run = replay(engine, items, settings)
        tau = run["overall"]["mean_accepted_length"]
        for name, row in run["compare"].items():
            print(
                f"{concurrency:11} {name:>9} {row['tokens_per_second']:9.1f} "
                f"{row['speculative_tokens_per_second']:9.1f} {row['speedup']:8.2f}× "
                f"{row['speedup_low']:6.2f}× {tau:6.2f}",
                flush=True,
            )
        result[str(concurrency)] = {key: run[key] for key in ("overall", "compare", "learning", "failed")}
    text = json.dumps(result, default=str)
    if arguments.json:
        arguments.json.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
