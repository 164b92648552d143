"""``polydraft assess``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer


def assess(
    traffic: Annotated[
        str, typer.Argument(help="Traffic file: a JSON object with prompt or messages a line (or: mixed).")
    ],
    config: Annotated[str, typer.Option(help="Config file, or the name of a packaged one (demo, gpu).")],
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first N prompts of the file.")] = None,
    max_tokens: Annotated[int, typer.Option(min=2, help="Most output tokens a prompt.")] = 64,
    experts: Annotated[
        bool, typer.Option("--experts", help="Train experts, routed and shared, on the first two thirds.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of the intervals.")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the result as JSON.")] = None,
) -> None:
    """Tell whether routing, memories and experts would pay on your own prompts, before deploying.

    The target answers every prompt once; the rest is computed from the answers. Labels in the file
    ("domain") are only compared with the router's domains.

    [bold]Examples[/bold]

    [cyan]polydraft assess my.jsonl --config configs/demo.yaml --limit 200[/cyan]

    [cyan]polydraft assess my.jsonl --config configs/demo.yaml --experts --json assess.json[/cyan]
    """
    from rich.console import Console

    from router.app.traffic import read_traffic
    from router.config import load_config
    from router.config.packaged import find_traffic

    items = read_traffic(find_traffic(traffic), limit)
    loaded = load_config(config)
    from router.app.assess import AssessSettings

    settings = AssessSettings(max_tokens=max_tokens, experts=experts, seed=seed)
    console = Console(highlight=False, soft_wrap=True)
    result = _run(loaded, items, settings, console, config)
    show(console, result)
    if json_file is not None:
        import json

        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(result, indent=2, ensure_ascii=False), encoding="utf-8")
        console.print(f"result: {json_file}")


def _run(loaded: Any, items: Any, settings: Any, console: Any, config: str) -> dict[str, Any]:
    from router.app.assess import assess as run_assess
    from router.app.provenance import provenance
    from router.bodies.target import configured_target, trunk_layers
    from router.mind.router import Router

    console.print("loading the target model and the router")
    target, tokenizer = configured_target(loaded, trunk_layers(loaded))
    router = Router.from_config(loaded.router, loaded.domains, learn=False)
    try:
        result = run_assess(loaded, items, settings, target, tokenizer, router, console.print)
    finally:
        router.close()
    return {**result, "provenance": provenance(settings.seed, config=config)}


def show(console: Any, result: dict[str, Any]) -> None:
    """Print routing, ways of drafting and verdicts."""
    from rich.table import Table

    routing = result["routing"]
    counts = ", ".join(f"{name} {count}" for name, count in routing["domains"].items())
    purity = "" if routing["purity"] is None else f", purity {routing['purity']:.2f}"
    console.print(f"prompts by domain: {counts}; unknown {routing['unknown_share']:.0%}{purity}")
    table = Table("drafts", "tokens a pass", "tokens/s expected", "over plain")
    late = {f"{name}, last third": row for name, row in result.get("experts", {}).items()}
    for name, row in {**result["options"], **late}.items():
        table.add_row(
            name.replace("_", " "),
            f"{row['mean_accepted_length']:.2f}",
            f"{row['tokens_per_second']:.0f}",
            f"{row['gain_tokens_per_second']:+.0f}",
        )
    console.print(table)
    for verdict in result["verdicts"].values():
        console.print(verdict["words"])
