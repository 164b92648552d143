"""``polydraft export``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def export(
    domain: Annotated[str, typer.Argument(help="Domain whose draft to write; base is the generalist.")],
    form: Annotated[str, typer.Option("--format", help="vllm, speculators or peft.")],
    out: Annotated[Path, typer.Option(help="Folder to make.", file_okay=False)],
    config: Annotated[
        str, typer.Option(help="Config file, or the name of a packaged one (demo, gpu).")
    ] = "demo",
    state: Annotated[
        Path | None,
        typer.Option(help="State folder instead of the configured one.", exists=True, file_okay=False),
    ] = None,
    approximate: Annotated[
        bool,
        typer.Option("--approximate", help="Leave out what the format cannot say, and measure the loss."),
    ] = False,
) -> None:
    """Write a domain's draft as a folder that another engine loads.

    vllm and speculators are an EAGLE-3 head with the domain's deltas folded in and its table of draft
    ids (d2t, t2d); peft is the domain's adapter of its draft model. A server may run on the state folder
    meanwhile.

    [bold]Examples[/bold]

    [cyan]polydraft export sql --format vllm --out out/sql-eagle3 --config configs/demo.yaml[/cyan]

    [cyan]vllm serve TARGET --speculative-config
    '{"method": "eagle3", "model": "out/sql-eagle3", "num_speculative_tokens": 3}'[/cyan]
    """
    from drafts.eagle3 import FORMATS
    from drafts.errors import UnknownNameError
    from router.app.export import export as write
    from router.app.export_adapter import PEFT
    from router.config import load_config

    if form not in (*FORMATS, PEFT):
        raise UnknownNameError("--format", form, [*FORMATS, PEFT])
    loaded = load_config(config)
    done = write(domain, form, out, loaded, state or loaded.state.dir, approximate)
    what = "the trunk, as it has no expert yet" if done.version is None else f"version {done.version}"
    typer.echo(f"{domain}: {what} written to {done.folder}")
    if done.lost is not None:
        typer.echo(f"left out: {done.lost}")
    found = done.agreement
    if found is None:
        return
    typer.echo(
        f"draft tokens at {found.positions} positions of the target's answers: {found.same:.1%} as served, "
        f"{found.written:.1%} accepted ({found.served:.1%} as served)"
    )
