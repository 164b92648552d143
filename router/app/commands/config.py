"""``polydraft config``: the schema of configs, and whether a file is right."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from router.config import PolydraftConfig

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


def _unchecked_drafts(config: PolydraftConfig) -> list[str]:
    """Compare every draft model's tokenizer with the target's (case A22); paths that could not be compared.

    Raises:
        InvalidValueError: Names the draft and the first token id that differs.
    """
    named = {f"domains[{i}].draft.path": domain.draft for i, domain in enumerate(config.domains)}
    drafts = {
        field: draft
        for field, draft in {"drafts.model.path": config.drafts.model, **named}.items()
        if draft is not None
    }
    if not drafts:
        return []
    from drafts.errors import InvalidValueError
    from drafts.kinds.model import check_files
    from osd.serve.load import load_tokenizer

    try:
        tokenizer = load_tokenizer(config.target.model, config.target.cache_dir)
    except InvalidValueError:
        return [config.target.model]
    missing: list[str] = []
    for field, draft in drafts.items():
        try:
            if not check_files(draft, tokenizer):
                missing.append(draft.path)
        except InvalidValueError as error:
            raise InvalidValueError(field, error.value, error.allowed) from error
    return missing


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
    for path in _unchecked_drafts(config):
        typer.echo(
            f"note: {path} is not on this machine, so its tokenizer was not compared with the target's"
        )
    names = ", ".join(domain.name for domain in config.domains) or "none"
    typer.echo(f"{file} is a valid config; declared domains: {names}")
