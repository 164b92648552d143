"""Case A22: a domain's own draft model is compared with the target, token by token, before it is taken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from starlette.testclient import TestClient
from typer.testing import CliRunner

from drafts.config import ModelConfig
from drafts.errors import InvalidValueError
from osd.serve.load import build_target
from router.app import cli
from router.app.http import create_app
from router.bodies.api import EngineOptions
from router.bodies.embedded import Engine
from router.config import PolydraftConfig
from tests.router.fakes import WordEncoder
from tests.router.http_rig import error_of
from tests.router.tiny_engine import CONFIG, SPECIAL, byte_tokenizer
from tests.tiny import tiny_model

VOCAB = len(SPECIAL) + 256
SWAPPED = (10, 11)


def saved(folder: Path, kind: str) -> str:
    """A tiny draft: ``same size`` with two tokens exchanged, ``other size`` with one more."""
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(folder)
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    if kind == "same size":
        one, two = (next(t for t, i in vocabulary.items() if i == at) for at in SWAPPED)
        vocabulary[one], vocabulary[two] = vocabulary[two], vocabulary[one]
    elif kind == "other size":
        vocabulary["<extra>"] = VOCAB
    file.write_text(json.dumps(content))
    model = tiny_model("llama", vocab_size=VOCAB + 61, seed=1)
    with torch.no_grad():
        model.lm_head.weight[VOCAB:] *= 50
    model.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def engine(tmp_path: Path):
    """Starts an engine on one state folder; ``changes`` are those of its drafts, ``own`` boats' draft."""
    target = build_target(tiny_model("llama", vocab_size=VOCAB + 61), name="tiny")
    common = saved(tmp_path / "common", "padded")

    def start(own: dict[str, Any] | None = None, **changes: Any) -> Engine:
        drafts = {"sources": ["model"], "model": {"path": common}, **changes}
        boats, trees = CONFIG["domains"]
        named = [{**boats, **({} if own is None else {"draft": own})}, trees]
        config = PolydraftConfig.model_validate(
            {**CONFIG, "drafts": drafts, "domains": named, "engine": {**CONFIG["engine"], "k": 3}}
        )
        return Engine(config, target, byte_tokenizer(), EngineOptions(state_dir=str(tmp_path / "state")))

    with patch("router.mind.router.SentenceEncoder", lambda *_, **__: WordEncoder()):
        yield start


REFUSED = {"same size": f"token id {SWAPPED[0]} is", "other size": f"token id {VOCAB} is None"}


def test_a22_a_padded_draft_is_registered_drafts_and_comes_back_after_a_restart(
    engine: Any, tmp_path: Path
) -> None:
    own = saved(tmp_path / "own", "padded")
    body = {"name": "ships", "examples": ["ship mast"], "draft": {"kind": "model", "path": own}}
    with engine() as running:
        client = TestClient(create_app(running))
        created = client.post("/v1/domains", json=body)
        assert created.status_code == 201, created.text
        assert client.post("/v1/domains", json=body).status_code == 201
        proposed: list[int] = []
        draft = running.parts.model.of("ships")
        read = draft.next_logits

        def noted(*arguments: Any) -> torch.Tensor:
            logits = read(*arguments)
            proposed.extend(logits.argmax(-1).tolist())
            return logits

        with patch.object(draft, "next_logits", noted):
            answer = running.generate("ship mast", domain="ships", max_tokens=24, ignore_eos=True)
        assert answer.proposed > 0
        assert proposed
        assert max(proposed) < VOCAB
        assert running.parts.model.describe("ships")["model"] == own
        plain = running.generate("ship mast", domain="ships", max_tokens=24, ignore_eos=True, k=0)
        assert answer.text == plain.text
        assert [row["number"] for row in running.versions.rows("ships")] == [0]
        content = client.get("/v1/domains/boats/export").content
        imported = client.post("/v1/domains/trees/import", content=content)
        assert (imported.status_code, imported.json()["number"]) == (200, 1)
        assert client.post("/v1/domains/trees/rollback", json={}).json()["number"] == 0
    with engine() as again:
        assert again.parts.model.describe("ships")["model"] == own
        assert again.parts.model.describe("boats")["model"] != own


