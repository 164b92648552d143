"""``polydraft config``: the schema of configs, and whether a file is right."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="Check config files and print their schema.")


@app.command()
def schema() -> None:
    """Print the JSON schema of config files.

    [bold]Example[/bold]

    [cyan]polydraft config schema > polydraft.schema.json[/cyan]  then name it in your editor for completion
    """
    import json

    from router.config import config_schema

    typer.echo(json.dumps(config_schema(), indent=2))


@app.command()
def check(
    file: Annotated[str, typer.Argument(help="Config file, or the name of a packaged one (demo, gpu).")],
) -> None:
    """Check a config file; errors name the key, the value and what is allowed.

    [bold]Example[/bold]

    [cyan]polydraft config check configs/demo.yaml[/cyan]
    """
    from router.config import load_config

    config = load_config(file)
    names = ", ".join(domain.name for domain in config.domains) or "none"
    typer.echo(f"{file} is a valid config; declared domains: {names}")
