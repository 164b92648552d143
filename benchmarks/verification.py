"""How often the shipped head is accepted under the two verification rules, and what siblings add.

The target answers every prompt by plain sampling; then, at every position of its answers, the head drafts
from the target's own features, led along the answer. With p the target's and q the head's distribution this
gives, without another target pass:

- ``invariant``: J(p, q), and for siblings the chance that the target's token is among the top w of
  log q + the same noise;
- ``rejection``: 1 - TV(p, q), and for w draws without replacement the chance that one of them is accepted;
- ``point``: the mass of p on the w most probable tokens of q (rejection sampling of tokens chosen without
  chance; under the invariant rule the same).

A chain's node is continued where it was accepted. The answers follow p, so position t + d counts with the
chance that the rule accepts the answer's own tokens t ... t + d - 1, divided by their probability: an
unbiased estimate. ``accepted`` is the expected number of accepted tokens a round for k positions with w
siblings each, of which the first is continued.

    python benchmarks/verification.py --prompts examples/traffic/mixed.jsonl --limit 20

The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from drafts.kinds.base import DraftRow, Draws
from osd.acceptance import coupled_acceptance, rejection_acceptance
from osd.serve.noise import RequestNoise
from osd.serve.shaping import shaped_logprobs
from osd.serve.target import PassRow
from osd.types import SamplingParams
from router.app.inflight import keep_in_flight
from router.app.local import local_engine
from router.app.provenance import provenance
from router.app.replay import ReplaySettings
from router.app.traffic import read_traffic

WIDTHS = (1, 2, 3)
DEPTH = 3
RULES = ("invariant", "rejection", "point")


@dataclass
class Pair:
    """p and q at one position over the head's candidates; the last entry is all other tokens (q = 0)."""

    p: torch.Tensor
    q: torch.Tensor
    said: int

    def continued(self) -> dict[str, float]:
        """Per rule, the chance that the first node is the answer's token and accepted, over its p."""
        x, p, q = self.said, self.p, self.q
        if q[x] == 0:
            return dict.fromkeys(RULES, 0.0)
        coupled = 1.0 / torch.maximum(p / p[x], q / q[x]).sum()
        return {
            "invariant": float(coupled / p[x]),
            "rejection": float((q[x] / p[x]).clamp(max=1.0)),
            "point": float(x == int(q.argmax())),
        }

    def accepted(self, draws: int, generator: torch.Generator) -> dict[str, list[float]]:
        """Per rule, the chance that one of the first w siblings is accepted, by w."""
        p, q = self.p, self.q
        noise = -torch.empty(draws, len(q), dtype=torch.float64).exponential_(generator=generator).log()
        ranked = (q.log() + noise).topk(max(WIDTHS)).indices
        said = (p.log() + noise).argmax(-1, keepdim=True)
        coupled = (ranked == said).double().cumsum(-1).mean(0)
        left_p, left_q = p.repeat(draws, 1), q.repeat(draws, 1)
        missed = torch.ones(draws, 1, dtype=torch.float64)
        tested = []
        for w in range(max(WIDTHS)):
            x = ranked[:, w : w + 1]
            chance = left_q.gather(-1, x)
            chance = torch.where(chance > 0, left_p.gather(-1, x) / chance, 0.0).clamp(max=1.0)
            missed = missed * (1.0 - chance)
            tested.append(float(1.0 - missed.mean()))
            residual = (left_p - left_q).clamp_min(0.0)
            mass = residual.sum(-1, keepdim=True)
            left_p = torch.where(mass > 1e-12, residual / mass, left_p)
            left_q = left_q.scatter(-1, x, 0.0)
            left_q = left_q / left_q.sum(-1, keepdim=True).clamp_min(1e-300)
        mass = p[q.topk(max(WIDTHS)).indices].cumsum(0).tolist()
        exact = [float(coupled_acceptance(p, q)), float(rejection_acceptance(p, q))]
        return {
            "invariant": [exact[0], *coupled.tolist()[1:]],
            "rejection": [exact[1], *tested[1:]],
            "point": mass,
        }


class Tally:
    """Sums over positions: acceptance by width, and by depth and width along chains."""

    def __init__(self, draws: int, seed: int) -> None:
        self.draws = draws
        self.generator = torch.Generator().manual_seed(seed)
        self.positions = 0
        self.reached: dict[tuple[str, int], float] = defaultdict(float)
        self.accepted: dict[tuple[str, int, int], float] = defaultdict(float)

    def add(self, pairs: Sequence[Pair]) -> None:
        """One position: the pairs of depths 1, 2, ... along the answer."""
        self.positions += 1
        weight = dict.fromkeys(RULES, 1.0)
        for depth, pair in enumerate(pairs):
            chances = pair.accepted(self.draws, self.generator)
            follow = pair.continued()
            for rule in RULES:
                self.reached[rule, depth] += weight[rule]
                for w, chance in zip(WIDTHS, chances[rule], strict=True):
                    self.accepted[rule, depth, w] += weight[rule] * chance
                weight[rule] *= follow[rule]

    def result(self) -> dict[str, Any]:
        """Means over positions."""
        n = self.positions
        report: dict[str, Any] = {"positions": n}
        for rule in RULES:
            report[rule] = {
                "by_width": [self.accepted[rule, 0, w] / n for w in WIDTHS],
                "by_depth": [
                    self.accepted[rule, d, 1] / max(self.reached[rule, d], 1e-9) for d in range(DEPTH)
                ],
                "accepted": {
                    f"w{w}": np.cumsum([self.accepted[rule, d, w] / n for d in range(DEPTH)]).tolist()
                    for w in WIDTHS
                },
            }
        return report