@pytest.mark.parametrize("kind", list(REFUSED))
def test_a22_another_tokenizer_is_refused_at_registration_and_running_domains_go_on(
    engine: Any, tmp_path: Path, kind: str
) -> None:
    other = saved(tmp_path / "other", kind)
    with engine() as running:
        client = TestClient(create_app(running))
        before = client.get("/v1/domains").json()["data"]
        alone = running.generate("boat sail", domain="boats", max_tokens=40, ignore_eos=True)
        handle = running.submit("boat sail", domain="boats", max_tokens=40, ignore_eos=True)
        response = client.post("/v1/domains", json={"name": "ships", "draft": {"path": other}})
        error = error_of(response)
        assert REFUSED[kind] in error["message"]
        assert error["param"] == "draft.path"
        assert handle.result().text == alone.text
        names = [row["name"] for row in client.get("/v1/domains").json()["data"]]
        assert names == [row["name"] for row in before]
        assert running.parts.model.of("ships") is running.parts.model.default


def test_a_folder_without_a_model_is_refused(engine: Any, tmp_path: Path) -> None:
    with engine() as running:
        client = TestClient(create_app(running))
        error = error_of(client.post("/v1/domains", json={"name": "ships", "draft": {"path": str(tmp_path)}}))
        assert "a loadable model" in error["message"]


@pytest.mark.parametrize("place", ["drafts", "domain"])
@pytest.mark.parametrize("kind", ["padded", *REFUSED])
def test_a22_config_check_compares_tokenizers_and_names_the_first_token_that_differs(
    tmp_path: Path, kind: str, place: str
) -> None:
    target, draft = saved(tmp_path / "target", "padded"), saved(tmp_path / "draft", kind)
    lines = ["target:", f"  model: {target}"]
    if place == "drafts":
        lines += ["drafts:", "  sources: [model]", f"  model: {{path: {draft}}}"]
    else:
        lines += ["domains:", "  - name: ships", f"    draft: {{kind: model, path: {draft}}}"]
    file = tmp_path / "config.yaml"
    file.write_text("\n".join(lines))
    result = CliRunner().invoke(cli.app, ["config", "check", str(file)])
    if kind == "padded":
        assert result.exit_code == 0, result.output
        assert "note" not in result.output
        return
    assert result.exit_code != 0
    assert isinstance(result.exception, InvalidValueError)
    assert REFUSED[kind] in str(result.exception)
    assert result.exception.field == {"drafts": "drafts.model.path", "domain": "domains[0].draft.path"}[place]


