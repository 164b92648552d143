"""What trains a trunk: the target's own answers with its hidden states and top-K evidence, in shards.

A shard is ``NAME.json`` (a list of ``{domain, prompt, ids, out, source}``) beside ``NAME.safetensors``
with, for the i-th entry, ``f{i}`` float16 ``[len(ids) + len(out) - 1, F]`` features, ``k{i}`` int32
``[len(out), K]`` and ``p{i}`` float16 ``[len(out), K]`` the target's most probable ids and their
log-probabilities at every output position.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file


@dataclass(frozen=True)
class Answer:
    """One prompt with the target's answer.

    Attributes:
        label: Kind of prompt, for reporting only.
        source: Where the prompt comes from, with its licence.
        tokens: int64 ``[L]``, prompt then output.
        prompt_length: Number of prompt tokens.
        features: float16 ``[L - 1, F]`` hidden states of the processed tokens.
        top_ids: int32 ``[outputs, K]``.
        top_logprobs: float16 ``[outputs, K]``.
    """

    label: str
    source: str
    tokens: torch.Tensor
    prompt_length: int
    features: torch.Tensor
    top_ids: torch.Tensor
    top_logprobs: torch.Tensor

    @property
    def output_length(self) -> int:
        """Number of output tokens."""
        return len(self.tokens) - self.prompt_length


def load_shards(shards: Sequence[Path]) -> list[Answer]:
    """All answers of the shards named by their ``.json`` files; answers of one token are left out."""
    answers: list[Answer] = []
    for meta in shards:
        tensors = load_file(meta.with_suffix(".safetensors"))
        for i, entry in enumerate(json.loads(meta.read_text())):
            if len(entry["out"]) < 2:
                continue
            answers.append(
                Answer(
                    label=entry["domain"],
                    source=entry["source"],
                    tokens=torch.tensor(entry["ids"] + entry["out"]),
                    prompt_length=len(entry["ids"]),
                    features=tensors[f"f{i}"],
                    top_ids=tensors[f"k{i}"],
                    top_logprobs=tensors[f"p{i}"],
                )
            )
    return answers


def split(answers: Sequence[Answer], held_back: float, seed: int) -> tuple[list[Answer], list[Answer]]:
    """Answers to train on and answers never trained on, a share ``held_back`` of every label."""
    by_label: dict[str, list[Answer]] = {}
    for answer in answers:
        by_label.setdefault(answer.label, []).append(answer)
    train: list[Answer] = []
    held: list[Answer] = []
    for label in sorted(by_label):
        group = by_label[label]
        random.Random(seed).shuffle(group)
        count = max(1, round(held_back * len(group)))
        held += group[:count]
        train += group[count:]
    return train, held


def batches(answers: Sequence[Answer], size: int, seed: int) -> Iterator[list[Answer]]:
    """One epoch of batches of similar length, in random order: little padding, yet shuffled.

    Shuffled answers are cut into pools of ``16 * size``, each pool is sorted by length and cut.
    """
    rng = random.Random(seed)
    order = list(answers)
    rng.shuffle(order)
    cut: list[list[Answer]] = []
    for start in range(0, len(order), 16 * size):
        pool = sorted(order[start : start + 16 * size], key=lambda a: len(a.tokens))
        cut += [pool[i : i + size] for i in range(0, len(pool), size)]
    rng.shuffle(cut)
    yield from cut


def choose_vocabulary(
    answers: Sequence[Answer], size: int, vocab_size: int, always: Sequence[int]
) -> torch.Tensor:
    """Ids of the draft vocabulary, int64 ``[size]``, ascending.

    Ranked by how often the target is expected to say them: emitted once counts 1, evidence counts its
    probability, which reaches ids that short data never emitted. ``always`` (end tokens) come first.
    Ties, mostly ids never seen, go to the lower id: byte-pair merges are numbered by frequency.
    """
    weight = torch.zeros(vocab_size, dtype=torch.float64)
    for answer in answers:
        ids = answer.top_ids.flatten().long()
        weight.index_add_(0, ids, answer.top_logprobs.flatten().double().exp())
        emitted = answer.tokens[answer.prompt_length :]
        weight.index_add_(0, emitted, torch.ones(len(emitted), dtype=torch.float64))
    weight[list(always)] = float("inf")
    return weight.sort(descending=True, stable=True).indices[:size].sort().values
