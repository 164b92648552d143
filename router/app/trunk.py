"""``make trunk``: the trunk of the ``eagle`` drafts from prompts to file, with its provenance.

Asks the target, trains on its answers, and writes ``trunk.safetensors`` with ``trunk.provenance.json``
beside it. Prompts that evaluate the project must never train it: pass their files as ``--exclude``.
"""

from __future__ import annotations

import json
import random
import re
import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from drafts.data import TRUNK, TRUNK_PROVENANCE
from drafts.trunk import HeadShape, Trunk
from osd.learn.pretrain import Epoch, PretrainConfig, train
from osd.learn.pretrain_data import Answer, choose_vocabulary, load_shards, split
from osd.serve.collect import collect, encode_prompts
from osd.serve.load import load_target
from osd.serve.target import TargetModel
from router.app.provenance import commit, versions

DRAWN_TEMPERATURE = 0.7
"""Second answers are drawn at this temperature: other texts than the greedy ones, of the same kind."""

PROMPTS = Path("examples/pretrain/prompts.jsonl")
EVALUATION = Path("examples/traffic/mixed.jsonl")

console = Console()


def head_shape(target: TargetModel) -> HeadShape:
    """The head's dimensions, from the target's config."""
    config = target.reference.config.get_text_config()
    heads = int(config.num_attention_heads)
    rope = getattr(config, "rope_parameters", None) or {}
    return HeadShape(
        hidden_size=target.hidden_size,
        intermediate_size=int(config.intermediate_size),
        heads=heads,
        kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
        head_dim=int(getattr(config, "head_dim", None) or target.hidden_size // heads),
        norm_eps=float(getattr(config, "rms_norm_eps", 1e-5)),
        rope_theta=float(rope.get("rope_theta", 10000.0)),
        feature_layers=tuple(target.feature_layers),
        vocab_size=target.vocab_size,
    )


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


def coverage(answers: Sequence[Answer], token_ids: torch.Tensor) -> float:
    """Share of answer tokens that lie in the draft vocabulary."""
    inside = sum(int(torch.isin(a.tokens[a.prompt_length :], token_ids).sum()) for a in answers)
    return inside / max(1, sum(a.output_length for a in answers))


def provenance_of(
    answers: Sequence[Answer],
    trunk: Trunk,
    target: str,
    config: PretrainConfig,
    epochs: Sequence[Epoch],
    held: Sequence[Answer],
    command: str,
) -> dict[str, Any]:
    """All that is needed to judge the trunk and to make it again; no path of this machine."""
    return {
        "target": target,
        "fingerprint": trunk.fingerprint(),
        "shape": asdict(trunk.shape),
        "draft_vocabulary": len(trunk.token_ids),
        "held_back_coverage": round(coverage(held, trunk.token_ids), 4),
        "data": describe_data(answers),
        "held_back_prompts": len(held),
        "training": config.as_dict(),
        "epochs": [asdict(epoch) for epoch in epochs],
        "command": command,
        "commit": commit(),
        "versions": versions(),
    }


def _lines(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """All entries of JSON-lines files."""
    return [json.loads(line) for path in paths for line in path.read_text().splitlines() if line.strip()]


def main(
    prompts: Annotated[list[Path] | None, typer.Option(help="Files of prompts, JSON lines.")] = None,
    exclude: Annotated[list[Path] | None, typer.Option(help="Files whose prompts are never used.")] = None,
    target: Annotated[str, typer.Option(help="embedded, a folder or a hub name.")] = "embedded",
    shards: Annotated[Path, typer.Option(help="Where collected answers go.")] = Path("out/trunk"),
    out: Annotated[Path, typer.Option(help="The trunk's file.")] = TRUNK,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the answers.")] = 5,
    draft_vocab: Annotated[int, typer.Option(min=64, help="Size of the draft vocabulary.")] = 8192,
    held_back: Annotated[
        float, typer.Option(min=0.01, max=0.5, help="Share of prompts to report on.")
    ] = 0.05,
    max_tokens: Annotated[int, typer.Option(min=2, help="Longest greedy answer collected.")] = 224,
    drawn_tokens: Annotated[
        int, typer.Option(min=0, help="Longest drawn answer, one more for every prompt; 0 for none.")
    ] = 160,
    seed: Annotated[int, typer.Option(help="Of the split, the initial weights and the order.")] = 0,
) -> None:
    """Collect the target's answers and train the trunk on them."""
    torch.manual_seed(seed)
    random.seed(seed)
    model, tokenizer = load_target(target)
    excluded = frozenset(str(entry["prompt"]).strip() for entry in _lines([*(exclude or []), EVALUATION]))
    asked = encode_prompts(_lines(prompts or [PROMPTS]), tokenizer, 420, excluded)
    console.print(f"{len(asked)} prompts")

    def progress(done: int, batches: int, tokens: int) -> None:
        console.print(f"shard {done}/{batches}, {tokens} answer tokens")

    answers = load_shards(collect(model, asked, shards, max_tokens=max_tokens, progress=progress))
    training, held = split(answers, held_back, seed)
    if drawn_tokens:
        drawn = collect(
            model,
            asked,
            shards,
            max_tokens=drawn_tokens,
            temperature=DRAWN_TEMPERATURE,
            seed=seed,
            progress=progress,
        )
        unseen = {prompt_of(answer) for answer in held}
        training += [answer for answer in load_shards(drawn) if prompt_of(answer) not in unseen]
        answers = [*training, *held]
    vocabulary = min(draft_vocab, model.vocab_size)
    token_ids = choose_vocabulary(training, vocabulary, model.vocab_size, sorted(model.eos_token_ids))
    trunk = Trunk.fresh(head_shape(model), token_ids, seed)
    config = PretrainConfig(epochs=epochs, deeper_share=0.4, seed=seed)
    reports: list[Epoch] = []

    def report(epoch: Epoch) -> None:
        reports.append(epoch)
        figures = epoch.labels["all"]
        tau = ", ".join(f"{value:.2f}" for value in figures.tau)
        console.print(
            f"epoch {epoch.number}: loss {epoch.loss:.3f}, first token {figures.first_token:.3f}, "
            f"tau of chains 1, 2, … {tau} ({epoch.seconds:.0f} s)"
        )

    train(trunk, model.embedding.float(), model.output_weight.float(), training, held, config, report)
    trunk.save(out)
    command = shlex.join(["python", "-m", "router.app.trunk", *sys.argv[1:]])
    facts = provenance_of(answers, Trunk.load(out), target, config, reports, held, command)
    out.with_name(TRUNK_PROVENANCE).write_text(json.dumps(facts, indent=1) + "\n")
    console.print(f"wrote {out}")


if __name__ == "__main__":
    typer.run(main)
