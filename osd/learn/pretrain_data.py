"""What trains a trunk: the target's own answers with its hidden states and top-K evidence, in shards.

A shard is ``NAME.json`` (a list of ``{domain, prompt, ids, out, source}``) beside ``NAME.safetensors``
with, for the i-th entry, ``f{i}`` float16 ``[len(ids) + len(out) - 1, F]`` features, ``k{i}`` int32
``[len(out), K]`` and ``p{i}`` float16 ``[len(out), K]`` the target's most probable ids and their
log-probabilities at every output position. ``target.json`` beside them says whose answers they are and
which layers ``F`` is made of (:mod:`osd.shards`).
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from drafts.errors import CheckpointError, InvalidValueError
from osd.shards import ShardFacts, read_facts


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


def load_shards(
    shards: Sequence[Path],
    layers: Sequence[int] | None = None,
    keep: Callable[[dict[str, Any]], bool] = lambda entry: True,
) -> list[Answer]:
    """The answers of the shards named by their ``.json`` files; answers of one token are left out.

    Args:
        shards: What to read; of one target or of several folders of the same target.
        layers: Layers to keep of those collected, all where ``None``; so training on fewer needs less memory.
        keep: Which entries to read.

    Raises:
        InvalidValueError: A layer that was not collected.
        CheckpointError: A shard of another target than the first one, or a damaged one.
    """
    answers: list[Answer] = []
    facts: dict[Path, ShardFacts] = {}
    for meta in shards:
        told = facts.setdefault(meta.parent, facts.get(meta.parent) or read_facts(meta.parent))
        first = next(iter(facts.values()))
        if not told.same_as(first):
            raise CheckpointError(
                f"{meta.parent}: holds answers of {told.name} with layers {list(told.feature_layers)}, the "
                f"other shards are of {first.name} with layers {list(first.feature_layers)}"
            )
        try:
            answers += _read_shard(meta, told, layers, keep)
        except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
            if isinstance(error, InvalidValueError):
                raise
            raise CheckpointError(
                f"{meta}: cannot be read ({error}); without it and its .safetensors it is collected again"
            ) from error
    return answers


def _read_shard(
    meta: Path, facts: ShardFacts, layers: Sequence[int] | None, keep: Callable[[dict[str, Any]], bool]
) -> list[Answer]:
    """The answers of one shard."""
    columns = _columns(facts, layers)
    answers: list[Answer] = []
    entries = json.loads(meta.read_text())
    with safe_open(meta.with_suffix(".safetensors"), framework="pt") as file:
        for i, entry in enumerate(entries):
            if len(entry["out"]) < 2 or not keep(entry):
                continue
            features = file.get_tensor(f"f{i}")
            expected = (
                len(entry["ids"]) + len(entry["out"]) - 1,
                facts.hidden_size * len(facts.feature_layers),
            )
            if tuple(features.shape) != expected:
                raise ValueError(f"features {tuple(features.shape)}, expected {expected}")
            if columns is not None:
                features = features.unflatten(1, (-1, facts.hidden_size))[:, columns].flatten(1)
            answers.append(
                Answer(
                    label=entry["domain"],
                    source=entry["source"],
                    tokens=torch.tensor(entry["ids"] + entry["out"]),
                    prompt_length=len(entry["ids"]),
                    features=features,
                    top_ids=file.get_tensor(f"k{i}"),
                    top_logprobs=file.get_tensor(f"p{i}"),
                )
            )
    return answers


def _columns(facts: ShardFacts, layers: Sequence[int] | None) -> list[int] | None:
    """Places of ``layers`` among those collected; ``None`` where they are all of them."""
    if layers is None or tuple(layers) == facts.feature_layers:
        return None
    if not set(layers) <= set(facts.feature_layers):
        raise InvalidValueError("layers", list(layers), f"of those collected: {list(facts.feature_layers)}")
    return [facts.feature_layers.index(layer) for layer in layers]


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


def rank_vocabulary(answers: Sequence[Answer], vocab_size: int, always: Sequence[int]) -> torch.Tensor:
    """All target ids, int64 ``[vocab_size]``, those first that a draft vocabulary should hold.

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
    return weight.sort(descending=True, stable=True).indices


def coverage(answers: Sequence[Answer], token_ids: torch.Tensor) -> float:
    """Share of answer tokens that lie in the draft vocabulary."""
    inside = sum(int(torch.isin(a.tokens[a.prompt_length :], token_ids).sum()) for a in answers)
    return inside / max(1, sum(a.output_length for a in answers))


def vocabulary_size(ranked: torch.Tensor, answers: Sequence[Answer], wanted: float, step: int = 64) -> int:
    """Smallest size of a draft vocabulary that covers a share ``wanted`` of the tokens of ``answers``.

    Asked of answers that did not rank the ids: those that did are all covered by their own tokens. Rounded
    up to a multiple of ``step``, which the output's kernels like.
    """
    place = torch.empty_like(ranked)
    place[ranked] = torch.arange(len(ranked))
    emitted = torch.cat([answer.tokens[answer.prompt_length :] for answer in answers])
    places = place[emitted].sort().values
    needed = int(places[max(0, math.ceil(wanted * len(places)) - 1)]) + 1
    return min(len(ranked), -(-needed // step) * step)
