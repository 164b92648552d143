"""``polydraft pretrain``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def pretrain(
    config: Annotated[str, typer.Option(help="Config file, or the name of a packaged one (demo, gpu).")],
    prompts: Annotated[
        list[Path] | None, typer.Option(help="File of prompts, as replay reads them; may be repeated.")
    ] = None,
    exclude: Annotated[
        list[Path] | None,
        typer.Option(help="File whose prompts are never used, such as those that evaluate."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The trunk's file; the one that the config names, by default.")
    ] = None,
    replace_packaged: Annotated[
        bool, typer.Option("--replace-packaged", help="Let --out replace the trunk that the demo comes with.")
    ] = False,
    shards: Annotated[
        Path, typer.Option(help="Folder of the collected answers, of one target.", file_okay=False)
    ] = Path("out/trunk"),
    layers: Annotated[
        str | None, typer.Option(help="Target layers the head reads, for example 9,20,30.")
    ] = None,
    collect_layers: Annotated[
        str | None, typer.Option(help="Target layers that are kept, to choose --layers from later.")
    ] = None,
    coverage: Annotated[
        float | None,
        typer.Option(
            min=0.01, max=1.0, help="Smallest vocabulary that covers this share of held-back answers. [0.95]"
        ),
    ] = None,
    draft_vocab: Annotated[
        int | None, typer.Option(min=64, help="Size of the draft vocabulary, instead of --coverage.")
    ] = None,
    init: Annotated[str, typer.Option(help="First weights: fresh, or of the target's last layer.")] = "fresh",
    loss: Annotated[
        str, typer.Option(help="forward_kl, reverse_kl, jensen_shannon, total_variation or acceptance.")
    ] = "forward_kl",
    support: Annotated[
        str, typer.Option(help="Compare at the target's top ids, or on the full draft vocabulary: top, full.")
    ] = "top",
    epochs: Annotated[int, typer.Option(min=1, max=1000, help="Passes over the answers.")] = 5,
    max_prompt: Annotated[int, typer.Option(min=2, help="Most tokens of a prompt.")] = 420,
    skip_long: Annotated[
        bool, typer.Option("--skip-long", help="Leave longer prompts out instead of refusing them.")
    ] = False,
    max_tokens: Annotated[int, typer.Option(min=2, help="Longest greedy answer.")] = 224,
    drawn_tokens: Annotated[
        int, typer.Option(min=0, help="Longest drawn answer, one more for every prompt; 0 for none.")
    ] = 160,
    batch: Annotated[int, typer.Option(min=1, help="Prompts answered together; one shard.")] = 32,
    held_back: Annotated[
        float, typer.Option(min=0.01, max=0.5, help="Share of prompts to report on.")
    ] = 0.05,
    seed: Annotated[
        int, typer.Option(min=0, max=2**31 - 1, help="Of the split, the weights and the order.")
    ] = 0,
) -> None:
    """Train the trunk of the eagle drafts for a config's target, on that target's own answers.

    Answers and every epoch are kept, so the same command goes on where it was killed.

    [bold]Examples[/bold]

    [cyan]polydraft pretrain --config my.yaml --prompts prompts.jsonl --exclude mix.jsonl
    --out my.safetensors[/cyan]

    then [cyan]drafts: {eagle: {trunk: ./my.safetensors}}[/cyan] in the config
    """
    from pydantic import ValidationError
    from rich.console import Console

    from drafts.errors import InvalidValueError
    from osd.learn.pretrain_config import PretrainConfig
    from router.config import load_config

    if coverage is not None and draft_vocab is not None:
        raise InvalidValueError("--draft-vocab", draft_vocab, "either --draft-vocab or --coverage")
    try:
        training = PretrainConfig.model_validate(
            {
                "layers": parse_layers("--layers", layers),
                "init": init,
                "draft_vocab": draft_vocab,
                "coverage": 0.95 if coverage is None else coverage,
                "loss": loss,
                "support": support,
                "epochs": epochs,
                "seed": seed,
            }
        )
    except ValidationError as error:
        first = error.errors()[0]
        raise InvalidValueError(f"--{first['loc'][0]}", first["input"], first["msg"]) from None
    kept = parse_layers("--collect-layers", collect_layers)
    if kept and training.layers and not set(training.layers) <= set(kept):
        raise InvalidValueError("--layers", list(training.layers), f"of --collect-layers: {list(kept)}")
    loaded = load_config(config)
    named = loaded.drafts.eagle.trunk

    from router.app.pretrain import PretrainRun
    from router.app.pretrain import pretrain as run_pretrain

    run = PretrainRun(
        prompts=tuple(prompts or ()),
        exclude=tuple(exclude or ()),
        shards=shards,
        out=out or Path("out/trunk.safetensors" if named == "embedded" else named),
        collect_layers=kept,
        max_prompt=max_prompt,
        skip_long=skip_long,
        max_tokens=max_tokens,
        drawn_tokens=drawn_tokens,
        batch=batch,
        held_back=held_back,
        replace_packaged=replace_packaged,
        training=training,
    )
    run_pretrain(loaded, run, Console(highlight=False, soft_wrap=True))


def parse_layers(option: str, text: str | None) -> tuple[int, ...] | None:
    """``9,20,30`` as numbers; absent, no choice."""
    from drafts.errors import InvalidValueError

    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    numbers = [int(part) for part in parts if part.isdigit()]
    if len(numbers) != len(parts) or numbers != sorted(set(numbers)) or numbers[0] < 1:
        raise InvalidValueError(option, text, "ascending numbers of layers from 1, for example 9,20,30")
    return tuple(numbers)
