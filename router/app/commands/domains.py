"""``polydraft domains`` and ``polydraft stats``: what the running server knows and does."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from router.app.client_url import DEFAULT_URL

app = typer.Typer(no_args_is_help=True, help="List, register and remove domains of the running server.")

Url = Annotated[str, typer.Option(envvar="POLYDRAFT_URL", help="Base URL of the running server.")]
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
        _print_json(rows)
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


def stats(url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:
    """Show acceptance, speed, learning and events of the running server.

    [bold]Examples[/bold]

    [cyan]polydraft stats[/cyan]

    [cyan]polydraft stats --json | jq .domains[/cyan]
    """
    from router.app.client import Client

    client = Client(url)
    figures = client.stats()
    if as_json:
        _print_json(figures)
        return
    _print_table(client.domains())
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


def _print_json(content: Any) -> None:
    import json

    typer.echo(json.dumps(content, indent=2, ensure_ascii=False))


def _print_table(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console

    from osd.types import Tally
    from router.app.live import domain_table

    tallies = {str(row["name"]): Tally.from_dict(row) for row in rows}
    Console().print(domain_table(tallies, rows))
