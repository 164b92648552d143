"""A config on disk, a model folder, traffic in a file: the replay command from end to end."""

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from router.app import cli
from router.bodies.api import EngineOptions
from router.bodies.embedded import Engine
from tests.router.fakes import WordEncoder
from tests.router.tiny_engine import CONFIG, SPECIAL, byte_tokenizer
from tests.tiny import tiny_model

TOP = {
    "overall",
    "domains",
    "labels",
    "compare",
    "verify",
    "routing",
    "learning",
    "events",
    "timeline",
    "provenance",
}


@pytest.fixture
def deployment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A config file whose target is a saved tiny model."""
    monkeypatch.setattr("router.mind.router.SentenceEncoder", lambda *_, **__: WordEncoder())
    folder = tmp_path / "model"
    tiny_model("llama", vocab_size=len(SPECIAL) + 256).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    config = {
        **CONFIG,
        "target": {"model": str(folder), "device": "cpu"},
        "state": {"dir": str(tmp_path / "state")},
    }
    file = tmp_path / "deployment.yaml"
    file.write_text(yaml.safe_dump(config))
    lines = [{"prompt": f"boat sail {i}", "domain": "b", "unknown": 1} for i in range(12)]
    lines += [{"messages": [{"role": "user", "content": f"tree leaf {i}"}], "domain": "t"} for i in range(12)]
    (tmp_path / "traffic.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return file


def replayed(deployment: Path, name: str, *options: str) -> tuple[dict, list[dict]]:
    folder = deployment.parent
    result, outputs = folder / f"{name}.json", folder / f"{name}.jsonl"
    arguments = ["replay", str(folder / "traffic.jsonl"), "--config", str(deployment), "--max-tokens", "12"]
    done = CliRunner().invoke(
        cli.app,
        [*arguments, "--json", str(result), "--outputs", str(outputs), *options],
        catch_exceptions=False,
    )
    assert done.exit_code == 0, done.output
    return json.loads(result.read_text()), [json.loads(line) for line in outputs.read_text().splitlines()]


def test_the_command_keeps_its_contract(deployment: Path) -> None:
    result, lines = replayed(
        deployment, "a", "--concurrency", "4", "--compare", "plain,generate", "--verify", "24", "--seed", "3"
    )
    assert set(result) >= TOP
    assert result["verify"] == {**result["verify"], "checked": 24, "mismatched": 0, "ties": 0}
    assert set(result["compare"]) == {"plain", "generate"}
    assert result["overall"]["requests"] == 24
    assert set(result["labels"]) == {"b", "t"}
    assert set(result["routing"]["confusion"]) == {"b", "t"}
    assert set(result["provenance"]) >= {"commit", "command", "seed", "versions", "machine"}
    assert result["provenance"]["seed"] == 3
    for windows in result["timeline"].values():
        assert all(set(w) >= {"requests", "acceptance_rate", "mean_accepted_length"} for w in windows)
    assert {line["index"] for line in lines} == set(range(24))
    assert all({"seed", "token_ids", "domain", "versions", "rounds"} <= set(line) for line in lines)


def test_sources_k_and_freezing_change_no_token(deployment: Path) -> None:
    def texts(name: str, *options: str) -> dict[int, list[int]]:
        return {line["index"]: line["token_ids"] for line in replayed(deployment, name, *options)[1]}

    expected = texts("plain", "--k", "0", "--freeze")
    assert texts("auto") == expected
    assert texts("chain", "--k", "4", "--sources", "ngram", "--concurrency", "4") == expected
    assert texts("frozen", "--freeze", "--sources", "lookup,ngram") == expected
    assert texts("trees", "--nodes", "5", "--concurrency", "4") == expected


def test_forced_nodes_are_told_beside_the_mismatches(deployment: Path) -> None:
    forced = replayed(deployment, "forced", "--nodes", "5", "--concurrency", "4", "--verify", "24")[0]
    assert forced["verify"]["mismatched"] == 0
    assert forced["verify"]["branch_nodes"] > 0
    assert replayed(deployment, "none", "--k", "2", "--verify", "2")[0]["verify"]["branch_nodes"] == 0


def test_a_replay_with_state_goes_on_where_the_last_one_stopped(deployment: Path) -> None:
    folder = deployment.parent / "kept"
    replayed(deployment, "first", "--state", str(folder))
    with Engine.from_config(deployment, EngineOptions(state_dir=str(folder))) as engine:
        domains = engine.stats()["domains"]
        assert domains["boats"]["requests"] + domains["trees"]["requests"] + domains["base"]["requests"] == 24
        assert engine.parts.ngram is not None
        assert engine.parts.ngram.describe("boats")["tokens"] > 0


def test_from_config_serves_and_refuses_a_k_beyond_the_depth(deployment: Path) -> None:
    with Engine.from_config(deployment, EngineOptions(keep_state=False)) as engine:
        answer = engine.generate("boat sail harbour", max_tokens=8)
        assert answer.domain == "boats"
        assert len(answer.token_ids) <= 8
        assert engine.stats()["domains"]["boats"]["requests"] == 1
    done = CliRunner().invoke(
        cli.app,
        ["replay", str(deployment.parent / "traffic.jsonl"), "--config", str(deployment), "--k", "64"],
    )
    assert done.exit_code != 0
