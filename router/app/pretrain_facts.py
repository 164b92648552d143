"""The provenance of a trunk: all that is needed to judge it and to make it again."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from drafts.trunk import Trunk
from osd.learn.pretrain_config import PretrainConfig
from osd.learn.pretrain_data import Answer, coverage
from osd.learn.pretrain_state import Epoch
from router.app.provenance import command_line, commit, versions


def prompt_of(answer: Answer) -> tuple[int, ...]:
    """Token ids of the prompt, which tell whether two answers are to the same."""
    return tuple(answer.tokens[: answer.prompt_length].tolist())


def describe_data(answers: Sequence[Answer]) -> dict[str, Any]:
    """Counts by source and label; item numbers at the end of a source are left out."""
    prompts: dict[str, set[tuple[int, ...]]] = {}
    tokens: Counter[str] = Counter()
    labels: dict[str, set[tuple[int, ...]]] = {}
    for answer in answers:
        source = re.sub(r"\s+\d+$", "", answer.source)
        prompt = prompt_of(answer)
        prompts.setdefault(source, set()).add(prompt)
        labels.setdefault(answer.label, set()).add(prompt)
        tokens[source] += answer.output_length
    return {
        "prompts": sum(map(len, prompts.values())),
        "answers": len(answers),
        "answer_tokens": sum(tokens.values()),
        "sources": {s: {"prompts": len(prompts[s]), "answer_tokens": tokens[s]} for s in sorted(prompts)},
        "labels": {label: len(labels[label]) for label in sorted(labels)},
    }


def provenance_of(
    training: Sequence[Answer],
    held: Sequence[Answer],
    trunk: Trunk,
    target: str,
    config: PretrainConfig,
    epochs: Sequence[Epoch],
) -> dict[str, Any]:
    """All that is needed to judge the trunk and to make it again; no path of this machine."""
    return {
        "target": Path(target).name if Path(target).is_absolute() else target,
        "fingerprint": trunk.fingerprint(),
        "shape": asdict(trunk.shape),
        "draft_vocabulary": len(trunk.token_ids),
        "held_back_coverage": round(coverage(held, trunk.token_ids), 4),
        "data": describe_data([*training, *held]),
        "held_back_prompts": len(held),
        "training": config.as_dict(),
        "epochs": [asdict(epoch) for epoch in epochs],
        "command": command_line(),
        "commit": commit(),
        "versions": versions(),
    }
