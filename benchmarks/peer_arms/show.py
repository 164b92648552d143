"""The result for eyes: a table for the terminal, a plot for the browser."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from peer_arms.summary import ARMS


def table(result: dict[str, Any]) -> str:
    """Throughput, time to first token, τ, equal answers and ratios, arm by arm."""
    lines = []
    for concurrency, best in result["best_peer"].items():
        against = [name for name in ("generate", "polydraft_plain", best) if name]
        against = list(dict.fromkeys(against))
        head = f"{'arm':18} {'tokens/s':>9} {'ttft ms':>8} {'τ':>5} {'equal':>7}"
        lines += ["", f"{concurrency} in flight; fastest peer: {best}"]
        lines.append(head + "".join(f"  {'× ' + name:>24}" for name in against))
        for name in ARMS:
            figures = result["arms"].get(name, {}).get(concurrency)
            if figures is None:
                continue
            equal = figures.get("equal_outputs") or {}
            lines.append(
                f"{name:18} {figures['tokens_per_second']:9.1f} {_number(figures['ttft'], 1e3, 8, 0)} "
                f"{_number(figures['mean_accepted_length'], 1, 5, 2)} "
                f"{equal.get('equal', '-'):>3}/{equal.get('prompts', '-'):<3}"
                + "".join(f"  {_ratio(result, name, other, concurrency):>24}" for other in against)
            )
    for name, reasons in result["skipped"].items():
        for concurrency, reason in reasons.items():
            lines.append(f"skipped: {name} at {concurrency}: {reason}")
    return "\n".join(lines)


def plot(result: dict[str, Any], path: Path) -> None:
    """Throughput by concurrency, one trace an arm, in one HTML file that needs no network."""
    import plotly.graph_objects as graph

    figure = graph.Figure()
    for name in ARMS:
        by_concurrency = result["arms"].get(name)
        if by_concurrency:
            figure.add_bar(
                name=name,
                x=[f"{c} in flight" for c in by_concurrency],
                y=[figures["tokens_per_second"] for figures in by_concurrency.values()],
                customdata=[figures["note"] for figures in by_concurrency.values()],
                hovertemplate="%{y:.1f} tokens/s<br>%{customdata}",
            )
    settings = result["settings"]
    figure.update_layout(
        title=f"Tokens per second, {settings['model']} in {settings['dtype']}, median of paired blocks",
        yaxis_title="tokens/s",
        barmode="group",
        template="plotly_white",
    )
    figure.write_html(path, include_plotlyjs=True, full_html=True)


def _ratio(result: dict[str, Any], name: str, other: str, concurrency: str) -> str:
    entry = result["ratios"].get(f"{name}/{other}", {}).get(concurrency)
    if entry is None or entry["median"] is None:
        return ""
    return f"{entry['median']:.2f} ({entry['low']:.2f}–{entry['high']:.2f})"


def _number(value: float | None, scale: float, width: int, digits: int) -> str:
    return f"{'-':>{width}}" if value is None else f"{scale * value:{width}.{digits}f}"