def pairs_of(
    target: Any, eagle: Any, text: list[int], prompt: int, params: SamplingParams
) -> list[list[Pair]]:
    """p and q at every position of an answer that has :data:`DEPTH` tokens left, by depth."""
    cache = target.make_cache(1, len(text) + 1, keep_features=True)
    cache.acquire()
    logits = target.forward(cache, [PassRow(0, 0, text, None, prompt - 1)]).logits
    shaped = [shaped_logprobs(row, params) for row in logits]
    row = DraftRow(
        "benchmark",
        "base",
        text[:prompt],
        prompt,
        features=cache.features[0],
        temperature=params.temperature,
        noise=RequestNoise(0, 0, target.vocab_size),
        noise_is_shared=False,
    )
    found: list[list[Pair]] = []
    for at in range(prompt, len(text) - DEPTH + 1):
        row.tokens = text[:at]
        pairs: list[Pair] = []

        def extend(_: int, guesses: Any, at: int = at, pairs: list[Pair] = pairs) -> int | None:
            assert isinstance(guesses, Draws)
            here = at + len(pairs)
            pairs.append(pair(*shaped[here - prompt], guesses.distributions[0], text[here]))
            return text[here]

        eagle.draft([row], [DEPTH], extend, draw=True)
        found.append(pairs)
    return found


def pair(ids: torch.Tensor, logp: torch.Tensor, q: Any, said: int) -> Pair:
    """Both distributions over the head's candidates and "any other token"."""
    dense = torch.zeros(int(max(ids.max(), q.ids.max())) + 1, dtype=torch.float64)
    dense[ids] = logp.exp()
    candidates = torch.from_numpy(q.ids)
    p = dense[candidates]
    where = (candidates == said).nonzero()
    return Pair(
        torch.cat([p, (1.0 - p.sum()).clamp_min(0.0).unsqueeze(0)]),
        torch.cat([torch.from_numpy(q.probabilities), torch.zeros(1, dtype=torch.float64)]),
        int(where[0, 0]) if len(where) else len(p),
    )


def measure(engine: Any, arguments: argparse.Namespace, temperature: float) -> dict[str, Any]:
    """Answers at one temperature, and their positions judged."""
    items = read_traffic(arguments.prompts, arguments.limit)
    sampling = {
        "temperature": temperature,
        "max_tokens": arguments.max_tokens,
        "top_p": arguments.top_p,
        "top_k": arguments.top_k,
    }
    served = keep_in_flight(
        engine, items, concurrency=arguments.concurrency, seed=arguments.seed, sampling=sampling, store=False
    )
    params = SamplingParams(temperature=temperature, top_p=arguments.top_p, top_k=arguments.top_k)
    eagle = engine.parts.mixture.sources["eagle"]
    tally = Tally(arguments.draws, arguments.seed)
    for item in sorted((s for s in served if s.completion is not None), key=lambda s: s.item.index):
        prompt = engine.prompt_ids(messages=item.item.messages)
        text = [*prompt, *item.completion.token_ids]

        def work(text: list[int] = text, size: int = len(prompt)) -> list[list[Pair]]:
            with torch.inference_mode():
                return pairs_of(engine.target, eagle, text, size, params)

        for pairs in engine.compute(work):
            tally.add(pairs)
    return tally.result()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", default="examples/traffic/mixed.jsonl")
    parser.add_argument("--config", default="configs/demo.yaml")
    parser.add_argument("--limit", type=int, help="first N prompts only")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.5, 0.8, 1.0])
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--draws", type=int, default=64, help="draws of the noise per position")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the result to this file")
    arguments = parser.parse_args()

    settings = ReplaySettings(
        concurrency=arguments.concurrency, seed=arguments.seed, freeze=True, k=0, sources=("eagle",)
    )
    result: dict[str, Any] = {"provenance": provenance(arguments.seed, config=arguments.config)}
    print(f"{'T':>4} {'rule':>10} {'w=1':>6} {'w=2':>6} {'w=3':>6}   accepted a round: k=3, w=1, 2, 3")
    with local_engine(arguments.config, settings) as engine:
        for temperature in arguments.temperatures:
            report = result[str(temperature)] = measure(engine, arguments, temperature)
            for rule in RULES:
                widths = " ".join(f"{value:6.3f}" for value in report[rule]["by_width"])
                rounds = " ".join(f"{report[rule]['accepted'][f'w{w}'][-1]:6.3f}" for w in WIDTHS)
                print(f"{temperature:4} {rule:>10} {widths}   {rounds}", flush=True)
    text = json.dumps(result, default=str)
    if arguments.json:
        arguments.json.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
