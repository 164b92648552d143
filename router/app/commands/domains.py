"""``polydraft domains`` and ``polydraft stats``: what the running server knows and does."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from router.app.client_url import DEFAULT_URL
from router.app.commands.output import print_json

app = typer.Typer(no_args_is_help=True, help="Domains of the running server and their drafts' versions.")

Url = Annotated[str, typer.Option(envvar="POLYDRAFT_URL", help="Base URL of the running server.")]
Kind = Annotated[str | None, typer.Option(help="eagle or model; else the domain's first that has versions.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


@app.command("list")
def list_domains(url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:
    """List the registered domains with acceptance, draft version and memory.

    [bold]Example[/bold]

    [cyan]polydraft domains list --url http://127.0.0.1:8321[/cyan]
    """
    from router.app.client import Client

    rows = Client(url).domains()
    if as_json:
        print_json(rows)
    else:
        _print_table(rows)


@app.command()
def add(
    name: Annotated[str, typer.Argument(help="Name of the new domain.")],
    description: Annotated[str, typer.Option(help="One sentence on what belongs to it.")] = "",
    example: Annotated[
        list[str] | None, typer.Option(help="A typical prompt; repeat for more, 5 to 20 are a good start.")
    ] = None,
    examples_file: Annotated[
        Path | None, typer.Option(help="File of examples: one prompt a line, or a traffic file (.jsonl).")
    ] = None,
    draft: Annotated[
        str | None,
        typer.Option(help="Folder or hub name of a draft model of its own, with the target's tokenizer."),
    ] = None,
    url: Url = DEFAULT_URL,
) -> None:
    """Register a domain while the server runs.

    [bold]Example[/bold]

    [cyan]polydraft domains add recipes --description "cooking and baking"
    --example "How do I make pancakes?" --example "What goes into a minestrone?"[/cyan]
    """
    from router.app.client import Client

    examples = [*(example or []), *(_read_examples(examples_file) if examples_file else [])]
    Client(url).add_domain(name, description, examples, draft)
    typer.echo(f"registered {name} with {len(examples)} examples")


@app.command()
def remove(name: Annotated[str, typer.Argument(help="Domain to forget.")], url: Url = DEFAULT_URL) -> None:
    """Forget a domain; requests that run finish on what they began with.

    [bold]Example[/bold]

    [cyan]polydraft domains remove recipes[/cyan]
    """
    from router.app.client import Client

    Client(url).remove_domain(name)
    typer.echo(f"removed {name}")


@app.command()
def versions(
    name: Annotated[str, typer.Argument(help="The domain.")],
    kind: Kind = None,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """List the kept versions of a domain's expert: parent, score and why each was published.

    [bold]Example[/bold]

    [cyan]polydraft domains versions sql[/cyan]
    """
    from router.app.client import Client

    rows = Client(url).versions(name, kind)
    if as_json:
        print_json(rows)
    else:
        _print_versions(name, rows)


@app.command()
def rollback(
    name: Annotated[str, typer.Argument(help="The domain.")],
    to: Annotated[int | None, typer.Option(help="Version to serve; else the served one's parent.")] = None,
    kind: Kind = None,
    url: Url = DEFAULT_URL,
) -> None:
    """Serve an earlier version of a domain's expert again, from the next step on.

    [bold]Example[/bold]

    [cyan]polydraft domains rollback sql --to 3[/cyan]
    """
    from router.app.client import Client

    typer.echo(f"{name} serves version {Client(url).rollback(name, to, kind)['number']}")


@app.command("export")
def export_versions(
    name: Annotated[str, typer.Argument(help="The domain.")],
    file: Annotated[Path, typer.Argument(help="File to write; one that exists is replaced.")],
    kind: Kind = None,
    url: Url = DEFAULT_URL,
) -> None:
    """Write the kept versions of a domain's expert to one file.

    [bold]Example[/bold]

    [cyan]polydraft domains export sql sql.safetensors[/cyan]
    """
    from drafts.checkpoint import write_atomically
    from router.app.client import Client

    content = Client(url).export_versions(name, kind)
    write_atomically(file, content)
    typer.echo(f"wrote {file} ({len(content)} bytes)")


@app.command("import")
def import_versions(
    name: Annotated[str, typer.Argument(help="A registered domain, of whatever name in the file.")],
    file: Annotated[Path, typer.Argument(help="What export wrote, here or on a server of the same trunk.")],
    kind: Kind = None,
    url: Url = DEFAULT_URL,
) -> None:
    """Serve the versions of an exported file; a rollback leads back to the one that is served now.

    [bold]Example[/bold]

    [cyan]polydraft domains import sql sql.safetensors[/cyan]
    """
    from drafts.errors import InvalidValueError
    from router.app.client import Client

    try:
        content = file.read_bytes()
    except OSError as error:
        raise InvalidValueError("FILE", str(file), f"a readable file ({error})") from None
    served = Client(url).import_versions(name, content, file.name, kind)
    typer.echo(f"{name} serves version {served['number']}")


def stats(
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
    matrix: Annotated[
        bool, typer.Option("--matrix", help="Show how each domain's draft does on every domain's text.")
    ] = False,
) -> None:
    """Show acceptance, speed, regret against fixed sources, learning and events of the running server.

    [bold]Examples[/bold]

    [cyan]polydraft stats[/cyan]

    [cyan]polydraft stats --matrix[/cyan]

    [cyan]polydraft stats --json | jq .domains[/cyan]
    """
    from router.app.client import Client

    client = Client(url)
    figures = client.stats()
    if as_json:
        print_json(figures)
        return
    if matrix:
        _print_matrices(figures.get("matrix", {}))
        return
    rows = client.domains()
    _print_table(rows)
    _print_regret(rows)
    learning = figures.get("learning", {})
    typer.echo(
        f"learning: {float(learning.get('share_of_busy_time') or 0):.1%} of busy time, "
        f"{learning.get('updates', 0)} updates, {learning.get('published', 0)} published, "
        f"{learning.get('rolled_back', 0)} rolled back"
    )
    for event in list(figures.get("events", ()))[-5:]:
        typer.echo(f"{event.get('kind')} · {event.get('domain')}: {event.get('reason')}")


def _read_examples(path: Path) -> list[str]:
    from drafts.errors import InvalidValueError
    from router.app.traffic import read_traffic

    if path.suffix == ".jsonl":
        return [item.text for item in read_traffic(path)]
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidValueError("--examples-file", str(path), f"a readable text file ({error})") from None
    return [line.strip() for line in lines if line.strip()]


def _print_matrices(matrices: dict[str, Any]) -> None:
    from rich.console import Console

    from router.app.matrix import matrix_table

    shown = {kind: rows for kind, rows in matrices.items() if rows}
    if not shown:
        typer.echo("nothing was compared yet: answers are scored while drafts learn")
    for kind, rows in shown.items():
        Console().print(matrix_table(kind, rows))


def _print_versions(name: str, rows: list[dict[str, Any]]) -> None:
    from datetime import datetime

    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=f"versions of {escape(name)}", title_justify="left")
    for heading in ("version", "parent", "score", "published", "reason"):
        table.add_column(heading, justify="left" if heading == "reason" else "right")
    for row in rows:
        number = f"[bold]{row['number']} (served)[/bold]" if row["served"] else str(row["number"])
        parent = "–" if row["parent"] is None else str(row["parent"])
        score = "–" if row["score"] is None else f"{row['score']:.3f}"
        published = datetime.fromtimestamp(row["created"]).strftime("%Y-%m-%d %H:%M")
        table.add_row(number, parent, score, published, escape(str(row["reason"])))
    Console().print(table)


def _print_table(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console

    from osd.types import Tally
    from router.app.live import domain_table

    tallies = {str(row["name"]): Tally.from_dict(row) for row in rows}
    Console().print(domain_table(tallies, rows))


def _print_regret(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console

    from router.app.live import regret_table

    table = regret_table(rows)
    if table.row_count:
        Console().print(table)
