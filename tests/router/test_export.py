from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from drafts.adapters import AdapterBank
from drafts.bank import ExpertBank
from drafts.eagle3 import Eagle3Head, read_eagle3
from drafts.errors import CheckpointError, ExportError, InvalidValueError, UnknownNameError
from drafts.registry import Registry
from drafts.trunk import Trunk
from osd.serve.lend import head_shape
from osd.serve.load import build_target
from router.app import cli
from router.app import export as app
from router.config import PolydraftConfig
from tests.router.tiny_engine import CONFIG, byte_tokenizer
from tests.tiny import tiny_model

TARGET = build_target(tiny_model("llama", vocab_size=259, eos_token_id=None), name="tiny", forward="generic")
IDS = torch.arange(2, 259, 3)


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.bodies.target.load_target", lambda *_, **__: (TARGET, byte_tokenizer()))


def trunk_file(folder: Path, bias: float = 0.0) -> Path:
    trunk = Trunk.fresh(head_shape(TARGET), IDS)
    if bias:
        trunk.tensors["output_bias"].normal_(std=bias, generator=torch.Generator().manual_seed(1))
    trunk.save(folder / "trunk.safetensors")
    return folder / "trunk.safetensors"


def config(folder: Path, bias: float = 0.0, **changes: Any) -> PolydraftConfig:
    drafts = {"sources": ["eagle"], "eagle": {"trunk": str(trunk_file(folder, bias)), "rank": 2}}
    return PolydraftConfig.model_validate({**CONFIG, "drafts": drafts, **changes})


def blank_expert(folder: Path) -> dict[str, torch.Tensor]:
    bank = ExpertBank(Trunk.load(folder / "trunk.safetensors"), rank=2, capacity=1)
    bank.add("boats")
    return bank.tensors("boats")


def publish(state: Path, domain: str, bias: float = 0.0) -> None:
    """A state folder whose domain serves version 1, a random expert, and keeps version 0."""
    trunk = Trunk.load(state.parent / "trunk.safetensors")
    bank = ExpertBank(trunk, rank=2, capacity=1)
    bank.add(domain)
    registry = Registry(state / "versions", keep=3)
    registry.publish(domain, bank.tensors(domain), reason="born")
    tensors = bank.tensors(domain)
    generator = torch.Generator().manual_seed(4)
    for name in tensors:
        if name.endswith("_b"):
            tensors[name] = torch.randn(tensors[name].shape, generator=generator)
    tensors["output_bias"] = bias * torch.randn(len(IDS), generator=generator)
    registry.publish(domain, tensors, reason="learned")


@pytest.mark.parametrize("form", ["vllm", "speculators"])
def test_a_domain_without_an_expert_gives_the_trunk(tmp_path: Path, form: str) -> None:
    settings = config(tmp_path)
    done = app.export("boats", form, tmp_path / "out", settings, None, False)
    assert (done.version, done.lost) == (None, None)
    assert done.agreement.same == 1.0
    assert done.agreement.positions == 2 * app.ANSWER_TOKENS
    assert done.agreement.served == done.agreement.written
    back = read_eagle3(tmp_path / "out")
    assert back.trunk.fingerprint() == Trunk.load(tmp_path / "trunk.safetensors").fingerprint()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "trunk.safetensors"]
    assert (tmp_path / "out" / "model.safetensors").stat().st_mode & 0o444 == 0o444


def test_the_served_version_is_written_while_the_state_is_left_alone(tmp_path: Path) -> None:
    settings, state = config(tmp_path), tmp_path / "state"
    publish(state, "boats")
    unfinished = state / "versions" / ".registry.json.0.0.tmp"
    unfinished.write_text("another process writes here")
    done = app.export("boats", "vllm", tmp_path / "out", settings, state, False)
    assert done.version == 1
    assert done.agreement.same >= app.SAME
    assert unfinished.exists()
    trunk = Trunk.load(tmp_path / "trunk.safetensors")
    assert not torch.equal(read_eagle3(tmp_path / "out").trunk.tensors["down"], trunk.tensors["down"])


