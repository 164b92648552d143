"""A trunk for a deployment's target: asks the target, trains on its answers, writes the file."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from drafts.checkpoint import write_atomically
from drafts.errors import InvalidValueError
from drafts.trunk import Trunk
from osd.learn.initial import initial_trunk
from osd.learn.pretrain import Step, train
from osd.learn.pretrain_config import PretrainConfig
from osd.learn.pretrain_data import Answer, coverage, load_shards, split
from osd.learn.pretrain_state import Epoch
from osd.lent import Lent
from osd.serve.collect import Prompt, collect
from osd.serve.lend import lend
from osd.serve.target import TargetModel
from router.app.pretrain_facts import prompt_of, provenance_of
from router.app.pretrain_prompts import read_prompts
from router.bodies.target import configured_target
from router.config import PolydraftConfig

DRAWN_TEMPERATURE = 0.7
"""Second answers are drawn at this temperature: other texts than the greedy ones, of the same kind."""


@dataclass(frozen=True)
class PretrainRun:
    """One call of ``polydraft pretrain``.

    Attributes:
        prompts: Files of prompts.
        exclude: Files whose prompts are never used: those that evaluate.
        shards: Where answers are collected, for one target.
        out: The trunk's file.
        collect_layers: Layers whose hidden states are kept; ``None`` are the target's default ones.
        max_prompt: Most tokens of a prompt.
        skip_long: Leave longer prompts out, instead of refusing them.
        max_tokens: Longest greedy answer.
        drawn_tokens: Longest drawn answer, one more for every prompt; 0 for none.
        batch: Prompts answered together, one shard.
        held_back: Share of prompts never trained on, for the figures.
        replace_packaged: Let ``out`` be a file of the package, where the demo's trunk lies.
        training: Settings of the training.
    """

    prompts: tuple[Path, ...]
    exclude: tuple[Path, ...]
    shards: Path
    out: Path
    collect_layers: tuple[int, ...] | None = None
    max_prompt: int = 420
    skip_long: bool = False
    max_tokens: int = 224
    drawn_tokens: int = 160
    batch: int = 32
    held_back: float = 0.05
    replace_packaged: bool = False
    training: PretrainConfig = field(default_factory=PretrainConfig)


def pretrain(deployment: PolydraftConfig, run: PretrainRun, console: Console) -> None:
    """Collect the answers of the deployment's target, train a trunk on them and write it.

    What was collected and every epoch is kept on disk, so that the same call goes on after a kill.

    Raises:
        InvalidValueError: A trunk that would replace the packaged one, no prompts, a bad line, a prompt too
            long, a disk too full, or a layer that is not there.
        CheckpointError: Shards of another target, a training left by other settings, or a file that
            cannot be written.
    """
    packaged = Path(str(resources.files("drafts") / "data")).resolve()
    if run.out.resolve().parent == packaged and not run.replace_packaged:
        allowed = "a file outside the package, whose trunk the demo needs, unless with --replace-packaged"
        raise InvalidValueError("--out", str(run.out), allowed)
    torch.manual_seed(run.training.seed)
    try:
        run.out.parent.mkdir(parents=True, exist_ok=True)
        run.shards.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidValueError(
            "--out, --shards", [str(run.out), str(run.shards)], f"places that can be written ({error})"
        ) from None
    target, tokenizer = _target(deployment, run)
    asked, long = read_prompts(run.prompts, run.exclude, tokenizer, run.max_prompt, skip_long=run.skip_long)
    console.print(f"{len(asked)} prompts" + (f", {long} too long and left out" if long else ""))
    lent = lend(target).reading(run.training.layers)
    with _progress(console) as bars:
        training, held = _answers(target, asked, run, bars, console)
        del target  # its memory is wanted now
        trunk = initial_trunk(lent, training, held, run.training)
        console.print(
            f"{len(training)} answers to train on, {len(held)} held back; {len(trunk.token_ids)} ids cover "
            f"{coverage(held, trunk.token_ids):.3f} of what those say"
        )
        checkpoint = run.out.with_suffix(".training.safetensors")
        reports = _train(trunk, lent, training, held, run.training, checkpoint, bars, console)
    trunk.save(run.out)
    facts = provenance_of(training, held, Trunk.load(run.out), lent.name, run.training, reports)
    write_atomically(run.out.with_suffix(".provenance.json"), (json.dumps(facts, indent=1) + "\n").encode())
    checkpoint.unlink(missing_ok=True)
    console.print(f"wrote {run.out}; a config names it as drafts: {{eagle: {{trunk: {run.out}}}}}")


def _target(deployment: PolydraftConfig, run: PretrainRun) -> tuple[TargetModel, Any]:
    if deployment.engine.threads is not None:
        torch.set_num_threads(deployment.engine.threads)
    target, tokenizer = configured_target(deployment, run.collect_layers or run.training.layers)
    longest = run.max_prompt + max(run.max_tokens, run.drawn_tokens)
    if longest > target.max_positions:
        raise InvalidValueError(
            "--max-prompt", run.max_prompt, f"with the longest answer at most {target.max_positions} tokens"
        )
    return target, tokenizer


def _answers(
    target: TargetModel, asked: list[Prompt], run: PretrainRun, bars: Progress, console: Console
) -> tuple[list[Answer], list[Answer]]:
    """Answers to train on and answers held back, with the features of the layers that are trained on."""

    def collected(name: str, max_tokens: int, temperature: float) -> list[Answer]:
        bar = bars.add_task(name, total=None)

        def progress(done: int, batches: int, tokens: int) -> None:
            bars.update(bar, completed=done, total=batches)
            if not console.is_terminal:
                console.print(f"{name}: shard {done} of {batches}, {tokens} tokens")

        files = collect(
            target,
            asked,
            run.shards,
            max_tokens=max_tokens,
            batch=run.batch,
            evidence_k=min(32, target.vocab_size),
            temperature=temperature,
            seed=run.training.seed,
            progress=progress,
        )
        return load_shards(files, run.training.layers)

    training, held = split(collected("greedy answers", run.max_tokens, 0.0), run.held_back, run.training.seed)
    if run.drawn_tokens:
        unseen = {prompt_of(answer) for answer in held}
        drawn = collected("drawn answers", run.drawn_tokens, DRAWN_TEMPERATURE)
        training += [answer for answer in drawn if prompt_of(answer) not in unseen]
    return training, held


def _train(
    trunk: Trunk,
    lent: Lent,
    training: list[Answer],
    held: list[Answer],
    config: PretrainConfig,
    checkpoint: Path,
    bars: Progress,
    console: Console,
) -> list[Epoch]:
    bar: TaskID = bars.add_task("training", total=None)

    def progress(step: Step) -> None:
        bars.update(
            bar, completed=step.number, total=step.steps, description=f"training, loss {step.loss:.2f}"
        )

    def report(epoch: Epoch) -> None:
        figures = epoch.labels["all"]
        tau = ", ".join(f"{value:.2f}" for value in figures.tau)
        console.print(
            f"epoch {epoch.number}: loss {epoch.loss:.3f}, first token {figures.first_token:.3f}, "
            f"tau of chains 1, 2, … {tau} ({epoch.seconds:.0f} s)"
        )

    return train(trunk, lent, training, held, config, report, progress, checkpoint)


def _progress(console: Console) -> Progress:
    """Bars on a terminal, nothing elsewhere."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, disable=not console.is_terminal)
