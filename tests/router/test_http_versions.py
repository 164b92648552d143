"""Versions of a domain's expert over HTTP and by the command line, between two servers."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from starlette.testclient import TestClient
from typer.testing import CliRunner

from drafts.draft_model import DraftModel
from drafts.errors import UnknownNameError, VersionsFileError
from drafts.kinds.model import ModelSource
from drafts.registry import Registry
from osd.types import Event
from router.app import cli
from router.app.http import create_app
from router.bodies.versions import DomainVersions
from router.config import ServerConfig
from tests.drafts.head_rig import tiny_trunk
from tests.drafts.registry_rig import published, weights
from tests.osd.learn_rig import tiny_head
from tests.osd.test_learn_model import learning_source
from tests.router.fake_engine import FakeEngine
from tests.router.http_rig import error_of
from tests.router.serving import live_server
from tests.tiny import VOCAB, tiny_model

runner = CliRunner()


def engine_with(registry: Registry) -> FakeEngine:
    engine = FakeEngine()
    engine.versions = DomainVersions(registry)
    return engine


@pytest.fixture
def registry() -> Registry:
    return published(Registry(), 3)


@pytest.fixture
def client(registry: Registry) -> Iterator[TestClient]:
    with TestClient(create_app(engine_with(registry)), raise_server_exceptions=False) as client:
        yield client


def test_versions_are_listed_and_rolled_back(client: TestClient, registry: Registry) -> None:
    rows = client.get("/v1/domains/math/versions").json()["data"]
    assert [(row["number"], row["served"]) for row in rows] == [(0, False), (1, False), (2, True)]
    assert client.post("/v1/domains/math/rollback", json={}).json()["number"] == 1
    assert client.post("/v1/domains/math/rollback", json={"to": 2}).json()["served"] is True
    assert registry.events()[-1]["reason"] == "rolled back by hand"
    assert (
        "known: 0, 1, 2" in error_of(client.post("/v1/domains/math/rollback", json={"to": 9}), 404)["message"]
    )
    error_of(client.post("/v1/domains/math/rollback", json={"to": -1}))
    for path in ("versions", "export"):
        assert "known: math" in error_of(client.get(f"/v1/domains/sql/{path}"), 404)["message"]


def test_what_one_server_exports_another_serves(client: TestClient) -> None:
    content = client.get("/v1/domains/math/export").content
    other = published(Registry(), 1, "sums")
    with TestClient(create_app(engine_with(other))) as there:
        answer = there.post("/v1/domains/sums/import", content=content, params={"file": "m.safetensors"})
    assert answer.json()["number"] == 3
    version = other.current("sums")
    assert version is not None
    assert torch.equal(version.tensors["down"], weights(2)["down"])
    assert other.events()[-1]["file"] == "m.safetensors"


def test_b26_a_bad_upload_is_refused_by_its_name_alone(client: TestClient, registry: Registry) -> None:
    serial = registry.serial
    for name in ("bad.safetensors", "../../bad.safetensors"):
        answer = client.post("/v1/domains/math/import", content=b"half", params={"file": name})
        error = error_of(answer)
        assert error["code"] == "versions_file"
        assert error["message"].startswith("bad.safetensors: cannot be imported")
        assert "/" not in error["message"].split(":")[0]
        assert "tmp" not in error["message"]
    assert registry.serial == serial


def test_imports_have_a_limit_of_their_own(registry: Registry) -> None:
    settings = ServerConfig(max_request_bytes=1024, max_import_bytes=8192)
    content = DomainVersions(registry).export("math")
    assert 1024 < len(content) < 8192
    with TestClient(create_app(engine_with(registry), settings)) as client:
        assert client.post("/v1/domains/math/import", content=content).status_code == 200
        refused = client.post("/v1/domains/math/import", content=bytes(8193))
        assert "max_import_bytes" in error_of(refused, 413)["message"]
        refused = client.post("/v1/domains/math/rollback", content=bytes(1025))
        assert "max_request_bytes" in error_of(refused, 413)["message"]


def test_a21_an_expert_of_another_trunk_is_refused_and_one_that_fits_is_announced() -> None:
    def deployment(seed: int) -> tuple[Registry, DomainVersions]:
        head, registry = tiny_head("math"), Registry(trunk=tiny_trunk(seed).fingerprint())
        registry.publish("math", head.bank.tensors("math"), reason="born")
        checks = {"eagle": lambda domain, tensors: head.bank.check(tensors)}
        return registry, DomainVersions(registry, checks, heard.append)

    heard: list[Event] = []
    (_, ours), (_, other), (strange, bare) = deployment(0), deployment(1), deployment(0)
    with pytest.raises(Exception, match=r"file: .*made for trunk"):
        other.import_file("math", ours.export("math"), "file")
    assert heard == []
    assert ours.import_file("math", ours.export("math"), "file")["number"] == 1
    assert [(event.kind, event.domain, event.numbers) for event in heard] == [
        ("import", "math", {"version": 1})
    ]
    strange.publish("other", weights(1), reason="not an expert")
    with pytest.raises(Exception, match=r"file: .*expert has an unknown tensor"):
        bare.import_file("math", bare.export("other"), "file")


def test_the_commands_work_on_the_running_server(
    tmp_path: Path, monkeypatch, capsys, registry: Registry
) -> None:
    file = tmp_path / "math.safetensors"
    with live_server(engine_with(registry)) as url:

        def run(*arguments: str) -> str:
            return runner.invoke(cli.app, ["domains", *arguments, "--url", url]).output

        assert "2 (served)" in run("versions", "math")
        assert "wrote" in run("export", "math", str(file))
        assert "math serves version 1" in run("rollback", "math")
        assert "math serves version 0" in run("rollback", "math", "--to", "0")
        assert "math serves version 5" in run("import", "math", str(file))
        rows = json.loads(run("versions", "math", "--json"))
        assert [row["parent"] for row in rows if row["served"]] == [0]
        assert "math serves version 0" in run("rollback", "math")
        file.write_bytes(b"half")
        monkeypatch.setattr(sys, "argv", ["polydraft", "domains", "import", "math", str(file), "--url", url])
        with pytest.raises(SystemExit):
            cli.main()
    said = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().err)
    assert "400: math.safetensors: cannot be imported" in said


def adapters(*domains: str) -> tuple[Registry, DomainVersions, list[Event]]:
    """A deployment whose domains have adapters only; those of ``math`` have learned once."""
    source, registry = learning_source(*domains), Registry(trunk="trunk-a")
    heard: list[Event] = []
    for domain in domains:
        registry.publish(f"{domain}.model", source.tensors(domain), reason="born")
    tensors = {n: t + 1 if t.is_floating_point() else t for n, t in source.tensors("math").items()}
    registry.publish("math.model", tensors, reason="learned")
    return registry, DomainVersions(registry, {"model": source.check}, heard.append), heard


def test_adapters_are_listed_rolled_back_exported_and_imported_under_their_domain() -> None:
    registry, versions, heard = adapters("math", "sums")
    with TestClient(create_app(engine_with(registry))) as client:
        rows = client.get("/v1/domains/math/versions").json()["data"]
        assert [(row["number"], row["served"], row["trunk"]) for row in rows] == [
            (0, False, None),
            (1, True, None),
        ]
        assert client.get("/v1/domains/math/versions?kind=model").json()["data"] == rows
        assert "known: model" in error_of(client.get("/v1/domains/math/versions?kind=eagle"), 404)["message"]
        assert "known: math, sums" in error_of(client.get("/v1/domains/math.model/versions"), 404)["message"]
        answer = client.get("/v1/domains/math/export")
    other = DomainVersions(Registry(trunk="trunk-b"))
    assert versions.import_file("sums", answer.content, "file")["number"] == 2
    assert versions.rollback("sums")["number"] == 0
    assert versions.rollback("math", kind="model")["number"] == 0
    assert [(event.kind, event.domain, event.numbers["version"]) for event in heard] == [
        ("import", "sums", 2),
        ("rollback", "sums", 0),
        ("rollback", "math", 0),
    ]
    assert heard[1].reason == "model: rolled back by hand"
    with pytest.raises(UnknownNameError, match="domain"):
        other.import_file("math", answer.content)


def test_what_is_imported_is_checked_as_its_kind_and_kinds_have_versions_of_their_own() -> None:
    registry, _, _ = adapters("math")
    head = tiny_head("math")
    registry.publish("math", head.bank.tensors("math"), reason="born")
    checks = {"eagle": lambda domain, tensors: head.bank.check(tensors)}
    both = DomainVersions(registry, {**checks, "model": learning_source("math").check})
    assert [row["reason"] for row in both.rows("math")] == ["born"]
    assert [row["reason"] for row in both.rows("math", "model")] == ["born", "learned"]
    expert, adapter = both.export("math"), both.export("math", "model")
    assert both.import_file("math", adapter, kind="model")["number"] == 3
    assert both.import_file("math", expert, kind="eagle")["number"] == 1
    with pytest.raises(VersionsFileError, match="expert"):
        both.import_file("math", adapter)
    with pytest.raises(VersionsFileError, match="adapter"):
        both.import_file("math", expert, kind="model")
    strange = ModelSource(DraftModel(tiny_model(seed=4), VOCAB, rank=8))
    strange.add_domain("math")
    elsewhere = DomainVersions(registry, {"model": strange.check})
    with pytest.raises(VersionsFileError, match="other weights"):
        elsewhere.import_file("math", adapter, kind="model")


def test_an_event_tells_its_own_change_whatever_happens_beside_it() -> None:
    heard: list[Event] = []
    registry = published(Registry(), 3)
    rollback = registry.rollback

    def raced(*arguments: Any, **options: Any) -> Any:
        version = rollback(*arguments, **options)
        registry.publish("code", weights(1), reason="another change meanwhile")
        return version

    registry.rollback = raced  # type: ignore[method-assign]
    DomainVersions(registry, on_event=heard.append).rollback("math")
    assert [(event.domain, event.reason) for event in heard] == [("math", "rolled back by hand")]