def test_a_model_that_is_not_here_is_noted_and_not_taken_for_wrong(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(
        f"target:\n  model: {saved(tmp_path / 'target', 'padded')}\ndrafts:\n  model: {{path: far/away}}"
    )
    result = CliRunner().invoke(cli.app, ["config", "check", str(file)])
    assert result.exit_code == 0, result.output
    assert "far/away is not on this machine" in result.output


def trained(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: t + 0.1 if t.is_floating_point() else t for name, t in tensors.items()}


def test_a_model_that_cannot_be_loaded_at_a_restart_keeps_its_config_and_its_adapters(
    engine: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own, away = saved(tmp_path / "own", "padded"), tmp_path / "away"
    weights = Path(own) / "model.safetensors"
    with engine() as running:
        running.add_domain("ships", examples=("ship mast",), draft=ModelConfig(path=own))
        mine = trained(running.parts.model.tensors("ships"))
        running.parts.registry.publish("ships.model", mine, reason="trained")
        expected = running.generate("ship mast", domain="ships", max_tokens=24, ignore_eos=True).text
    content = weights.read_bytes()
    for breaks in (lambda: Path(own).rename(away), lambda: weights.write_bytes(content[: len(content) // 2])):
        breaks()
        with engine() as again:
            assert "ships" in caplog.text
            assert "stay for the next start" in caplog.text
            assert again.parts.model.describe("ships")["model"] != own
            assert "ships" not in again.parts.model
            answer = again.generate("ship mast", domain="ships", max_tokens=24, ignore_eos=True)
            assert answer.text == expected
            assert answer.proposed > 0
        caplog.clear()
        if away.exists():
            away.rename(own)
        weights.write_bytes(content)
    with engine() as back:
        assert back.parts.model.describe("ships")["model"] == own
        assert back.parts.registry.current("ships.model").number == 1
        for name, tensor in back.parts.model.tensors("ships").items():
            assert torch.equal(tensor, mine[name])
        back.remove_domain("ships")
    with engine() as gone:
        assert not gone.parts.left_out
        assert not gone.parts.own_models


def test_versions_are_dropped_where_the_config_names_another_rank(engine: Any, tmp_path: Path) -> None:
    own = {"path": saved(tmp_path / "own", "padded"), "rank": 4}
    with engine(own) as running:
        mine = trained(running.parts.model.tensors("boats"))
        running.parts.registry.publish("boats.model", mine, reason="trained")
    with engine(own) as again:
        assert again.parts.registry.current("boats.model").number == 1
    with engine({**own, "rank": 2}) as other:
        assert other.parts.registry.current("boats.model").reason == "born as the draft model"


def test_a_domain_that_brings_a_model_drafts_with_it_whatever_others_use(engine: Any, tmp_path: Path) -> None:
    own = {"path": saved(tmp_path / "own", "padded")}
    domain = {"name": "ships", "examples": ["ship mast"], "draft": own}
    with engine(own, sources=["lookup"], model=None) as running:
        client = TestClient(create_app(running))
        assert client.post("/v1/domains", json=domain).status_code == 201
        assert running.parts.mixture.names("ships") == ("lookup", "model")
        assert running.parts.mixture.names("trees") == ("lookup",)
        assert running.generate("ship mast", domain="ships", max_tokens=24, ignore_eos=True).proposed > 0
        same = client.post("/v1/domains", json={**CONFIG["domains"][0], "draft": own})
        assert same.status_code == 201, same.text
    with engine(own, sources=["lookup"], model=None) as again:
        assert again.parts.mixture.names("ships") == ("lookup", "model")
        assert not again.parts.own_models.keys() & {"boats"}


def test_what_can_be_refused_without_reading_weights_is_refused_before(engine: Any, tmp_path: Path) -> None:
    own = saved(tmp_path / "own", "padded")
    common = tiny_model("llama", vocab_size=VOCAB + 61)
    size = sum(parameter.numel() * 4 for parameter in common.parameters())
    with engine(max_resident_bytes=2 * size - 1) as running:
        client = TestClient(create_app(running))
        before = client.get("/v1/domains").json()["data"]
        with patch("drafts.kinds.model._read", side_effect=AssertionError("weights were read")):
            for name, said in (
                ("Ships!", "Ships!"),
                ("boats", "no domain has yet"),
                ("ships", "max_resident"),
            ):
                body = {"name": name, "examples": ["ship mast"], "draft": {"path": own}}
                assert said in error_of(client.post("/v1/domains", json=body))["message"]
        assert client.get("/v1/domains").json()["data"] == before


def test_a_target_with_padded_columns_teaches_the_adapters(engine: Any) -> None:
    with engine() as running:
        scheduler = running.parts.scheduler
        assert len(scheduler.map_of("boats.model")) == running.target.vocab_size == VOCAB + 61
        assert len(scheduler.heads["model"].token_ids) == VOCAB
        for _ in range(4):
            running.generate("boat sail", domain="boats", max_tokens=24, ignore_eos=True, temperature=1.0)
        running.compute(scheduler.drain)
        assert scheduler.counts["scored"] == 4


def test_a_model_registered_later_learns_though_those_before_do_not(engine: Any, tmp_path: Path) -> None:
    own = saved(tmp_path / "own", "padded")
    with engine(model={"path": saved(tmp_path / "still", "padded"), "rank": 0}) as running:
        running.add_domain("ships", examples=("ship mast",), draft=ModelConfig(path=own))
        assert "boats" not in running.parts.model
        running.generate("ship mast", domain="ships", max_tokens=24, ignore_eos=True)
        running.compute(running.parts.scheduler.drain)
        assert running.parts.scheduler.domains["ships.model"].buffer.arrived == 1