def test_a_bias_is_refused_by_name_unless_an_approximation_is_asked_for(tmp_path: Path) -> None:
    settings, out = config(tmp_path), tmp_path / "out"
    publish(tmp_path / "state", "boats", bias=8.0)
    with pytest.raises(ExportError, match=r"boats as vllm: output_bias.*--approximate"):
        app.export("boats", "vllm", out, settings, tmp_path / "state", False)
    assert not out.exists()
    done = app.export("boats", "vllm", out, settings, tmp_path / "state", True)
    assert done.lost is not None
    assert "output_bias" in done.lost
    assert done.agreement.same < 1.0


def test_a_head_that_reads_back_as_another_is_not_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(folder: Path) -> Eagle3Head:
        head = read_eagle3(folder)
        return Eagle3Head(head.trunk, head.output.roll(1, 0))

    monkeypatch.setattr(app, "read_eagle3", wrong)
    with pytest.raises(CheckpointError, match="reads back as another head"):
        app.export("boats", "vllm", tmp_path / "out", config(tmp_path), None, False)
    assert [path.name for path in tmp_path.iterdir()] == ["trunk.safetensors"]


def test_what_cannot_be_exported_is_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, out = config(tmp_path), tmp_path / "out"
    with pytest.raises(UnknownNameError, match="known: base, boats, trees"):
        app.export("cars", "vllm", out, settings, None, False)
    with pytest.raises(ExportError, match=r"boats as peft: .*eagle expert"):
        app.export("boats", "peft", out, settings, None, False)
    own = {"name": "boats", "examples": ["boat"], "draft": {"kind": "model", "path": "some/draft"}}
    with pytest.raises(ExportError, match=r"some/draft has no version"):
        app.export("boats", "peft", out, config(tmp_path, domains=[own]), None, False)
    own["draft"] |= {"rank": 0}  # type: ignore[operator]
    with pytest.raises(ExportError, match=r"some/draft .* no adapter"):
        app.export("boats", "peft", out, config(tmp_path, domains=[own]), None, False)
    shipped = PolydraftConfig.model_validate(CONFIG)
    with pytest.raises(ExportError, match="no eagle draft"):
        app.export("boats", "vllm", out, shipped, None, False)
    with monkeypatch.context() as patched:
        patched.setattr(app, "greedy_answers", lambda *_: [])
        with pytest.raises(ExportError, match="too short"):
            app.export("boats", "vllm", out, settings, None, False)
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    with pytest.raises(InvalidValueError, match=r"--out.*empty"):
        app.export("boats", "vllm", out, settings, None, False)
    assert (out / "notes.txt").read_text() == "mine"


def test_a_damaged_expert_is_refused_and_stays(tmp_path: Path) -> None:
    settings, state = config(tmp_path), tmp_path / "state"
    publish(state, "boats")
    file = state / "versions" / "boats" / "v0001.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match="v0001"):
        app.export("boats", "vllm", tmp_path / "out", settings, state, False)
    assert file.exists()
    (state / "versions" / "registry.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"registry\.json"):
        app.export("boats", "vllm", tmp_path / "out", settings, state, False)


def test_the_command_says_what_it_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = config(tmp_path, bias=3.0)
    monkeypatch.setattr("router.config.load_config", lambda name: settings)
    words = ["export", "boats", "--format", "vllm", "--out", str(tmp_path / "out"), "--approximate"]
    result = CliRunner().invoke(cli.app, words)
    assert result.exit_code == 0, result.output
    assert "boats: the trunk" in result.output
    assert "left out: output_bias" in result.output
    assert f"at {2 * app.ANSWER_TOKENS} positions" in result.output
    with pytest.raises(UnknownNameError, match=r"--format.*peft, speculators, vllm"):
        CliRunner().invoke(cli.app, [*words[:3], "onnx", *words[4:]], catch_exceptions=False)


def test_the_target_keeps_the_layers_that_the_trunk_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*places: Any, **_: Any) -> Any:
        model = tiny_model("llama", vocab_size=259, eos_token_id=None)
        layers = places[5] if len(places) > 5 else None
        return build_target(model, name="tiny", forward="generic", feature_layers=layers), byte_tokenizer()

    monkeypatch.setattr("router.bodies.target.load_target", load)
    settings = config(tmp_path)
    Trunk.fresh(head_shape(load(*[None] * 5, (1, 3))[0]), IDS).save(tmp_path / "trunk.safetensors")
    assert TARGET.feature_layers != (1, 3)
    done = app.export("boats", "vllm", tmp_path / "out", settings, None, False)
    assert done.agreement is not None
    assert done.agreement.same == 1.0


