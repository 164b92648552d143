"""A replay on the terminal: a live table of domains, events as they happen, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from osd.types import Tally
from router.app.inflight import Served
from router.app.summary import tally

PLAIN_EVERY = 10.0
"""Seconds between two progress lines where there is no terminal."""

TABLE_EVERY = 45.0
"""Seconds between two tables of domains where there is no terminal."""

PHASES = {
    "replay": "serving the traffic",
    "compare": "comparing in paired blocks",
    "verify": "checking answers against the plain model",
}


HEADINGS = ("requests", "acceptance", "α", "τ", "k", "gain", "tokens/s", "version", "memory", "buffer")


def domain_table(
    tallies: Mapping[str, Tally], rows: Sequence[Mapping[str, Any]], title: str | None = None
) -> Table:
    """The table of domains: acceptance from the answers; mean speculation length, realised speed-up over
    plain decoding as estimated, version, tokens in memory and records in the distillation buffer from the
    engine.
    """
    table = Table(title=title, title_justify="left")
    table.add_column("domain", no_wrap=True)
    for heading in HEADINGS:
        table.add_column(heading, justify="right")
    known = {str(row.get("name")): row for row in rows}
    for name in dict.fromkeys([*known, *tallies]):
        counters, row = tallies.get(name, Tally()), known.get(name, {})
        kept = row.get("buffer") or {}
        chosen = row.get("speculation") or {}
        speedup = (chosen.get("realised") or {}).get("speedup")
        table.add_row(
            escape(name),
            str(counters.requests),
            f"{counters.acceptance_rate:.2f}",
            f"{counters.alpha:.2f}",
            f"{counters.mean_accepted_length:.2f}",
            "–" if not chosen.get("steps") else f"{chosen['k']:.1f}",
            "–" if speedup is None else f"{speedup:.2f}×",
            f"{counters.tokens_per_second:.1f}",
            str(row.get("version", row.get("draft_version", 0))),
            shown(kept.get("memory_tokens")),
            shown(kept.get("records")),
        )
    return table


def regret_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """By domain, what each source alone would have gained at its best fixed depth, beside what was served.

    Gains are accepted tokens a step less what their time is worth; regret below 0 says that the mixture
    does better than the source alone.
    """
    table = Table(title="against fixed sources, tokens a step", title_justify="left")
    table.add_column("domain", no_wrap=True)
    for heading in ("source", "depth", "steps", "accepted", "gain", "regret", "weight"):
        table.add_column(heading, justify="left" if heading == "source" else "right")
    for row in rows:
        regret = (row.get("speculation") or {}).get("regret") or {}
        if not regret.get("steps"):
            continue
        served = regret["served"]
        accepted, gain = f"{served['accepted_per_step']:.2f}", f"{served['gain_per_step']:.2f}"
        table.add_row(escape(str(row["name"])), "served", "", str(regret["steps"]), accepted, gain, "", "")
        for source, found in regret["sources"].items():
            table.add_row("", escape(source), *regret_cells(found))
    return table


def regret_cells(found: Mapping[str, Any]) -> list[str]:
    """One source's cells: depth, steps, accepted, gain and regret a step, Hedge's weight."""
    return [
        str(found["depth"]),
        str(found["steps"]),
        f"{found['accepted_per_step']:.2f}",
        f"{found['gain_per_step']:.2f}",
        f"{found['regret_per_step']:+.2f}",
        f"{found['weight']:.2f}",
    ]


def shown(value: object) -> str:
    """A figure in a few characters."""
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.3g}"
    return str(value)


class LiveListener:
    """Shows a replay on ``console``.

    Args:
        console: Where to print.
        live: Redraw a table in place; ``False`` prints a line now and then, and a table less often.
    """

    def __init__(self, console: Console, *, live: bool) -> None:
        self._console = console
        self._tallies: dict[str, Tally] = {}
        self._rows: Sequence[dict[str, Any]] = ()
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
        )
        self._task = self._progress.add_task("loading", total=None)
        self._live = Live(self._view(), console=console, refresh_per_second=2) if live else None
        self._name, self._total, self._done = "", 0, 0
        self._printed = self._tabled = time.monotonic()

    def __enter__(self) -> LiveListener:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._redraw()
            self._live.stop()
        elif self._tallies:
            self._console.print(domain_table(self._tallies, self._rows))

    def phase(self, name: str, total: int) -> None:
        """Begin a new progress bar."""
        self._name, self._total, self._done = PHASES.get(name, name), total, 0
        self._progress.reset(self._task, total=total, description=self._name)
        if self._live is None:
            self._console.print(f"{self._name} ({total} {'blocks' if name == 'compare' else 'requests'})")

    def advance(self, done: int) -> None:
        """Move the bar."""
        self._done = done
        self._progress.update(self._task, completed=done)
        self._tick()

    def served(self, item: Served) -> None:
        """Count an answer."""
        if item.completion is None:
            self._console.print(f"[red]line {item.item.line}: {escape(str(item.error))}[/red]")
        else:
            name = item.completion.domain
            self._tallies.setdefault(name, Tally()).add(tally([item.completion]))
        if self._name == PHASES["replay"]:
            self.advance(self._done + 1)
        self._tick()

    def event(self, event: dict[str, Any]) -> None:
        """Print an event above the table; births stand out."""
        kind, domain = str(event.get("kind")), str(event.get("domain"))
        style = "bold green" if kind == "birth" else "cyan"
        text = f"[{style}]{escape(kind)} · {escape(domain)}[/{style}]  {escape(str(event.get('reason', '')))}"
        self._console.print(text)

    def domains(self, rows: Sequence[dict[str, Any]]) -> None:
        """Refresh versions and memory sizes."""
        self._rows = rows
        self._tick()

    def _view(self) -> RenderableType:
        return Group(domain_table(self._tallies, self._rows), self._progress)

    def _redraw(self) -> None:
        if self._live is not None:
            self._live.update(self._view())

    def _tick(self) -> None:
        if self._live is not None:
            self._redraw()
            return
        now = time.monotonic()
        if now - self._printed < PLAIN_EVERY:
            return
        self._printed = now
        total = Tally()
        for counters in self._tallies.values():
            total.add(counters)
        self._console.print(
            f"{self._name}: {self._done}/{self._total} · requests {total.requests} · acceptance "
            f"{total.acceptance_rate:.2f} · τ {total.mean_accepted_length:.2f} · "
            f"{total.tokens_per_second:.1f} tokens/s"
        )
        if now - self._tabled >= TABLE_EVERY:
            self._tabled = now
            self._console.print(domain_table(self._tallies, self._rows))


def print_summary(console: Console, result: Mapping[str, Any]) -> None:
    """The end of a replay: what it was, what was learned, the speeds, the check."""
    overall, routing, learning = result["overall"], result["routing"], result["learning"]
    console.print(
        f"[bold]{overall['requests']} requests[/bold], {overall['tokens']} tokens · acceptance "
        f"{overall['acceptance_rate']:.2f} · α {overall['alpha']:.2f} · "
        f"τ {overall['mean_accepted_length']:.2f}"
    )
    console.print(
        f"learning {learning['share_of_busy_time']:.1%} of busy time, {learning['updates']} updates, "
        f"{learning['published']} published, {learning['rolled_back']} rolled back · routing "
        f"{routing['share_of_latency']:.1%} of latency"
    )
    if result["failed"]:
        console.print(f"[red]{len(result['failed'])} requests without an answer (see failed)[/red]")
    if result["compare"]:
        console.print(_speeds(result["compare"]))
    verify = result["verify"]
    if verify["checked"]:
        style = "red" if verify["mismatched"] else "green"
        console.print(
            f"[{style}]lossless: {verify['checked']} answers checked, {verify['mismatched']} mismatched, "
            f"{verify['ties']} near ties in {verify['tokens']} tokens; "
            f"{verify['branch_nodes']} branch nodes verified in the run[/{style}]"
        )


def _speeds(compare: Mapping[str, Any]) -> Table:
    table = Table(title="speed on the same prompts, paired blocks", title_justify="left")
    for heading in ("way of decoding", "tokens/s", "polydraft's speed-up (median)", "95 % lower bound"):
        table.add_column(heading, justify="left" if heading.startswith("way") else "right")
    for name in ("generate", "plain"):
        if name in compare:
            item = compare[name]
            label = "model.generate" if name == "generate" else "this engine, plain"
            table.add_row(
                label,
                f"{item['tokens_per_second']:.1f}",
                f"{item['speedup']:.2f}×",
                f"{item['speedup_low']:.2f}×",
            )
    ours = max(item["speculative_tokens_per_second"] for item in compare.values())
    table.add_row("polydraft", f"{ours:.1f}", "", "")
    return table
