"""Who drafts how well for whom: every expert and every memory on the requests of every label.

Drafts are copied before the first request of the last quarter is served, and judged on that quarter: on
requests that none of them has learned from.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draft_arms.engine import DraftArm, Ready
from drafts.bank import Expert
from drafts.kinds.eagle import EagleSource
from drafts.kinds.ngram import NgramSource
from osd.learn.pretrain_data import Answer, load_shards
from osd.learn.rehearse import Table, expert_table, memory_table
from osd.serve.collect import Prompt, collect
from osd.serve.target import TargetModel

DEPTH = 4
"""Chain length, as in the papers' figures."""

NEAR = 0.02
"""A diagonal this close to its column's best counts as best."""


@dataclass(frozen=True)
class Drafts:
    """A copy of an arm's drafts."""

    experts: dict[str, Expert]
    memories: NgramSource


def snapshot(arm: DraftArm) -> Drafts:
    """Copy the drafts that the arm serves with now."""
    assert arm.parts.bank is not None
    assert arm.parts.ngram is not None
    memories = NgramSource(arm.parts.ngram.config, arm.parts.ngram.base)
    memories.load_state(arm.parts.ngram.state())
    return Drafts({domain: arm.parts.bank.tensors(domain) for domain in arm.domains}, memories)


def answers_to(target: TargetModel, asked: Sequence[Ready], max_tokens: int) -> list[Answer]:
    """The target's own greedy answers, with the features that heads read."""
    prompts = [Prompt(ready.asked.label, str(ready.asked.index), ready.text, ready.ids) for ready in asked]
    with tempfile.TemporaryDirectory() as folder:
        return load_shards(collect(target, prompts, Path(folder), max_tokens=max_tokens))


def specialisation(drafts: Drafts, eagle: EagleSource, answers: Sequence[Answer]) -> dict[str, Any]:
    """``experts`` and ``memories``: acceptance by draft and label, and how many columns are their own."""
    trunk, embedding = eagle.trunk, eagle.embedding.float()
    experts = expert_table(trunk, embedding, eagle.output, drafts.experts, answers, DEPTH)
    memories = memory_table(drafts.memories, list(drafts.experts), answers, DEPTH)
    return {
        "depth": DEPTH,
        "answers": len(answers),
        "experts": acceptance(experts),
        "memories": acceptance(memories),
        "own_best": {"experts": own_best(acceptance(experts)), "memories": own_best(acceptance(memories))},
    }


def acceptance(table: Table) -> Table:
    """Accepted share of :data:`DEPTH` draft tokens a pass from τ; a draft's silence counts as a rejection."""
    return {name: {label: (tau - 1.0) / DEPTH for label, tau in row.items()} for name, row in table.items()}


def own_best(table: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """Columns (labels) whose own draft is the best of all rows, or within :data:`NEAR` of it.

    Where drafts hardly differ that is true of any of them, so there is also ``strict``, the columns whose
    own draft beats every other row, and ``spread``, the best minus the worst of each column.
    """
    labels = [label for label in next(iter(table.values())) if label in table]
    columns = {label: {name: row[label] for name, row in table.items()} for label in labels}
    best = {label: max(column.values()) for label, column in columns.items()}
    own = [label for label in labels if columns[label][label] >= best[label] - NEAR]
    strict = [
        label
        for label, column in columns.items()
        if all(column[label] > value for name, value in column.items() if name != label)
    ]
    return {
        "count": len(own),
        "of": len(labels),
        "labels": own,
        "within": NEAR,
        "strict": len(strict),
        "strict_labels": strict,
        "spread": {label: best[label] - min(column.values()) for label, column in columns.items()},
    }
