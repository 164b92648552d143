from __future__ import annotations

import re
from pathlib import Path

from drafts.ledger import COUNTS, source_figures
from router.app.report import render, write_report
from router.app.summary import sources
from tests.router.fake_engine import FakeEngine
from tests.router.test_matrix import MATRIX
from tests.router.test_replay import run


def test_the_report_is_one_page_without_outside_resources(tmp_path: Path) -> None:
    result = run(FakeEngine(), count=36, compare=("plain", "generate"), verify=3)
    page = write_report(result, tmp_path / "deep" / "report.html").read_text(encoding="utf-8")
    outside = re.findall(
        r"<(?:script|link|img)[^>]+(?:src|href)=", re.sub(r"<script>.*?</script>", "", page, flags=re.S)
    )
    assert outside == []
    for shown in ("math", "L-weather", "Acceptance rate", "model.generate", "Provenance", "Plotly.newPlot"):
        assert shown in page
    assert page.count("Plotly.newPlot(") >= 3


def test_names_from_traffic_and_events_cannot_inject_markup() -> None:
    result = run(FakeEngine(), count=6)
    evil = "<script>alert(1)</script>"
    result["labels"][evil] = result["overall"]
    result["domains"][evil] = result["overall"]
    result["timeline"][evil] = result["timeline"]["math"]
    result["routing"]["confusion"][evil] = {evil: 1}
    result["matrix"] = {evil: {evil: {evil: {"agreement": 0.5, "positions": 99.0}}}}
    result["sources"] = {
        evil: {evil: {**dict.fromkeys(COUNTS, 1), **source_figures(dict.fromkeys(COUNTS, 1))}}
    }
    result["events"] = [
        {"kind": "birth", "domain": evil, "reason": evil, "numbers": {evil: 0.5}, "time": 0.0}
    ]
    assert evil not in render(result)


def test_a_run_without_labels_comparison_or_events_still_makes_a_page() -> None:
    result = run(FakeEngine(), count=3)
    result["labels"], result["routing"]["confusion"] = {}, {}
    assert "None in this run." in render(result)


def test_the_matrix_is_a_heat_table_with_the_diagonal_outlined() -> None:
    result = run(FakeEngine(), count=3)
    assert "Cross-acceptance" not in render(result)
    result["matrix"] = {"experts": MATRIX, "memories": {}}
    page = render(result)
    assert "Cross-acceptance: experts" in page
    assert "Cross-acceptance: memories" not in page
    table = page[page.index('<table class="heat">') :]
    table = table[: table.index("</table>")]
    assert re.findall(r"<th>(\w*)</th>", table) == ["code", "math"]
    assert re.findall(r"<td[^>]*>([^<]+)</td>", table) == ["code", "0.70", "0.20", "math", "–", "0.90"]
    assert re.findall(r'class="own"[^>]*>([^<]+)<', table) == ["0.70", "0.90"]
    assert "rgba(31, 111, 139, 0.63)" in table


def test_sources_show_what_this_run_alone_earned() -> None:
    engine = FakeEngine()
    counts = dict.fromkeys(COUNTS, 100)
    engine.sources = {"ngram": counts, "lookup": dict.fromkeys(COUNTS, 0)}
    before = engine.stats()["domains"]
    added = {"proposed_tokens": 140, "accepted_tokens": 110, "accepted_by_all": 140, "accepted_alone": 105}
    engine.sources = {
        "ngram": {**counts, "spoke": 120, "steps": 120, **added},
        "lookup": engine.sources["lookup"],
    }
    found = sources(before, engine.stats()["domains"])
    assert set(found["math"]) == {"ngram"}
    assert found["math"]["ngram"]["acceptance_rate"] == 0.25
    result = run(FakeEngine(), count=3)
    assert "Draft sources" not in render(result)
    page = render({**result, "sources": found})
    cells = re.findall(r"<td[^>]*>([^<]+)</td>", page[page.index("Draft sources") :])[:7]
    assert cells[1:] == ["ngram", "40", "10", "0.250", "25%", "0.25"]
