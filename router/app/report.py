"""The report of a replay: one self-contained page that opens offline."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from importlib import resources
from pathlib import Path
from typing import Any

from router.app.live import regret_cells
from router.app.matrix import grid

COLUMNS = (
    ("requests", "requests", "{:d}"),
    ("tokens", "tokens", "{:d}"),
    ("acceptance_rate", "acceptance", "{:.3f}"),
    ("alpha", "α", "{:.3f}"),
    ("mean_accepted_length", "τ", "{:.2f}"),
    ("tokens_per_second", "tokens/s", "{:.1f}"),
    ("target_passes", "target passes", "{:d}"),
)

PALETTE = ("#1f6f8b", "#c8553d", "#588157", "#8d5a97", "#d19c1d", "#3d5a80", "#9c6644", "#6c757d")


def write_report(result: Mapping[str, Any], path: str | Path, title: str = "polydraft replay") -> Path:
    """Write the page for ``result`` (what :func:`router.app.replay.replay` returns) to ``path``."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render(result, title), encoding="utf-8")
    return path


def render(result: Mapping[str, Any], title: str = "polydraft replay") -> str:
    """The page as text, plotly's script included."""
    import jinja2
    from plotly.offline import get_plotlyjs

    source = resources.files("router.app").joinpath("templates/report.html.jinja").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    page = environment.from_string(source)
    confusion = result["routing"]["confusion"]
    return page.render(
        title=title,
        result=result,
        overall=_cells(result["overall"]),
        columns=[heading for _, heading, _ in COLUMNS],
        domains={name: _cells(row) for name, row in result["domains"].items()},
        labels={name: _cells(row) for name, row in result["labels"].items()},
        speculation={name: _speculated(row) for name, row in result.get("speculation", {}).items()},
        regret={name: _regret(row["regret"]) for name, row in result.get("speculation", {}).items()},
        sources=[
            [domain, name, *_earned(row)]
            for domain, rows in result.get("sources", {}).items()
            for name, row in rows.items()
        ],
        matrices={kind: grid(rows) for kind, rows in result.get("matrix", {}).items() if rows},
        events=[_event(event) for event in result["events"]],
        confusion=confusion,
        confusion_domains=list(dict.fromkeys(d for row in confusion.values() for d in row)),
        figures=[_html(figure) for figure in figures(result)],
        provenance=_flat(result["provenance"]),
        plotlyjs=get_plotlyjs(),
    )


def figures(result: Mapping[str, Any]) -> list[Any]:
    """The plotly figures: acceptance and τ over the run by domain, and speeds where compared."""
    curves = [
        _curve(result["timeline"], "acceptance_rate", "Acceptance rate (accepted ÷ proposed tokens)"),
        _curve(result["timeline"], "mean_accepted_length", "Mean accepted length τ (tokens per target pass)"),
    ]
    return curves + ([_speeds(result["compare"])] if result["compare"] else [])


def _curve(timeline: Mapping[str, Any], key: str, title: str) -> Any:
    import plotly.graph_objects as go

    figure = go.Figure()
    for number, (name, windows) in enumerate(timeline.items()):
        if not windows:
            continue
        color = PALETTE[number % len(PALETTE)]
        x, y = [w["at"] for w in windows], [w[key] for w in windows]
        texts = [f"{w['requests']} requests, version {w['version']}" for w in windows]
        line = {"color": color, "width": 2}
        figure.add_scatter(x=x, y=y, name=name, mode="lines+markers", line=line, text=texts, legendgroup=name)
        olds = [0, *(w["version"] for w in windows)]
        swaps = [at for at, window in enumerate(windows) if window["version"] != olds[at]]
        figure.add_scatter(
            x=[x[at] for at in swaps],
            y=[y[at] for at in swaps],
            mode="markers+text",
            marker={"symbol": "star", "size": 13, "color": color},
            text=[f"v{windows[at]['version']}" for at in swaps],
            textposition="top center",
            legendgroup=name,
            showlegend=False,
            hoverinfo="skip",
        )
    return _styled(figure, title, "requests answered in the run (a point is 10 requests of the domain)")


