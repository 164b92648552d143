"""The ``polydraft`` command. Importing this module is cheap, so that ``--help`` answers at once."""

from __future__ import annotations

import logging
import os
import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from drafts.errors import PolydraftError
from router.app.commands import assess, buffer, config, domains, export, pretrain, replay, serve

app = typer.Typer(
    name="polydraft",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="""An LLM server with speculative decoding whose drafts specialise per domain while it serves.

    The answers are the target model's own, token for token; only the speed changes.

    [bold]Start here[/bold]

    [cyan]polydraft config check configs/demo.yaml[/cyan]  is the config right?

    [cyan]polydraft serve configs/demo.yaml[/cyan]  an OpenAI-compatible server on port 8321

    [cyan]polydraft stats[/cyan]  acceptance per domain of the running server

    [cyan]polydraft replay examples/traffic/mixed.jsonl --config configs/demo.yaml[/cyan]  measure it

    [cyan]polydraft assess my.jsonl --config configs/demo.yaml[/cyan]  would it pay on my prompts?""",
)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"polydraft {version('polydraft')}")
        raise typer.Exit


@app.callback()
def polydraft(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Options before any command."""
    # With torchao installed transformers imports it, and it reports every CUDA library that is not there.
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)


app.command("serve")(serve.serve)
app.command("replay")(replay.replay)
app.command("pretrain")(pretrain.pretrain)
app.command("assess")(assess.assess)
app.add_typer(domains.app, name="domains")
app.add_typer(buffer.app, name="buffer")
app.command("stats")(domains.stats)
app.add_typer(config.app, name="config")
app.command("export")(export.export)
app.command("setup", hidden=True)(serve.setup)


def main() -> None:
    """Run the command; a user's mistake is one message on stderr and exit code 2, never a traceback."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        app()
    except PolydraftError as error:
        Console(stderr=True, highlight=False, soft_wrap=True).print(f"[red]error:[/red] {escape(str(error))}")
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
