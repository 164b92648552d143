from __future__ import annotations

import re
from pathlib import Path

from router.app.report import render, write_report
from tests.router.fake_engine import FakeEngine
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
    result["events"] = [
        {"kind": "birth", "domain": evil, "reason": evil, "numbers": {evil: 0.5}, "time": 0.0}
    ]
    assert evil not in render(result)


def test_a_run_without_labels_comparison_or_events_still_makes_a_page() -> None:
    result = run(FakeEngine(), count=3)
    result["labels"], result["routing"]["confusion"] = {}, {}
    assert "None in this run." in render(result)
