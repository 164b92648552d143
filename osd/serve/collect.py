"""Collects what trains a trunk: the target's own answers with features and evidence, in shards.

Plain batched decoding without any draft, so that what is collected depends on the target alone. The shards
are those of ``osd.learn.pretrain_data``; they are written one a batch, so an interrupted run goes on.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from osd.serve.cache import SlotCache
from osd.serve.target import PassRow, TargetModel

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


def encode_prompts(
    entries: Sequence[dict[str, Any]], tokenizer: Any, max_prompt: int, excluded: frozenset[str]
) -> list[Prompt]:
    """Prompts from traffic entries, without repeats, excluded texts and those over ``max_prompt`` tokens."""
    prompts: list[Prompt] = []
    seen = set(excluded)
    for entry in entries:
        text = str(entry["prompt"]).strip()
        if text in seen:
            continue
        seen.add(text)
        encoded = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=True, return_dict=True
        )
        ids = tuple(int(token) for token in encoded["input_ids"])
        if 2 <= len(ids) <= max_prompt:
            prompts.append(
                Prompt(str(entry.get("domain", "")), str(entry.get("source", "unknown")), text, ids)
            )
    return prompts


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
    """
    folder.mkdir(parents=True, exist_ok=True)
    ordered = sorted(prompts, key=lambda prompt: (len(prompt.ids), prompt.text))
    cut = [ordered[i : i + batch] for i in range(0, len(ordered), batch)]
    draw = _Draw(temperature, seed)
    tokens = 0
    shards: list[Path] = []
    for number, group in enumerate(cut, start=1):
        digest = _digest(target, group, max_tokens, evidence_k, draw)
        meta = folder / f"{number:04d}-{digest}.json"
        if not meta.exists():
            draw.start(digest)
            _write(_answer(target, group, max_tokens, evidence_k, draw), meta)
        tokens += sum(len(entry["out"]) for entry in json.loads(meta.read_text()))
        shards.append(meta)
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


def _digest(
    target: TargetModel, group: Sequence[Prompt], max_tokens: int, evidence_k: int, draw: _Draw
) -> str:
    """Short hash of everything that decides a shard."""
    facts: list[Any] = [target.name, target.feature_layers, max_tokens, evidence_k, [p.ids for p in group]]
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
    """One shard: tensors first, then the list that makes it count."""
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
    save_file(tensors, meta.with_suffix(".safetensors"))
    part = meta.with_suffix(".part")
    part.write_text(json.dumps(entries))
    part.replace(meta)
