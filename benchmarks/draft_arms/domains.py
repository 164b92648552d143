"""What registered domains cost: a draft step of a mixed batch over 4, 16 and 64 of them, in turn.

Nothing depends on what the numbers are, so the target's matrices are drawn and no target is loaded.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import torch
from pydantic import ValidationError

from drafts.bank import ExpertBank
from drafts.compiled_head import CompiledHead
from drafts.config import EagleConfig
from drafts.kinds.base import DraftRow, Guess
from drafts.kinds.eagle import EagleSource
from drafts.trunk import Trunk
from router.app.paired import median_interval

COUNTS = (4, 16, 64)
ROWS = 16
DEPTH = 3
"""Depths of a step: one that reads what was committed, and two that read what was drafted."""

TEXT = 160
"""Tokens of every row."""


@dataclass
class Bench:
    """One head with its registered domains, and a batch of rows."""

    source: EagleSource
    rows: list[DraftRow]

    def step(self, domains: Sequence[str], token: int) -> float:
        """Draft for the batch after one more committed token a row; milliseconds."""
        for row, domain in zip(self.rows, domains, strict=True):
            row.domain = domain
            row.tokens[-1] = token
        begin = time.perf_counter()
        self.source.draft(self.rows, [DEPTH] * len(self.rows), _likeliest)
        return (time.perf_counter() - begin) * 1e3


def _likeliest(index: int, guesses: Sequence[Guess]) -> int:
    return guesses[0][0]


def expert_forms(config: EagleConfig) -> dict[str, int | str]:
    """Rank by form of expert: low-rank deltas, and full copies where the config knows them."""
    forms: dict[str, int | str] = {} if config.rank == "full" else {"low_rank": config.rank}
    try:
        EagleConfig.model_validate({"rank": "full"})
    except ValidationError:
        return forms
    return {**forms, "full_copy": "full"}


def make_bench(
    trunk: Trunk,
    domains: int,
    rank: int | str,
    compiled: bool,
    *,
    rows: int = ROWS,
    time_products: bool = True,
) -> Bench:
    """A head over ``trunk`` with that many domains, all of whose experts differ from the trunk."""
    generator = torch.Generator().manual_seed(domains)
    shape = trunk.shape
    embedding = torch.randn(shape.vocab_size, shape.hidden_size, generator=generator)
    source = EagleSource(
        trunk=Trunk(shape, trunk.token_ids, trunk.tensors),
        bank=ExpertBank(trunk, rank, capacity=domains),
        embedding=embedding,
        output_weight=embedding,
        time_products=time_products,
        compile_passes=compiled,
    )
    for number in range(domains):
        name = _name(number)
        source.add_domain(name)
        tensors = source.bank.tensors(name)
        for part, tensor in tensors.items():
            if tensor.is_floating_point():
                tensors[part] = 0.02 * torch.randn(tensor.shape, generator=generator)
        source.bank.load(name, tensors)
    features = torch.randn(TEXT, shape.feature_width, generator=generator)
    batch = []
    for number in range(rows):
        tokens = torch.randint(0, shape.vocab_size, (TEXT,), generator=generator).tolist()
        batch.append(DraftRow(f"r{number}", _name(0), tokens, TEXT // 2, features=features))
    return Bench(source, batch)


def domain_costs(
    trunk: Trunk,
    forms: Mapping[str, int | str],
    *,
    repeats: int = 60,
    rows: int = ROWS,
    counts: Sequence[int] = COUNTS,
    seed: int = 0,
    time_products: bool = True,
) -> dict[str, dict[str, Any]]:
    """By number of domains: ``step_ms`` by form of expert and head, its ratio to the first number's, bytes.

    Every row's domain is drawn uniformly for every step. The numbers take turns step by step, in rotated
    order, so a ratio compares neighbours in time.
    """
    draw = random.Random(seed)
    empty = ("step_ms", "ratio", "bytes_per_expert")
    found: dict[str, dict[str, Any]] = {str(count): {key: {} for key in empty} for count in counts}
    for (form, rank), (head, compiled) in product(forms.items(), (("compiled", True), ("library", False))):
        benches = {
            count: make_bench(trunk, count, rank, compiled, rows=rows, time_products=time_products)
            for count in counts
        }
        if compiled and not all(isinstance(b.source.forward, CompiledHead) for b in benches.values()):
            continue
        times = _in_turn(benches, repeats, draw, trunk.shape.vocab_size)
        first = np.array(times[counts[0]])
        for count in counts:
            entry = found[str(count)]
            entry["bytes_per_expert"][form] = benches[count].source.bank.bytes_per_expert
            entry["step_ms"][f"{form}_{head}"] = float(np.median(times[count]))
            median, low, high = median_interval((np.array(times[count]) / first).tolist(), seed)
            entry["ratio"][f"{form}_{head}"] = {"median": median, "low": low, "high": high}
    return found


def _in_turn(
    benches: dict[int, Bench], repeats: int, draw: random.Random, vocab_size: int
) -> dict[int, list[float]]:
    """Milliseconds of every step by number of domains; a first unmeasured round packs every expert."""
    times: dict[int, list[float]] = {count: [] for count in benches}
    for count, bench in benches.items():
        for start in range(0, count, len(bench.rows)):
            bench.step([_name((start + i) % count) for i in range(len(bench.rows))], 1)
    order = list(benches)
    for number in range(repeats):
        shift = number % len(order)
        for count in [*order[shift:], *order[:shift]]:
            bench = benches[count]
            domains = [_name(draw.randrange(count)) for _ in bench.rows]
            times[count].append(bench.step(domains, draw.randrange(vocab_size)))
    return times


def _name(number: int) -> str:
    return f"d{number}"