def test_an_expert_of_another_trunk_is_refused(tmp_path: Path) -> None:
    settings, state = config(tmp_path), tmp_path / "state"
    Registry(state / "versions", trunk="another").publish("boats", blank_expert(tmp_path), reason="born")
    with pytest.raises(CheckpointError, match="belongs to trunk another, not to"):
        app.export("boats", "vllm", tmp_path / "out", settings, state, False)


def test_a_trunk_of_another_target_is_refused(tmp_path: Path) -> None:
    settings = config(tmp_path)
    other = dataclasses.replace(head_shape(TARGET), vocab_size=300)
    Trunk.fresh(other, IDS).save(tmp_path / "trunk.safetensors")
    with pytest.raises(CheckpointError, match=r"target: shape \(259, 32\).*\(300, 32\)"):
        app.export("boats", "vllm", tmp_path / "out", settings, None, False)


def adapted(folder: Path) -> tuple[PolydraftConfig, AdapterBank]:
    """A config with a draft model, and a state folder that serves version 1 of its adapter for boats."""
    path = folder / "draft"
    model = tiny_model("llama", vocab_size=259, seed=1)
    model.save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    bank = AdapterBank(model, 4)
    bank.add("boats")
    registry = Registry(folder / "state" / "versions")
    registry.publish("boats.model", bank.tensors("boats"), reason="born")
    generator = torch.Generator().manual_seed(4)
    tensors = {
        name: torch.randn(t.shape, generator=generator) if name.endswith("lora_B") else t
        for name, t in bank.tensors("boats").items()
    }
    bank.load("boats", tensors)
    registry.publish("boats.model", tensors, reason="learned")
    drafts = {"sources": ["model"], "model": {"path": str(path), "rank": 4, "device": "cpu"}}
    return PolydraftConfig.model_validate({**CONFIG, "drafts": drafts}), bank


def test_peft_reads_the_adapter_that_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.app.export_adapter.load_tokenizer", lambda *_: byte_tokenizer())
    settings, bank = adapted(tmp_path)
    monkeypatch.setattr("router.config.load_config", lambda name: settings)
    out, state = tmp_path / "out", tmp_path / "state"
    words = ["export", "boats", "--format", "peft", "--out", str(out), "--state", str(state)]
    result = CliRunner().invoke(cli.app, words, catch_exceptions=False)
    assert f"boats: version 1 written to {out}" in result.output.replace("\n", "")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "draft")
    ids = torch.tensor([[5, 9, 200, 7, 41]])
    with torch.no_grad():
        plain = base(input_ids=ids).logits
        read = PeftModel.from_pretrained(base, out).eval()(input_ids=ids).logits
        served = bank.model(input_ids=ids, adapter_names=[bank.name("boats")]).logits
    torch.testing.assert_close(read, served)
    assert (served - plain).abs().max() > 1e-2


def test_an_adapter_of_other_weights_is_refused_and_an_experts_key_is_no_domain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.app.export_adapter.load_tokenizer", lambda *_: byte_tokenizer())
    settings, _ = adapted(tmp_path)
    out, state = tmp_path / "out", tmp_path / "state"
    for form in ("vllm", "peft"):
        with pytest.raises(UnknownNameError, match="known: base, boats, trees"):
            app.export("boats.model", form, out, settings, state, False)
    tiny_model("llama", vocab_size=259, seed=2).save_pretrained(tmp_path / "draft")
    with pytest.raises(CheckpointError, match="other weights"):
        app.export("boats", "peft", out, settings, state, False)
    assert not out.exists()
