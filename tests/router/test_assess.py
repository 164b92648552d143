"""An assessment of tiny traffic: routing, figures and words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from drafts.errors import InvalidValueError
from drafts.trunk import Trunk
from osd.learn.rehearse import Chains
from osd.serve.lend import head_shape
from osd.serve.load import build_target
from osd.types import Assignment
from router.app import cli
from router.app.assess import AssessSettings, Routed, assess, routing_figures
from router.app.commands.assess import show
from router.app.paired import ratio_gain
from router.app.traffic import parse_traffic
from router.app.verdicts import Costs, option, verdicts
from router.config import PolydraftConfig
from router.mind.embed import Embedder
from router.mind.router import Router
from tests.router.fakes import WordEncoder
from tests.router.tiny_engine import CONFIG, SPECIAL, byte_tokenizer
from tests.tiny import tiny_model


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return assessed(tmp_path_factory.mktemp("trunk") / "trunk.safetensors", "cpu")


def assessed(file: Path, device: str) -> dict[str, Any]:
    target = build_target(tiny_model("llama", vocab_size=len(SPECIAL) + 256).to(device), name="tiny")
    Trunk.fresh(head_shape(target), torch.arange(3, 259, 2)).save(file)
    drafts = {"sources": ["lookup", "ngram", "eagle"], "eagle": {"trunk": str(file)}}
    config = PolydraftConfig.model_validate({**CONFIG, "drafts": drafts})
    router = Router(Embedder(WordEncoder(), cache_size=8), config.router, config.domains, learn=False)
    lines = [
        json.dumps({"prompt": text, "domain": label})
        for _ in range(4)
        for text, label in (("boat sail harbour", "sea"), ("tree leaf forest", "wood"))
    ]
    items = parse_traffic([*lines, json.dumps({"prompt": "long " * 300})])
    try:
        settings = AssessSettings(max_tokens=12, experts=True)
        return assess(config, items, settings, target, byte_tokenizer(), router)
    finally:
        router.close()


def test_prompts_are_routed_as_the_server_would(result: dict[str, Any]) -> None:
    routing = result["routing"]
    assert routing["domains"] == {"boats": 4, "trees": 4}
    assert routing["labels"] == {"boats": {"sea": 4}, "trees": {"wood": 4}}
    assert (routing["purity"], routing["unknown_share"], routing["left_out"]) == (1.0, 0.0, 1)


def test_repeated_prompts_make_memories_pay(result: dict[str, Any]) -> None:
    options = result["options"]
    assert set(options) == {"plain", "lookup", "own_memory", "shared_memory", "other_memory", "trunk"}
    assert options["plain"]["mean_accepted_length"] == 1.0
    assert options["own_memory"]["mean_accepted_length"] > options["lookup"]["mean_accepted_length"]
    assert options["own_memory"]["mean_accepted_length"] > options["other_memory"]["mean_accepted_length"]
    assert result["verdicts"]["memories"]["low"] > 0.0
    assert set(result["domains"]) == {"boats", "trees"}
    assert result["domains"]["boats"]["own_memory"]["answers"] == 4


def test_experts_are_judged_on_answers_that_did_not_train_them(result: dict[str, Any]) -> None:
    assert set(result["experts"]) == {"trunk", "routed_experts", "shared_expert"}
    assert {row["answers"] for row in result["experts"].values()} == {3}
    assert {"experts", "routed_experts"} <= set(result["verdicts"])


def test_the_result_is_json_and_can_be_shown(result: dict[str, Any]) -> None:
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    console = Console(record=True, width=200)
    show(console, result)
    text = console.export_text()
    assert "boats 4, trees 4" in text
    assert result["verdicts"]["memories"]["words"] in text


COSTS = Costs({1: 10.0, 2: 11.0, 3: 12.0}, head_ms=5.0)


def test_speed_is_tokens_over_passes_and_drafting() -> None:
    chains = [Chains(tokens=30, lengths={0: 10, 2: 10}, ask_ms=20.0)]
    assert COSTS.speed([]) == pytest.approx(100.0)
    assert COSTS.speed(chains) == pytest.approx(30e3 / (10 * 10.0 + 10 * 12.0 + 20.0))
    assert COSTS.head_speed(chains) == pytest.approx(30e3 / (100.0 + 10 * (12.0 + 10.0) + 20.0))
    assert option(chains, COSTS)["gain_tokens_per_second"] == pytest.approx(25.0)


def way(tokens: int, passes: int) -> list[Chains]:
    return [Chains(tokens, {2: passes - at % 2}) for at in range(12)]


def test_a_part_pays_only_beyond_chance_and_in_time() -> None:
    ways = {"lookup": way(20, 20), "own_memory": way(20, 12), "shared_memory": way(20, 12)}
    ways["other_memory"] = way(20, 20)
    ways["trunk"] = way(20, 10)
    found = verdicts(
        ways, {"routed_experts": way(20, 12), "trunk": way(20, 9), "shared_expert": way(20, 12)}, COSTS, 0
    )
    assert found["memories"]["pays"]
    assert "memories: pay, +" in found["memories"]["words"]
    assert not found["routing"]["pays"]
    assert "no gain over one shared memory" in found["routing"]["words"]
    assert not found["trunk"]["pays"]
    assert "eats up" in found["trunk"]["words"]
    assert "a loss against the trunk alone" in found["experts"]["words"]


def test_the_gain_is_that_of_the_sums_and_its_interval_holds_it() -> None:
    one, other = [(10.0, 2.0), (30.0, 20.0)], [(10.0, 10.0), (30.0, 30.0)]
    gain, low, high = ratio_gain(one, other)
    assert gain == pytest.approx(40 / 22 - 1.0)
    assert (low, high) == (pytest.approx(0.5), pytest.approx(4.0))


def test_purity_needs_labels() -> None:
    item = parse_traffic([json.dumps({"prompt": "hello"})])[0]
    figures = routing_figures([Routed(item, (1, 2), "hello", Assignment())], 1)
    assert figures["purity"] is None
    assert figures["unknown_share"] == 1.0


def test_traffic_that_cannot_be_answered_is_refused(result: dict[str, Any]) -> None:
    with pytest.raises(InvalidValueError, match="traffic"):
        assess(
            PolydraftConfig.model_validate(CONFIG),
            parse_traffic([json.dumps({"prompt": "x" * 400})]),
            AssessSettings(max_tokens=8),
            build_target(tiny_model("llama", vocab_size=len(SPECIAL) + 256), name="tiny"),
            byte_tokenizer(),
            None,  # type: ignore[arg-type]
        )


def test_the_command_prints_verdicts_and_writes_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = build_target(tiny_model("llama", vocab_size=len(SPECIAL) + 256), name="tiny")
    monkeypatch.setattr("router.bodies.target.load_target", lambda *_, **__: (target, byte_tokenizer()))
    monkeypatch.setattr("router.mind.router.SentenceEncoder", lambda *_, **__: WordEncoder())
    traffic, config, out = tmp_path / "my.jsonl", tmp_path / "my.yaml", tmp_path / "deep" / "out.json"
    traffic.write_text("\n".join(json.dumps({"prompt": "boat sail harbour"}) for _ in range(3)))
    config.write_text(json.dumps(CONFIG))
    command = ["assess", str(traffic), "--config", str(config), "--max-tokens", "8", "--limit", "2"]
    found = CliRunner().invoke(cli.app, [*command, "--json", str(out)])
    assert found.exit_code == 0, found.output
    written = json.loads(out.read_text())
    assert written["routing"]["prompts"] == 2
    assert "trunk" not in written["options"]
    assert written["verdicts"]["memories"]["words"] in found.output


def test_the_command_keeps_the_layers_that_the_trunk_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*places: Any, **_: Any) -> Any:
        layers = places[5] if len(places) > 5 else None
        model = tiny_model("llama", vocab_size=len(SPECIAL) + 256)
        return build_target(model, name="tiny", feature_layers=layers), byte_tokenizer()

    monkeypatch.setattr("router.bodies.target.load_target", load)
    monkeypatch.setattr("router.mind.router.SentenceEncoder", lambda *_, **__: WordEncoder())
    default = load()[0]
    other = load(*[None] * 5, (1, 2))[0]
    assert other.feature_layers != default.feature_layers
    trunk, traffic, config = tmp_path / "trunk", tmp_path / "my.jsonl", tmp_path / "my.yaml"
    Trunk.fresh(head_shape(other), torch.arange(3, 259, 2)).save(trunk)
    traffic.write_text(json.dumps({"prompt": "boat sail harbour"}))
    drafts = {"sources": ["lookup", "eagle"], "eagle": {"trunk": str(trunk)}}
    config.write_text(json.dumps({**CONFIG, "drafts": drafts}))
    command = ["assess", str(traffic), "--config", str(config), "--max-tokens", "8"]
    found = CliRunner().invoke(cli.app, command, catch_exceptions=False)
    assert "trunk" in found.output


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_target_on_a_device_is_assessed(tmp_path: Path) -> None:
    found = assessed(tmp_path / "trunk.safetensors", "cuda")
    assert set(found["experts"]) == {"trunk", "routed_experts", "shared_expert"}
