"""Collects what trains a trunk: the target's own answers with features and evidence, in shards.

Plain batched decoding without any draft, so that what is collected depends on the target alone. The shards
are those of ``osd.learn.pretrain_data``; they are written one a batch, each whole or not at all, so a run
that was killed at any moment goes on where it was.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from drafts.checkpoint import write_atomically
from drafts.errors import InvalidValueError
from osd.serve.cache import SlotCache
from osd.serve.lend import shard_facts
from osd.serve.target import PassRow, TargetModel
from osd.shards import open_folder

PREFILL_ROWS = 8
"""Prompts per prefill pass: more would only cost memory."""


@dataclass(frozen=True)
class Prompt:
    """One prompt to be answered.

    Attributes:
        domain: Its kind, for reports.
        source: Where it comes from, with its licence.
        text: The user's message.
        ids: Token ids, chat template applied.
    """

    domain: str
    source: str
    text: str
    ids: tuple[int, ...]


@dataclass
class _Answer:
    """An answer in the making."""

    prompt: Prompt
    slot: int
    output: list[int] = field(default_factory=list)
    top_ids: list[torch.Tensor] = field(default_factory=list)
    top_logprobs: list[torch.Tensor] = field(default_factory=list)
    features: torch.Tensor | None = None


def collect(
    target: TargetModel,
    prompts: Sequence[Prompt],
    folder: Path,
    *,
    max_tokens: int = 128,
    batch: int = 32,
    evidence_k: int = 32,
    temperature: float = 0.0,
    seed: int = 0,
    progress: Callable[[int, int, int], None] = lambda done, batches, tokens: None,
) -> list[Path]:
    """Answer every prompt and write shards into ``folder``; returns their ``.json`` files.

    A shard is named by what it answers, so one that is there already is not made again.

    Args:
        target: The target.
        prompts: What to ask; sorted by length here, so that a batch wastes little.
        folder: Where shards go.
        max_tokens: Longest answer.
        batch: Prompts per shard, all decoded together.
        evidence_k: Ids kept per output position, of the distribution at temperature 1.
        temperature: 0 for the greedy answer; above, answers are drawn, and a prompt that was answered once
            gives another text.
        seed: Of what is drawn.
        progress: Called after every shard with shards done, shards in all, and answer tokens so far.

    Raises:
        InvalidValueError: A prompt that leaves no room for an answer, or a disk that is too full.
        CheckpointError: The folder holds answers of another target or with other layers, or a shard cannot
            be written.
    """
    facts = shard_facts(target)
    longest = max((len(prompt.ids) for prompt in prompts), default=0)
    if longest + max_tokens > target.max_positions:
        raise InvalidValueError(
            "max_tokens", max_tokens, f"at most {target.max_positions - longest} after {longest} of a prompt"
        )
    open_folder(folder, facts)
    ordered = sorted(prompts, key=lambda prompt: (len(prompt.ids), prompt.text))
    cut = [ordered[i : i + batch] for i in range(0, len(ordered), batch)]
    draw = _Draw(temperature, seed)
    tokens = 0
    digests = [_digest(facts.fingerprint, target, group, max_tokens, evidence_k, draw) for group in cut]
    shards = [folder / f"{number:04d}-{digest}.json" for number, digest in enumerate(digests, start=1)]
    missing = [group for group, meta in zip(cut, shards, strict=True) if not meta.exists()]
    _check_room(folder, missing, max_tokens, 2 * target.feature_width, 6 * evidence_k)
    for number, (group, digest, meta) in enumerate(zip(cut, digests, shards, strict=True), start=1):
        if not meta.exists():
            draw.start(digest)
            _write(_answer(target, group, max_tokens, evidence_k, draw), meta)
        tokens += sum(len(entry["out"]) for entry in json.loads(meta.read_text()))
        progress(number, len(cut), tokens)
    return shards


@dataclass
class _Draw:
    """How the next token is chosen; a shard's draws depend on nothing outside the shard."""

    temperature: float
    seed: int
    generator: torch.Generator = field(default_factory=torch.Generator)

    def start(self, digest: str) -> None:
        self.generator.manual_seed(int(digest, 16))

    def tokens(self, logits: torch.Tensor) -> list[int]:
        """One token for every row of ``[N, vocab]``."""
        if self.temperature <= 0.0:
            return [int(token) for token in logits.argmax(-1)]
        chances = (logits / self.temperature).softmax(-1).cpu()
        return [int(token) for token in torch.multinomial(chances, 1, generator=self.generator)[:, 0]]


