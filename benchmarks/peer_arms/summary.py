"""From blocks to figures: medians, paired ratios with their intervals, results by label."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from peer_arms.measured import BlockRun
from router.app.paired import median_interval

PEERS = ("generate", "prompt_lookup", "assisted", "vllm", "vllm_ngram", "vllm_suffix", "flashspec")
OWN = ("polydraft_plain", "polydraft_frozen", "polydraft")
ARMS = PEERS + OWN
BASES = ("generate", "polydraft_plain")
"""Arms that every other one is compared with, besides the fastest peer."""


@dataclass
class Measurements:
    """The blocks of one concurrency.

    Attributes:
        labels: Label of each prompt by its index.
        blocks: One dictionary of runs by arm for each block, in order.
        notes: How each arm was run.
        skipped: Reason by arm.
    """

    labels: Mapping[int, str]
    blocks: list[dict[str, BlockRun]] = field(default_factory=list)
    notes: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)

    def names(self) -> list[str]:
        """Arms that answered every block."""
        return [name for name in ARMS if self.blocks and all(name in block for block in self.blocks)]

    def runs(self, name: str) -> list[BlockRun]:
        """An arm's runs in block order."""
        return [block[name] for block in self.blocks]

    def best_peer(self) -> str | None:
        """The peer with the highest median throughput."""
        peers = [name for name in self.names() if name in PEERS]
        return max(
            peers,
            key=lambda name: _median([r.tokens_per_second for r in self.runs(name)]) or 0.0,
            default=None,
        )


def arm_figures(measured: Measurements, name: str) -> dict[str, Any]:
    """Figures of one arm: throughput (median of the blocks), time to first token (median, s), τ, labels.

    A label's ``tokens_per_second`` is its answers' tokens over the sum of their own wall times: the speed
    of one stream as its reader sees it. With one request in flight that is throughput.
    """
    runs = measured.runs(name)
    answers = [(index, answer) for run in runs for index, answer in run.answers.items()]
    passes = [answer.passes for _, answer in answers]
    tokens = sum(len(answer.tokens) for _, answer in answers)
    ttft = [answer.ttft for _, answer in answers if answer.ttft is not None]
    known = [count for count in passes if count is not None]
    labels = sorted({measured.labels[index] for index, _ in answers})
    return {
        "tokens_per_second": _median([run.tokens_per_second for run in runs]),
        "ttft": _median(ttft),
        "mean_accepted_length": tokens / sum(known) if known and len(known) == len(passes) else None,
        "tokens": tokens,
        "seconds": sum(run.seconds for run in runs),
        "prompts": len(answers),
        "blocks": len(runs),
        "note": measured.notes.get(name, ""),
        "labels": {label: _label_figures(measured, runs, label) for label in labels},
    }


def ratios(measured: Measurements, seed: int) -> dict[str, dict[str, Any]]:
    """``{a}/{b}``: median over paired blocks of a's throughput over b's, with its 95 % interval.

    Every arm against :data:`BASES` and the best peer; the two speculating arms also by label against the
    plain engine, in the blocks that hold the label.
    """
    names = measured.names()
    against = [name for name in dict.fromkeys((*BASES, measured.best_peer())) if name in names]
    found: dict[str, dict[str, Any]] = {}
    for b in against:
        for a in names:
            if a == b:
                continue
            pairs = zip(measured.runs(a), measured.runs(b), strict=True)
            entry = interval([_ratio(x.tokens_per_second, y.tokens_per_second) for x, y in pairs], seed)
            if b == "polydraft_plain" and a in OWN:
                entry["labels"] = _label_ratios(measured, a, b, seed)
            found[f"{a}/{b}"] = entry
    return found


def interval(values: Sequence[float | None], seed: int) -> dict[str, Any]:
    """Median and bootstrap interval of the paired ratios that exist, and their number."""
    kept = [value for value in values if value is not None]
    if not kept:
        return {"median": None, "low": None, "high": None, "blocks": 0}
    median, low, high = median_interval(kept, seed)
    return {"median": median, "low": low, "high": high, "blocks": len(kept)}


def document(by_concurrency: Mapping[int, Measurements], seed: int) -> dict[str, Any]:
    """``arms``, ``ratios``, ``best_peer`` and ``skipped`` of the result, keyed by concurrency as text."""
    arms: dict[str, dict[str, Any]] = {}
    pairs: dict[str, dict[str, Any]] = {}
    best: dict[str, str | None] = {}
    skipped: dict[str, dict[str, str]] = {}
    for concurrency, measured in by_concurrency.items():
        key = str(concurrency)
        best[key] = measured.best_peer()
        for name in measured.names():
            arms.setdefault(name, {})[key] = arm_figures(measured, name)
        for pair, entry in ratios(measured, seed).items():
            pairs.setdefault(pair, {})[key] = entry
        for name, reason in measured.skipped.items():
            skipped.setdefault(name, {})[key] = reason
    return {"arms": arms, "ratios": pairs, "best_peer": best, "skipped": skipped}


def _label_ratios(measured: Measurements, a: str, b: str, seed: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for label in sorted(set(measured.labels.values())):
        rates = [
            (_label_rate(measured, block[a], label), _label_rate(measured, block[b], label))
            for block in measured.blocks
        ]
        entry = interval([_ratio(x, y) for x, y in rates], seed)
        if entry["blocks"]:
            found[label] = entry
    return found


def _label_figures(measured: Measurements, runs: Sequence[BlockRun], label: str) -> dict[str, Any]:
    chosen = [a for run in runs for index, a in run.answers.items() if measured.labels[index] == label]
    tokens, seconds = sum(len(a.tokens) for a in chosen), sum(a.seconds for a in chosen)
    known = [a.passes for a in chosen if a.passes is not None]
    return {
        "tokens_per_second": tokens / seconds if seconds else None,
        "mean_accepted_length": tokens / sum(known) if known and len(known) == len(chosen) else None,
        "prompts": len(chosen),
    }


def _label_rate(measured: Measurements, run: BlockRun, label: str) -> float:
    rate = _label_figures(measured, [run], label)["tokens_per_second"]
    return rate or 0.0


def _ratio(a: float, b: float) -> float | None:
    return a / b if a and b else None


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None
