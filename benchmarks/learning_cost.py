"""What does learning cost the requests? Throughput while learning against the same drafts frozen.

Blocks of requests are answered twice by one engine: first frozen, which teaches nothing, then learning. So
both begin a block with the same memories and experts, and the learning arm has to pay for its updates and
evidence with what they bring. Every prompt is routed beforehand, since a cached embedding would favour the
second arm; so routing is in neither. How much each source is trusted is learned in both arms.
The figure is the median of the paired ratios with its 95 % bootstrap interval.

    python benchmarks/learning_cost.py --traffic examples/traffic/mixed.jsonl --limit 96

The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from router.app.arms import EngineArm
from router.app.local import local_engine
from router.app.paired import median_interval
from router.app.provenance import provenance
from router.app.replay import ReplaySettings
from router.app.traffic import read_traffic

LEARNED = ("updates", "published", "rolled_back", "rejected", "scored", "seconds_by_part")
"""What of the engine's learning figures goes into the result."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--traffic", default="examples/traffic/mixed.jsonl")
    parser.add_argument("--config", default="configs/demo.yaml")
    parser.add_argument("--limit", type=int, default=96)
    parser.add_argument("--block", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the result to this file")
    arguments = parser.parse_args()

    items = read_traffic(arguments.traffic, arguments.limit)
    settings = ReplaySettings(concurrency=arguments.concurrency, seed=arguments.seed)
    ratios: list[float] = []
    with local_engine(arguments.config, settings) as engine:

        def arm(learn: bool, max_tokens: int) -> EngineArm:
            mode = {"sources": None, "learn": learn, "k": None}
            sampling = {"max_tokens": max_tokens, "temperature": 0.0}
            return EngineArm(engine, mode, arguments.concurrency, arguments.seed, sampling, store=learn)

        for start in range(0, len(items), arguments.block):
            block = items[start : start + arguments.block]
            arm(False, 1).run(block)
            frozen = arm(False, arguments.max_tokens).run(block)
            learning = arm(True, arguments.max_tokens).run(block)
            if learning.answers != frozen.answers:
                print("answers differ (near ties, or a refused request)")
            speeds = [sum(map(len, run.answers.values())) / run.seconds for run in (learning, frozen)]
            ratios.append(speeds[0] / speeds[1])
            print(
                f"requests {start + len(block):4}: learning {speeds[0]:6.1f} tokens/s, "
                f"frozen {speeds[1]:6.1f}, ratio {ratios[-1]:.3f}",
                flush=True,
            )
        learned = {name: engine.stats()["learning"].get(name, 0) for name in LEARNED}
    ratio, low, high = median_interval(ratios, arguments.seed)
    print(f"learning / frozen: {ratio:.3f} (95 % {low:.3f} … {high:.3f})")
    result = {
        "ratio": ratio,
        "low": low,
        "high": high,
        "ratios": ratios,
        "concurrency": arguments.concurrency,
        "learning": learned,
        "provenance": provenance(arguments.seed, config=arguments.config),
    }
    text = json.dumps(result)
    if arguments.json:
        arguments.json.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
