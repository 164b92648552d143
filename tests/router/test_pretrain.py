"""A config on disk, a model folder, prompts in a file: ``polydraft pretrain`` from end to end."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from drafts.trunk import Trunk
from osd.learn import pretrain as training
from router.app import cli
from router.app.commands.pretrain import parse_layers
from router.app.pretrain_prompts import read_prompts
from router.bodies.embedded import Engine
from tests.router.fakes import WordEncoder
from tests.router.tiny_engine import CONFIG, SPECIAL, byte_tokenizer
from tests.tiny import tiny_model


class Killed(BaseException):
    """Stands for SIGKILL: nothing may catch it."""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a deployment, prompts and prompts to exclude."""
    monkeypatch.setattr("router.mind.router.SentenceEncoder", lambda *_, **__: WordEncoder())
    monkeypatch.chdir(tmp_path)
    tiny_model("llama", vocab_size=len(SPECIAL) + 256).save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    drafts = {"sources": ["eagle"], "eagle": {"trunk": "./trunk.safetensors"}}
    config = {**CONFIG, "target": {"model": "model", "device": "cpu"}, "drafts": drafts}
    (tmp_path / "d.yaml").write_text(yaml.safe_dump(config))
    lines = [
        {"prompt": f"say {n} twice", "domain": "ab"[n % 2], "source": f"made up, MIT {n}"} for n in range(20)
    ]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (tmp_path / "kept.jsonl").write_text(json.dumps({"prompt": "say 3 twice"}))
    return tmp_path


SHORT = ("--max-tokens", "6", "--drawn-tokens", "4", "--epochs", "2", "--batch", "8")


def run(monkeypatch: pytest.MonkeyPatch, *options: str, prompts: str = "prompts.jsonl") -> None:
    """The command as a user gives it, in the current folder."""
    wanted = ["polydraft", "pretrain", "--config", "d.yaml", "--prompts", prompts, *SHORT, *options]
    monkeypatch.setattr(sys, "argv", wanted)
    cli.app(wanted[1:], standalone_mode=False)


def failing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *options: str, **more: str
) -> str:
    wanted = ["--config", "d.yaml", "--prompts", more.get("prompts", "prompts.jsonl"), *SHORT, *options]
    monkeypatch.setattr(sys, "argv", ["polydraft", "pretrain", *wanted])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 2
    return " ".join(capsys.readouterr().err.split())