def _check_room(
    folder: Path, missing: Sequence[Sequence[Prompt]], max_tokens: int, per_token: int, per_output: int
) -> None:
    """Refuse to begin what may not fit: answers as long as they may be, ``per_…`` bytes each position."""
    prompts = [prompt for group in missing for prompt in group]
    positions = sum(len(prompt.ids) + max_tokens for prompt in prompts)
    needed = positions * per_token + len(prompts) * max_tokens * per_output
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise InvalidValueError(
            "shards",
            str(folder),
            f"a disk with {needed / 2**30:.2f} GiB free for {len(prompts)} answers of up to {max_tokens} "
            f"tokens (it has {free / 2**30:.2f}); fewer prompts, shorter answers or fewer layers need less",
        )


def _digest(
    identity: str,
    target: TargetModel,
    group: Sequence[Prompt],
    max_tokens: int,
    evidence_k: int,
    draw: _Draw,
) -> str:
    """Short hash of everything that decides a shard."""
    facts: list[Any] = [identity, target.feature_layers, max_tokens, evidence_k, [p.ids for p in group]]
    if draw.temperature > 0.0:
        facts += [draw.temperature, draw.seed]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:12]


@torch.inference_mode()
def _answer(
    target: TargetModel, prompts: Sequence[Prompt], max_tokens: int, evidence_k: int, draw: _Draw
) -> list[_Answer]:
    """Answers to ``prompts``, decoded together."""
    longest = max(len(prompt.ids) for prompt in prompts) + max_tokens
    cache = target.make_cache(len(prompts), longest, keep_features=True)
    answers = [_Answer(prompt, cache.acquire()) for prompt in prompts]
    for start in range(0, len(answers), PREFILL_ROWS):
        group = answers[start : start + PREFILL_ROWS]
        rows = [PassRow(a.slot, 0, list(a.prompt.ids), logits_from=len(a.prompt.ids) - 1) for a in group]
        _run(target, cache, group, rows, evidence_k, draw)
    running = list(answers)
    while True:
        for answer in [a for a in running if _ended(a, target, max_tokens)]:
            running.remove(answer)
            _close(answer, cache, running)
        if not running:
            return answers
        rows = [PassRow(a.slot, cache.lengths[a.slot], a.output[-1:]) for a in running]
        _run(target, cache, running, rows, evidence_k, draw)


def _run(
    target: TargetModel,
    cache: SlotCache,
    answers: list[_Answer],
    rows: list[PassRow],
    evidence_k: int,
    draw: _Draw,
) -> None:
    """One target pass; every row gains one token and its evidence."""
    output = target.forward(cache, rows)
    logits = output.logits[torch.tensor(output.offsets)].float()
    top = logits.topk(evidence_k, dim=-1)
    logprobs = (top.values - logits.logsumexp(-1, keepdim=True)).half().cpu()
    ids = top.indices.int().cpu()
    tokens = draw.tokens(logits)
    for i, (answer, row) in enumerate(zip(answers, rows, strict=True)):
        cache.commit(row.slot, row.start + len(row.tokens))
        answer.output.append(tokens[i])
        answer.top_ids.append(ids[i])
        answer.top_logprobs.append(logprobs[i])


def _ended(answer: _Answer, target: TargetModel, max_tokens: int) -> bool:
    """Whether the answer is complete."""
    return answer.output[-1] in target.eos_token_ids or len(answer.output) >= max_tokens


def _close(answer: _Answer, cache: SlotCache, running: list[_Answer]) -> None:
    """Take the features of the processed tokens and free the slot."""
    assert cache.features is not None
    length = cache.lengths[answer.slot]
    answer.features = cache.features[answer.slot, :length].to("cpu", torch.float16, copy=True)
    moved = cache.release(answer.slot)
    if moved is not None:
        next(other for other in running if other.slot == moved).slot = answer.slot


def _write(answers: Sequence[_Answer], meta: Path) -> None:
    """One shard: tensors first, then the list that makes it count; the same bytes for the same answers."""
    tensors: dict[str, torch.Tensor] = {}
    entries: list[dict[str, Any]] = []
    for i, answer in enumerate(answers):
        assert answer.features is not None
        tensors[f"f{i}"] = answer.features
        tensors[f"k{i}"] = torch.stack(answer.top_ids)
        tensors[f"p{i}"] = torch.stack(answer.top_logprobs)
        prompt = answer.prompt
        entries.append(
            {
                "domain": prompt.domain,
                "prompt": prompt.text,
                "ids": list(prompt.ids),
                "out": answer.output,
                "source": prompt.source,
            }
        )
    write_atomically(meta.with_suffix(".safetensors"), save(tensors))
    write_atomically(meta, json.dumps(entries).encode())
