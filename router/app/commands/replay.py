"""``polydraft replay``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

MOST_TIES = 0.01
"""Share of near ties from which on answers do not count as the target model's."""


def replay(
    traffic: Annotated[
        str, typer.Argument(help="Traffic file: a JSON object with prompt or messages a line (or: mixed).")
    ],
    config: Annotated[str, typer.Option(help="Config file, or the name of a packaged one (demo, gpu).")],
    concurrency: Annotated[int, typer.Option(min=1, help="Requests in flight.")] = 1,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most output tokens a request.")] = 128,
    temperature: Annotated[float, typer.Option(min=0, max=10, help="0 is greedy.")] = 0.0,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first N requests of the file.")] = None,
    compare: Annotated[
        str, typer.Option(help="Baselines on the same prompts, in paired blocks: plain, generate or both.")
    ] = "",
    compare_limit: Annotated[
        int | None, typer.Option(min=1, help="Compare on a seeded sample of N prompts, served last.")
    ] = None,
    verify: Annotated[
        int, typer.Option(min=0, help="Check N answers against the plain Hugging Face model.")
    ] = 0,
    freeze: Annotated[bool, typer.Option("--freeze", help="Turn all learning off.")] = False,
    seed: Annotated[int, typer.Option(help="Seed; every request gets its own from it.")] = 0,
    k: Annotated[str, typer.Option(help="Speculation length: auto, or a fixed number (0 = none).")] = "auto",
    nodes: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=64,
            help="Verify trees of N nodes a request and step, whether they pay or not: with --verify a check "
            "of trees under load.",
        ),
    ] = None,
    sources: Annotated[
        str | None,
        typer.Option(help="Draft sources, comma-separated, for example lookup,ngram; none = plain."),
    ] = None,
    state: Annotated[
        Path | None,
        typer.Option(help="State folder to start from and to save to; empty and temporary without."),
    ] = None,
    outputs: Annotated[
        Path | None, typer.Option(help="Write a JSON line a request: tokens, domain, versions, rounds.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the result as JSON.")] = None,
    report: Annotated[
        Path | None, typer.Option(help="Write the result as a self-contained HTML page.")
    ] = None,
    live: Annotated[
        bool | None, typer.Option("--live/--no-live", help="Live table; on where there is a terminal.")
    ] = None,
) -> None:
    """Serve traffic from a file in this process, and measure, compare and check it.

    Labels in the file ("domain") are for the evaluation only; the router never sees them.

    [bold]Examples[/bold]

    [cyan]polydraft replay examples/traffic/mixed.jsonl --config configs/demo.yaml --limit 40[/cyan]

    [cyan]polydraft replay my.jsonl --config configs/demo.yaml --concurrency 8 --compare plain,generate
    --verify 20 --json out.json --report out.html[/cyan]  speeds, losslessness, report

    [cyan]polydraft replay my.jsonl --config configs/demo.yaml --freeze --k 4 --sources lookup,ngram[/cyan]
    """
    from rich.console import Console

    from router.app.compare import parse_baselines
    from router.app.replay import ReplaySettings
    from router.app.traffic import read_traffic

    settings = ReplaySettings(
        concurrency=concurrency,
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        compare=parse_baselines(compare),
        compare_limit=compare_limit,
        verify=verify,
        freeze=freeze,
        k=parse_k(k),
        nodes=nodes,
        sources=parse_sources(sources),
        outputs=outputs,
    )
    settings.check()

    from router.config import load_config
    from router.config.packaged import find_traffic

    items = read_traffic(find_traffic(traffic), limit)
    loaded = load_config(config)
    if verify and temperature and loaded.engine.verification == "rejection":
        from drafts.errors import InvalidValueError

        raise InvalidValueError(
            "--verify",
            verify,
            "0 at a temperature above 0 with engine.verification: rejection (no seed fixes it)",
        )
    for path in (outputs, json_file, report):
        _writable(path)

    console = Console(highlight=False, soft_wrap=True)
    result = _run(
        loaded, settings, items, state, console, console.is_terminal if live is None else live, config
    )
    _finish(result, console, json_file, report)


def parse_k(text: str) -> int | None:
    """``auto`` is ``None``; anything else a number from 0."""
    from drafts.errors import InvalidValueError

    if text == "auto":
        return None
    if not text.isdigit() or int(text) > 64:
        raise InvalidValueError("--k", text, "auto or a number from 0 to 64")
    return int(text)


def parse_sources(text: str | None) -> tuple[str, ...] | None:
    """Names in order; ``none`` is no source at all, absent the configured ones."""
    from drafts import kinds
    from drafts.errors import InvalidValueError, UnknownNameError

    if text is None:
        return None
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise InvalidValueError("--sources", text, "names of draft sources, or none")
    if names == ("none",):
        return ()
    for name in names:
        if name not in kinds.names():
            raise UnknownNameError("--sources", name, ["none", *kinds.names()])
    return names


def _writable(path: Path | None) -> None:
    """Fail before the run, not after it, when a result cannot be written."""
    from drafts.errors import InvalidValueError

    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a", encoding="utf-8"):
            pass
    except OSError as error:
        raise InvalidValueError(
            "output file", str(path), f"a file that can be written ({error.strerror})"
        ) from None


def _run(
    loaded: Any, settings: Any, items: Any, state: Path | None, console: Any, live: bool, config: str
) -> dict[str, Any]:
    import warnings

    from router.app.live import LiveListener
    from router.app.local import local_engine
    from router.app.provenance import provenance
    from router.app.replay import replay as run_replay

    warnings.filterwarnings("ignore", category=FutureWarning)
    console.print("loading the target model and the drafts")
    with local_engine(loaded, settings, state) as engine, LiveListener(console, live=live) as listener:
        origin = provenance(settings.seed, config=config)
        return run_replay(engine, items, settings, provenance=origin, listener=listener)


def _finish(result: dict[str, Any], console: Any, json_file: Path | None, report: Path | None) -> None:
    from router.app.live import print_summary

    print_summary(console, result)
    if json_file is not None:
        import json

        json_file.write_text(json.dumps(result, indent=2, ensure_ascii=False, default=str), encoding="utf-8")
        console.print(f"result: {json_file}")
    if report is not None:
        from router.app.report import write_report

        console.print(f"report: {write_report(result, report)}")
    broken = any(not item["refused"] for item in result["failed"])
    verify = result["verify"]
    if verify.get("ties_share", 0.0) >= MOST_TIES:
        console.print(f"[red]{verify['ties']} near ties are {MOST_TIES:.0%} of tokens or more[/red]")
        broken = True
    if broken or verify["mismatched"]:
        raise typer.Exit(1)