def test_a_trunk_from_prompts_to_a_deployment_that_serves_it(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(monkeypatch, "--exclude", "kept.jsonl", "--collect-layers", "1,2,3", "--layers", "1,3")
    facts = json.loads((place / "trunk.provenance.json").read_text())
    trunk = Trunk.load(place / "trunk.safetensors")
    assert trunk.shape.feature_layers == (1, 3)
    assert facts["fingerprint"] == trunk.fingerprint()
    assert facts["data"]["prompts"] == 19
    assert facts["data"]["answers"] == 2 * 19 - facts["held_back_prompts"]
    assert list(facts["data"]["sources"]) == ["made up, MIT"]
    assert facts["data"]["labels"] == {"a": 10, "b": 9}
    assert facts["held_back_coverage"] >= facts["training"]["coverage"] == 0.95
    assert facts["target"] == "model"
    assert facts["command"].startswith("polydraft pretrain --config d.yaml")
    assert str(place) not in json.dumps(facts)
    assert {"all", "a", "b"} == set(facts["epochs"][0]["labels"])
    assert 2 in trunk.token_ids
    assert not list(place.glob("*.training.safetensors"))
    with Engine.from_config("d.yaml") as engine:
        assert engine.target.feature_layers == (1, 3)
        assert engine.generate("say 30 twice", max_tokens=6).token_ids
        assert engine.parts.bank is not None


def test_the_same_command_goes_on_where_it_was_killed(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "fastest_product", lambda width: training.PRODUCTS["plain"])
    run(monkeypatch, "--draft-vocab", "64")
    whole = load_file(place / "trunk.safetensors")
    shards = {p: p.stat().st_mtime_ns for p in (place / "out/trunk").iterdir()}
    (place / "trunk.safetensors").unlink()

    real = training.save_training
    saved: list[int] = []

    def save_and_die(*arguments: Any) -> None:
        real(*arguments)
        saved.append(len(arguments[-1]))
        if len(saved) == 1:
            raise Killed

    monkeypatch.setattr(training, "save_training", save_and_die)
    with pytest.raises(Killed):
        run(monkeypatch, "--draft-vocab", "64")
    assert (place / "trunk.training.safetensors").exists()
    run(monkeypatch, "--draft-vocab", "64")
    assert saved == [1, 2]
    found = load_file(place / "trunk.safetensors")
    assert found.keys() == whole.keys()
    assert all(torch.equal(found[name], whole[name]) for name in whole)
    assert {p: p.stat().st_mtime_ns for p in (place / "out/trunk").iterdir()} == shards


def test_mistakes_are_named_before_the_target_answers(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "bad.jsonl").write_text('{"prompt": "a"}\nnot json\n')
    (place / "long.jsonl").write_text('{"prompt": "short"}\n' + json.dumps({"prompt": "long " * 200}))
    assert "line 2" in failing(monkeypatch, capsys, prompts="bad.jsonl")
    assert "none.jsonl" in failing(monkeypatch, capsys, prompts="none.jsonl")
    assert "long.jsonl, line 2" in failing(monkeypatch, capsys, prompts="long.jsonl")
    assert "not excluded" in failing(monkeypatch, capsys, "--exclude", "prompts.jsonl")
    both = ("--coverage", "0.9", "--draft-vocab", "64")
    assert "either --draft-vocab or --coverage" in failing(monkeypatch, capsys, *both)
    assert "--loss" in failing(monkeypatch, capsys, "--loss", "hinge")
    assert "--collect-layers" in failing(monkeypatch, capsys, "--layers", "1", "--collect-layers", "2,3")
    assert "feature_layers" in failing(monkeypatch, capsys, "--layers", "1,9")
    assert "--max-prompt" in failing(monkeypatch, capsys, "--max-prompt", "100000")
    assert not (place / "out/trunk/target.json").exists()
    failing(
        monkeypatch, capsys, "--layers", "1,3", "--init", "target", "--support", "full", "--held-back", "2"
    )


def test_shards_of_another_target_are_refused(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch)
    tiny_model("llama", seed=1, vocab_size=len(SPECIAL) + 256).save_pretrained(place / "model")
    assert "holds answers of" in failing(monkeypatch, capsys)


def test_prompts_repeat_neither_each_other_nor_what_is_kept_for_evaluation(tmp_path: Path) -> None:
    asked, kept = tmp_path / "asked.jsonl", tmp_path / "kept.jsonl"
    user = {"role": "user", "content": "kept"}
    lines: list[dict[str, Any]] = [
        {"prompt": "one two", "domain": "a", "source": "s"},
        {"prompt": " one two "},
        {"prompt": "kept"},
        {"messages": [{"role": "system", "content": "be kind"}, user]},
        {"messages": [{"role": "system", "content": "be kind"}, {**user, "content": "one two"}]},
        {"prompt": "far too long " * 9},
    ]
    asked.write_text("\n".join(map(json.dumps, lines)))
    kept.write_text(json.dumps({"prompt": "kept"}))
    found, long = read_prompts([asked], [kept], byte_tokenizer(), 60, skip_long=True)
    assert [(p.text, p.domain, p.source) for p in found] == [
        ("one two", "a", "s"),
        ("one two", "", "unknown"),
    ]
    assert long == 1
    assert len(found[1].ids) > len(found[0].ids)


def test_layers_are_read_as_documented() -> None:
    assert [parse_layers("--layers", text) for text in (None, "30", "9, 20,30")] == [None, (30,), (9, 20, 30)]
    for bad in ("", "0,1", "3,2", "2,2", "a", "1,,2"):
        with pytest.raises(ValueError, match="--layers"):
            parse_layers("--layers", bad)


def test_the_packaged_trunk_is_not_overwritten_unless_told_so(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    package = place / "package"
    (package / "data").mkdir(parents=True)
    monkeypatch.setattr("router.app.pretrain.resources", SimpleNamespace(files=lambda name: package))
    packaged = package / "data" / "trunk.safetensors"
    packaged.write_bytes(b"the demo's")
    for spelling in (
        str(packaged),
        "package/../package/data/trunk.safetensors",
        "package/data/own.safetensors",
    ):
        assert "--replace-packaged" in failing(monkeypatch, capsys, "--out", spelling)
    assert packaged.read_bytes() == b"the demo's"
    run(monkeypatch, "--out", str(packaged), "--replace-packaged")
    assert Trunk.load(packaged).shape.vocab_size > 0


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
class TestMakeTrunk:
    def made(self, *words: str) -> subprocess.CompletedProcess[str]:
        root = Path(__file__).parents[2]
        return subprocess.run(
            ["make", "-n", "trunk", *words], cwd=root, capture_output=True, text=True, check=False
        )

    def test_it_writes_outside_the_package_whatever_the_config(self) -> None:
        for words in ((), ("CONFIG=configs/gpu.yaml",)):
            said = self.made(*words).stdout
            assert "--out out/trunk.safetensors" in said
            assert "fewer than the shipped trunk had" in said
            assert not any(f"--out {folder}" in said for folder in ("drafts", str(resources.files("drafts"))))

    def test_public_prompts_come_from_a_folder(self, tmp_path: Path) -> None:
        for name in ("a.jsonl", "b.jsonl", "readme.txt"):
            (tmp_path / name).write_text("")
        said = self.made(f"TRUNK_PUBLIC={tmp_path}").stdout
        assert said.count(f"--prompts {tmp_path}") == 2
        assert "fewer than" not in said
        missing = self.made(f"TRUNK_PUBLIC={tmp_path}/none")
        assert missing.returncode != 0
        assert "holds no .jsonl file" in missing.stderr
