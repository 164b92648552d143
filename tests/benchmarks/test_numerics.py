"""The numerics benchmark on tiny targets: one command gives shares of differing answers and costs."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numerics
import pytest
from numerics import Answers, Arm, different_anywhere, main, parse_arguments
from numerics_parts.cost import computes_by, pass_ratios, strict_beside

from drafts.errors import InvalidValueError
from drafts.native.team import team
from osd.serve.native import NativeTarget
from osd.serve.strict import StrictTarget
from router.config import PolydraftConfig
from tests.osd.native_rig import fitting_model, native
from tests.router.tiny_engine import CONFIG, tiny_engine


@pytest.mark.skipif(team() is None, reason="torch does not lend its threads here")
def test_strict_is_the_target_that_a_deployment_would_serve() -> None:
    fast = native(fitting_model())
    strict = strict_beside(fast, PolydraftConfig.model_validate(CONFIG))
    assert isinstance(strict, NativeTarget)
    assert strict.strict
    assert strict.reference is fast.reference
    assert strict.feature_layers == fast.feature_layers
    assert computes_by(strict) == "compiled passes"


def test_costs_are_of_pairs_by_shape_of_pass() -> None:
    with tiny_engine() as engine:
        fast = engine.target
        strict = strict_beside(fast, engine.config)
        assert isinstance(strict, StrictTarget)
        found = engine.compute(lambda: pass_ratios(fast, strict, rounds=3))
    assert list(found) == ["decode, 1 row", "decode, 4 rows", "decode, 16 rows", "prompt of 256 tokens"]
    for row in found.values():
        assert row["low"] <= row["ratio"] <= row["high"]
        assert min(row["fast_ms"], row["strict_ms"]) > 0
        assert row["pairs"] == 3


def test_a_request_that_differs_in_any_fast_arm_counts_once() -> None:
    answers: Answers = {
        Arm("fast", "none", 1): {0: (1, 2), 1: (3,), 2: (4,)},
        Arm("fast", "none", 16): {0: (1, 9), 1: (3,), 2: (4,)},
        Arm("fast", "trees", 16): {0: (1, 8), 1: (3,), 2: (5,)},
        Arm("strict", "none", 1): {1: (7,)},
    }
    assert different_anywhere(answers) == {"requests": 3, "different": 2, "share": 2 / 3}


def test_arguments_say_how_many_requests_of_each_type() -> None:
    found = parse_arguments([])
    assert (found.dtype, found.limit) == (["float32", "bfloat16"], [300, 60])
    assert parse_arguments(["--dtype", "bfloat16"]).limit == [60]
    for wrong in (["--limit", "5"], ["--limit", "5", "0"], ["--rounds", "1"], ["--concurrency", "1"]):
        with pytest.raises(InvalidValueError, match=wrong[0]):
            parse_arguments(wrong)


def test_one_command_writes_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []

    def from_config(config: PolydraftConfig, options: object) -> object:
        opened.append(config.target.dtype)
        return tiny_engine(slots=3)

    monkeypatch.setattr(numerics, "Engine", SimpleNamespace(from_config=from_config))
    traffic, result = tmp_path / "t.jsonl", tmp_path / "n.json"
    traffic.write_text("\n".join(json.dumps({"prompt": f"boat sail {i}"}) for i in range(6)))
    words = ["--traffic", str(traffic), "--limit", "6", "4", "--strict-limit", "2", "--block", "2"]
    main([*words, "--concurrency", "3", "--max-tokens", "8", "--rounds", "2", "--json", str(result)])
    found = json.loads(result.read_text())
    assert opened == ["float32", "bfloat16"]
    for dtype, count in (("float32", 6), ("bfloat16", 4)):
        rows = {(row["numerics"], row["drafts"], row["concurrency"]): row for row in found[dtype]["answers"]}
        asked = {"fast": count, "strict": 2}
        assert {key: row["requests"] for key, row in rows.items()} == {
            (name, drafts, at): asked[name] for name in asked for drafts in ("none", "trees") for at in (1, 3)
        }
        assert sum(row["different"] for (name, *_), row in rows.items() if name == "strict") == 0
        assert found[dtype]["any_fast_arm"]["requests"] == count
        assert len(found[dtype]["passes"]) == 4
        assert {row["blocks"] for row in found[dtype]["cost"]} == {1}
