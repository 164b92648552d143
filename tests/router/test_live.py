from __future__ import annotations

import io

import pytest
from rich.console import Console

from router.app.live import LiveListener, print_summary
from router.app.replay import ReplaySettings, replay
from tests.router.fake_engine import FakeEngine
from tests.router.test_replay import traffic


def shown(*, live: bool, terminal: bool) -> str:
    engine = FakeEngine()
    text = io.StringIO()
    console = Console(file=text, force_terminal=terminal, width=120, highlight=False)
    answer = engine.answer

    def answer_with_a_birth(prompt: str) -> str:
        if prompt == "math 3":
            reason = "24 alike requests fit no domain"
            birth = {"kind": "birth", "domain": "weather", "reason": reason, "numbers": {}, "time": 9e9}
            engine.events.append(birth)
        return answer(prompt)

    engine.answer = answer_with_a_birth
    with LiveListener(console, live=live) as listener:
        settings = ReplaySettings(max_tokens=20, compare=("plain", "generate"), compare_limit=4, verify=2)
        result = replay(engine, traffic(12), settings, listener=listener)
    print_summary(console, result)
    return text.getvalue()


def test_births_are_printed_with_their_reason_as_they_happen() -> None:
    for live, terminal in ((True, True), (False, False)):
        text = shown(live=live, terminal=terminal)
        assert text.count("24 alike requests fit no domain") == 1
        assert "birth · weather" in text


@pytest.mark.parametrize("terminal", [True, False])
def test_the_table_shows_domains_and_the_summary_the_three_speeds_and_the_check(terminal: bool) -> None:
    text = shown(live=terminal, terminal=terminal)
    for word in ("domain", "acceptance", "tokens/s", "version", "memory", "buffer", "math", "12"):
        assert word in text
    for word in (
        "model.generate",
        "this engine, plain",
        "polydraft",
        "lossless: 2 answers checked, 0 mismatched",
        "0 branch nodes verified in the run",
    ):
        assert word in text
