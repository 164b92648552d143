"""Speed against other ways of decoding the same prompts, in paired blocks.

A shared machine can run at a tenth of its speed from one minute to the next, so totals say little.
Each block of a few prompts is answered by every arm in turn, in random order; the ratio within a block
is the measurement, and the median over blocks with its bootstrap interval is the result.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from drafts.errors import UnknownNameError
from router.app.arms import Arm, ArmRun
from router.app.paired import median_interval
from router.app.traffic import TrafficItem

BASELINES = ("plain", "generate")
SPECULATIVE = "speculative"


def parse_baselines(text: str | None) -> tuple[str, ...]:
    """The arms named by ``--compare``, duplicates dropped.

    Raises:
        UnknownNameError: lists the known ones.
    """
    names = [name.strip() for name in (text or "").split(",") if name.strip()]
    for name in names:
        if name not in BASELINES:
            raise UnknownNameError("--compare", name, list(BASELINES))
    return tuple(dict.fromkeys(names))


def block_size(requests: int, concurrency: int) -> int:
    """Prompts a block: enough to keep the batch full, few enough for many blocks close in time."""
    return max(4, concurrency, min(2 * concurrency, requests // 8))


def split_blocks(items: Sequence[TrafficItem], size: int) -> list[list[TrafficItem]]:
    """Consecutive blocks of ``size``; a last one shorter than half joins the one before."""
    blocks = [list(items[at : at + size]) for at in range(0, len(items), size)]
    if len(blocks) > 1 and len(blocks[-1]) < size / 2:
        blocks[-2].extend(blocks.pop())
    return blocks


def sample(
    items: Sequence[TrafficItem], count: int | None, seed: int
) -> tuple[list[TrafficItem], list[TrafficItem]]:
    """The items outside and inside a seeded sample of ``count``, both in file order."""
    if count is None or count >= len(items):
        return [], list(items)
    chosen = set(random.Random(f"compare:{seed}").sample(range(len(items)), count))
    outside = [item for at, item in enumerate(items) if at not in chosen]
    return outside, [item for at, item in enumerate(items) if at in chosen]


@dataclass
class Comparison:
    """Collects blocks and turns them into the ``compare`` part of a result."""

    seed: int
    blocks: list[dict[str, ArmRun]] = field(default_factory=list)

    def run(
        self,
        arms: Mapping[str, Arm],
        blocks: Sequence[Sequence[TrafficItem]],
        on_block: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        """Run every block through every arm, the arms' order shuffled by the seed in each block."""
        order = random.Random(f"order:{self.seed}")
        for arm in arms.values():
            arm.warm_up()
        for number, block in enumerate(blocks):
            names = list(arms)
            order.shuffle(names)
            self.blocks.append({name: arms[name].run(block) for name in names})
            on_block(number + 1, len(blocks))

    def as_dict(self) -> dict[str, Any]:
        """``tokens_per_second``, ``speedup``, ``speedup_low`` and the pairs behind them, by baseline."""
        names = [name for name in BASELINES if self.blocks and name in self.blocks[0]]
        return {name: self._against(name) for name in names}

    def _against(self, name: str) -> dict[str, Any]:
        ratios: list[float] = []
        totals = {name: [0, 0.0], SPECULATIVE: [0, 0.0]}
        same = answers = 0
        for block in self.blocks:
            ours, theirs = block[SPECULATIVE], block[name]
            common = set(ours.answers) & set(theirs.answers)
            our_tokens, our_seconds = ours.over(common)
            tokens, seconds = theirs.over(common)
            answers += len(common)
            same += sum(ours.answers[index] == theirs.answers[index] for index in common)
            if not our_tokens or not tokens:
                continue
            ratios.append((our_tokens / our_seconds) / (tokens / seconds))
            for key, count, time in ((SPECULATIVE, our_tokens, our_seconds), (name, tokens, seconds)):
                totals[key][0] += count
                totals[key][1] += time
        median, low, high = median_interval(ratios, self.seed) if ratios else (0.0, 0.0, 0.0)
        return {
            "tokens_per_second": _rate(totals[name]),
            "speculative_tokens_per_second": _rate(totals[SPECULATIVE]),
            "speedup": median,
            "speedup_low": low,
            "speedup_high": high,
            "blocks": len(ratios),
            "ratios": ratios,
            "requests": answers,
            "same_answers": same,
        }


def _rate(total: list[float]) -> float:
    tokens, seconds = total
    return tokens / seconds if seconds else 0.0
