"""``polydraft serve`` and the hidden ``setup``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer


def serve(
    config: Annotated[str, typer.Argument(help="Config file, or the name of a packaged one (demo, gpu).")],
    host: Annotated[
        str | None, typer.Option(help="Address to listen on instead of the config's; 0.0.0.0 is everywhere.")
    ] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port to listen on instead of the config's.")
    ] = None,
    state: Annotated[
        Path | None, typer.Option(help="State folder instead of the configured one.", file_okay=False)
    ] = None,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
) -> None:
    """Serve an OpenAI-compatible API; [cyan]/ready[/cyan] turns 200 when the model is warm.

    [bold]Examples[/bold]

    [cyan]polydraft serve configs/demo.yaml --port 8080[/cyan]

    [cyan]curl localhost:8321/v1/chat/completions -H 'content-type: application/json'
    -d '{"messages": [{"role": "user", "content": "What is 3 + 4?"}]}'[/cyan]

    [cyan]curl localhost:8321/v1/domains[/cyan]  acceptance per domain
    """
    import logging

    from drafts.errors import InvalidValueError
    from router.config import load_config

    if log_level not in ("debug", "info", "warning", "error"):
        raise InvalidValueError("--log-level", log_level, "debug, info, warning or error")
    settings = load_config(config)
    changed = {name: value for name, value in (("host", host), ("port", port)) if value is not None}
    service = settings.server.model_copy(update=changed)
    logging.basicConfig(level=log_level.upper(), format="%(levelname)s: %(name)s: %(message)s")

    from router.app.server import run

    def load() -> Any:
        from router.bodies.api import EngineOptions
        from router.bodies.embedded import Engine

        options = EngineOptions(state_dir=None if state is None else str(state))
        engine = Engine.from_config(settings, options)
        logging.getLogger("polydraft").info("ready: serving %s", engine.model_name)
        return engine

    run(load, service, model_name=settings.target.model, log_level=log_level)


def setup(
    force: Annotated[bool, typer.Option(help="Build the model cache again.")] = False,
) -> None:
    """Build the model cache that the embedded target needs. [dim]Called by make setup.[/dim]"""
    from router.app.warm import warm

    warm(force=force)