def _speeds(compare: Mapping[str, Any]) -> Any:
    import plotly.graph_objects as go

    names, values = [], []
    for name, label in (("generate", "model.generate"), ("plain", "this engine, plain")):
        if name in compare:
            item = compare[name]
            names.append(f"{label}<br>(polydraft is {item['speedup']:.2f}× as fast)")
            values.append(item["tokens_per_second"])
    names.append("polydraft")
    values.append(max(item["speculative_tokens_per_second"] for item in compare.values()))
    figure = go.Figure(go.Bar(x=names, y=values, marker_color=list(PALETTE[: len(names)])))
    figure.update_traces(text=[f"{value:.1f}" for value in values], textposition="outside")
    return _styled(figure, "Tokens per second on the same prompts", "")


def _styled(figure: Any, title: str, x_title: str) -> Any:
    figure.update_layout(
        title=title,
        template="plotly_white",
        height=420,
        margin={"l": 50, "r": 20, "t": 60, "b": 50},
        xaxis_title=x_title,
        legend={"orientation": "h", "y": -0.2},
    )
    figure.update_yaxes(rangemode="tozero")
    return figure


def _html(figure: Any) -> str:
    return str(figure.to_html(full_html=False, include_plotlyjs=False, config={"displaylogo": False}))


def _cells(row: Mapping[str, Any]) -> list[str]:
    return [form.format(row[key]) for key, _, form in COLUMNS]


def _speculated(row: Mapping[str, Any]) -> list[str]:
    """Cells of a domain's speculation: chosen k and nodes, both gains, share of plain steps and why."""
    expected, realised = row["expected"]["speedup"], row["realised"]["speedup"]
    reasons = sorted(row["plain_because"].items(), key=lambda item: -item[1])
    return [
        f"{row['k']:.2f}",
        f"{row['nodes']:.2f}",
        "–" if expected is None else f"{expected:.2f}×",
        "–" if realised is None else f"{realised:.2f}×",
        f"{row['plain_share']:.0%}",
        ", ".join(f"{reason} {share:.0%}" for reason, share in reasons if share >= 0.005),
    ]


def _regret(row: Mapping[str, Any]) -> list[list[str]]:
    """Rows of a domain: what was served, then every source alone at its best depth."""
    if not row["steps"]:
        return []
    served = [f"{row['served'][key]:.2f}" for key in ("accepted_per_step", "gain_per_step")]
    first = ["served", "", str(row["steps"]), *served, "", ""]
    return [first, *([source, *regret_cells(found)] for source, found in row["sources"].items())]


def _earned(row: Mapping[str, Any]) -> list[str]:
    """Cells of a source in a domain: nodes proposed and accepted, acceptance, share, gain."""
    return [
        str(row["proposed_tokens"]),
        str(row["accepted_tokens"]),
        f"{row['acceptance_rate']:.3f}",
        f"{row['share']:.0%}",
        f"{row['gain']:.2f}",
    ]


def _event(event: Mapping[str, Any]) -> dict[str, str]:
    moment = datetime.fromtimestamp(float(event.get("time", 0.0))).strftime("%H:%M:%S")
    numbers = event.get("numbers") or {}
    return {
        "time": moment,
        "kind": str(event.get("kind", "")),
        "domain": str(event.get("domain", "")),
        "reason": str(event.get("reason", "")),
        "numbers": ", ".join(f"{key} {_number(value)}" for key, value in numbers.items()),
    }


def _number(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _flat(provenance: Mapping[str, Any]) -> dict[str, str]:
    rows: dict[str, str] = {}
    for key, value in provenance.items():
        if isinstance(value, Mapping):
            rows[key] = ", ".join(f"{name} {item}" for name, item in value.items() if item is not None)
        else:
            rows[key] = value if isinstance(value, str) else json.dumps(value)
    return rows
