"""What is kept of a domain's answers: shown, exported, purged from memory and disk."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load
from starlette.testclient import TestClient
from typer.testing import CliRunner

from drafts.config import NgramConfig
from drafts.errors import UnknownNameError
from drafts.kinds.ngram import NgramSource
from drafts.registry import Registry
from osd.learn.buffer import DomainBuffer
from osd.learn.config import BufferConfig, LearnConfig
from osd.learn.scheduler import LearningScheduler
from osd.types import Event
from router.app import cli
from router.app.http import create_app
from router.bodies.buffers import DomainBuffers
from tests.osd.learn_rig import finished, tiny_head
from tests.router.fake_engine import FakeEngine
from tests.router.http_rig import error_of
from tests.router.serving import live_server

runner = CliRunner()


class Kept:
    """A learner and memories that served a few requests of two domains."""

    def __init__(self) -> None:
        config = LearnConfig(buffer=BufferConfig(hold_back=3), update_every=1000)
        self.scheduler = LearningScheduler({"eagle": tiny_head("math", "code")}, Registry(), config)
        self.ngram = NgramSource(NgramConfig())
        self.events: list[Event] = []
        self.rewritten: list[str] = []
        for domain in ("math", "code"):
            self.ngram.add_domain(domain)
            for seed in range(6):
                record = finished(seed, domain)
                self.scheduler.take(record)
                tokens = [*record.request.prompt_ids, *record.output_ids]
                self.ngram.teach(domain, tokens, len(record.request.prompt_ids))
        self.scheduler.drain()
        self.buffers = DomainBuffers(
            lambda: ["base", "math", "code"],
            self.scheduler,
            self.ngram,
            rewrite=self.rewritten.append,
            on_event=self.events.append,
        )


@pytest.fixture
def kept() -> Kept:
    return Kept()


@pytest.fixture
def client(kept: Kept) -> Iterator[TestClient]:
    engine = FakeEngine()
    engine.buffers = kept.buffers
    with TestClient(create_app(engine), raise_server_exceptions=False) as client:
        yield client


def records(shown: dict[str, Any]) -> list[tuple[int, int]]:
    return [(row["records"], row["held_back"]) for row in shown["buffers"]]


def test_what_is_kept_is_shown(kept: Kept) -> None:
    shown = kept.buffers.show("math")
    assert records(shown) == [(4, 2)]
    row = shown["buffers"][0]
    assert row["kind"] == "eagle"
    assert row["seen"] == 6
    assert row["bytes"] == kept.scheduler.domains["math"].buffer.nbytes
    assert row["oldest"] <= row["newest"]
    assert 0.0 <= row["wrong_share"] <= 1.0
    assert shown["memory"]["tokens"] > 0
    assert kept.buffers.show("base") == {
        "domain": "base",
        "buffers": [],
        "memory": {"tokens": 0, "bytes": kept.buffers.show("base")["memory"]["bytes"]},
    }


def test_an_exported_buffer_can_be_loaded(kept: Kept) -> None:
    tensors = load(kept.buffers.export("math"))
    buffer = DomainBuffer(BufferConfig(hold_back=3))
    buffer.load_state(tensors)
    assert len(buffer.training) == 4
    assert buffer.training[0].emitted.tolist() == list(finished(0, "math").output_ids)


def test_purging_forgets_one_domain_only_and_says_what_was_there(kept: Kept) -> None:
    other = kept.buffers.show("code")
    gone = kept.buffers.purge("math")
    assert records(gone) == [(4, 2)]
    assert records(kept.buffers.show("math")) == [(0, 0)]
    assert kept.buffers.show("math")["memory"]["tokens"] == 0
    assert kept.buffers.show("code") == other
    assert kept.rewritten == ["math"]
    assert [(e.kind, e.domain, e.numbers["records"]) for e in kept.events] == [("purge", "math", 6.0)]
    kept.scheduler.domains["math"].buffer.check()


def test_purging_forgets_what_is_still_on_its_way_into_the_buffer(kept: Kept) -> None:
    for seed in (10, 11):
        kept.scheduler.take(finished(seed, "math"))
    kept.scheduler.take(finished(12, "code"))
    kept.scheduler.work(0.0, idle=True)
    kept.buffers.purge("math")
    kept.scheduler.drain()
    assert records(kept.buffers.show("math")) == [(0, 0)]
    assert sum(records(kept.buffers.show("code"))[0]) == 7


def test_learning_goes_on_after_a_purge(kept: Kept) -> None:
    kept.buffers.purge("math")
    for seed in range(20, 24):
        kept.scheduler.take(finished(seed, "math"))
    kept.scheduler.drain()
    assert sum(records(kept.buffers.show("math"))[0]) == 4
    kept.scheduler.domains["math"].buffer.check()


def test_unknown_names_list_the_known_ones(kept: Kept) -> None:
    for call in (kept.buffers.show, kept.buffers.export, kept.buffers.purge):
        with pytest.raises(UnknownNameError, match="math"):
            call("maths")
    with pytest.raises(UnknownNameError, match="eagle"):
        kept.buffers.export("math", "model")
    with pytest.raises(UnknownNameError, match="kind"):
        kept.buffers.export("base")


def test_over_http(client: TestClient, kept: Kept) -> None:
    assert records(client.get("/v1/domains/math/buffer").json()) == [(4, 2)]
    content = client.get("/v1/domains/math/buffer/export").content
    assert "training.emitted" in load(content)
    assert records(client.delete("/v1/domains/math/buffer").json()) == [(4, 2)]
    assert records(client.get("/v1/domains/math/buffer").json()) == [(0, 0)]
    assert records(client.delete("/v1/domains/math/buffer").json()) == [(0, 0)]
    for call in (client.get, client.delete):
        assert "math" in error_of(call("/v1/domains/maths/buffer"), 404)["message"]


def test_by_the_command_line(kept: Kept, tmp_path: Path) -> None:
    engine = FakeEngine()
    engine.buffers = kept.buffers
    with live_server(engine) as url:

        def run(*arguments: str, **options: Any) -> Any:
            return runner.invoke(cli.app, ["buffer", *arguments, "--url", url], **options)

        text = run("show", "math").output
        assert "eagle: 4 records and 2 held back" in text
        assert "memory:" in text
        assert records(json.loads(run("show", "math", "--json").output)) == [(4, 2)]
        file = tmp_path / "math.safetensors"
        assert run("export", "math", str(file)).exit_code == 0
        assert "training.emitted" in load(file.read_bytes())
        assert run("purge", "math", input="n\n").exit_code != 0
        assert records(kept.buffers.show("math")) == [(4, 2)]
        assert "6 records" in run("purge", "math", "--yes").output
        assert "no distillation buffer" in run("show", "base").output
    assert records(kept.buffers.show("math")) == [(0, 0)]
