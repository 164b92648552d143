"""``polydraft buffer``: what the running server keeps of a domain's answers to learn from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from router.app.client_url import DEFAULT_URL
from router.app.commands.domains import AsJson, Kind, Url
from router.app.commands.output import print_json

app = typer.Typer(no_args_is_help=True, help="What the running server keeps of a domain's answers.")

Name = Annotated[str, typer.Argument(help="Name of the domain.")]


@app.command()
def show(name: Name, url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:
    """Show how much is kept of a domain's answers, and how old it is.

    [bold]Example[/bold]

    [cyan]polydraft buffer show sql[/cyan]
    """
    from router.app.client import Client

    kept = Client(url).buffer(name)
    if as_json:
        print_json(kept)
        return
    for row in kept["buffers"]:
        typer.echo(_line(row))
    if not kept["buffers"]:
        typer.echo("no distillation buffer: nothing was scored yet, or no draft of this domain learns")
    memory = kept["memory"]
    typer.echo(f"memory: {memory['tokens']} tokens, {memory['bytes'] / 1e6:.1f} MB")


@app.command()
def export(
    name: Name,
    file: Annotated[Path, typer.Argument(help="File to write, safetensors.")],
    kind: Kind = None,
    url: Url = DEFAULT_URL,
) -> None:
    """Write a domain's buffer to a file: token ids, the target's probabilities, hidden states.

    [bold]Example[/bold]

    [cyan]polydraft buffer export sql sql.buffer.safetensors[/cyan]
    """
    from drafts.checkpoint import write_atomically
    from router.app.client import Client

    content = Client(url).export_buffer(name, kind)
    write_atomically(file, content)
    typer.echo(f"wrote {file} ({len(content)} bytes)")


@app.command()
def purge(
    name: Name,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    url: Url = DEFAULT_URL,
) -> None:
    """Forget everything that is kept of a domain's answers, in memory and on disk.

    What its expert has learned stays; [cyan]polydraft domains rollback[/cyan] takes that back.

    [bold]Example[/bold]

    [cyan]polydraft buffer purge sql --yes[/cyan]
    """
    from router.app.client import Client

    client = Client(url)
    if not yes:
        client.buffer(name)
        typer.confirm(f"Forget all answers kept of {name}?", abort=True)
    gone = client.purge_buffer(name)
    records = sum(row["records"] + row["held_back"] for row in gone["buffers"])
    typer.echo(f"{name}: {records} records and {gone['memory']['tokens']} tokens of memory are gone")


def _line(row: dict[str, Any]) -> str:
    from datetime import datetime

    share = row["bytes"] / row["max_bytes"]
    line = (
        f"{row['kind']}: {row['records']} records and {row['held_back']} held back, "
        f"{row['positions']} positions, {row['bytes'] / 1e6:.1f} MB ({share:.0%} of what is allowed), "
        f"{row['seen']} seen"
    )
    if row["oldest"] is not None:
        line += f", oldest of {datetime.fromtimestamp(row['oldest']):%Y-%m-%d %H:%M}"
    if row["wrong_share"] is not None:
        line += f", {row['wrong_share']:.0%} of positions were wrong"
    return line
