"""A restart with a neural draft: versions, what learning counted and what the mixture learned come back."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from drafts.bank import ExpertBank
from drafts.registry import Registry
from drafts.trunk import Trunk
from osd.serve.lend import head_shape
from osd.serve.load import build_target
from router.bodies.api import EngineOptions
from router.bodies.embedded import Engine
from router.config import PolydraftConfig
from tests.router.fakes import WordEncoder
from tests.router.tiny_engine import CONFIG, SPECIAL, byte_tokenizer
from tests.tiny import tiny_model

VOCAB = len(SPECIAL) + 256


@pytest.fixture
def start(tmp_path: Path):
    """Starts an engine with a tiny trunk on one state folder."""
    target = build_target(tiny_model("llama", vocab_size=VOCAB), name="tiny")

    def engine(seed: int = 0, ids: int = VOCAB, rank: int = 16) -> Engine:
        file = tmp_path / "trunk.safetensors"
        Trunk.fresh(head_shape(target), torch.arange(ids), seed).save(file)
        config = PolydraftConfig.model_validate(
            {
                **CONFIG,
                "drafts": {
                    "sources": ["lookup", "ngram", "eagle"],
                    "eagle": {"trunk": str(file), "rank": rank},
                },
                "learn": {
                    "budget_share": 0.9,
                    "update_every": 2,
                    "guard": {"min_positions": 8, "margin": -1.0},
                },
            }
        )
        options = EngineOptions(state_dir=str(tmp_path / "state"))
        return Engine(config, target, byte_tokenizer(), options)

    with patch("router.mind.router.SentenceEncoder", lambda *_, **__: WordEncoder()):
        yield engine


def learn(engine: Engine) -> None:
    """Serve until an expert of boats was published, and swap to it."""
    for _ in range(12):
        engine.generate("boat sail harbour", max_tokens=24, domain="boats", ignore_eos=True)
    scheduler = engine.parts.scheduler
    assert scheduler is not None
    engine.compute(scheduler.drain)
    engine.generate("boat sail harbour", max_tokens=4, domain="boats")


def test_versions_and_what_was_learned_come_back(start) -> None:
    with start() as engine:
        learn(engine)
        version = engine.parts.mixture.version("boats")
        assert version > 0
        tensors = engine.parts.bank.tensors("boats")
        weights = list(engine.parts.mixture._combiners[False].shared)
        before = {row["name"]: row for row in engine.domains()}["boats"]
        matrix = engine.stats()["matrix"]
        assert matrix["experts"]["boats"]["boats"]["positions"] > 100
        assert {"base", "trees"} & set(matrix["experts"])
        assert matrix["memories"]["boats"]["boats"]["agreement"] > 0.5
    with start() as engine:
        after = {row["name"]: row for row in engine.domains()}["boats"]
        assert after["version"] == before["version"] == version
        for name, tensor in engine.parts.bank.tensors("boats").items():
            assert torch.equal(tensor, tensors[name])
        assert engine.parts.mixture._combiners[False].shared == weights
        assert after["sources"]["ngram"] == before["sources"]["ngram"]
        assert after["buffer"] == before["buffer"]
        assert after["buffer"]["records"] > 0
        assert engine.stats()["matrix"] == matrix
        learning = engine.stats()["learning"]
        assert learning["published"] >= 1
        answer = engine.generate("boat sail harbour", max_tokens=8, domain="boats")
        assert answer.versions == (version,)


def test_the_expert_of_a_domain_that_was_registered_is_served_after_a_restart(start) -> None:
    with start() as engine:
        engine.add_domain("ships", examples=("ship mast",))
        tensors = engine.parts.bank.tensors("ships")
        tensors["output_bias"] += 1.0
        engine.parts.registry.publish("ships", tensors, reason="trained")
    with start() as engine:
        assert engine.parts.mixture.version("ships") == 1
        assert torch.equal(engine.parts.bank.tensors("ships")["output_bias"], tensors["output_bias"])


@pytest.mark.parametrize(
    ("change", "keeps_records"),
    [({"seed": 1}, False), ({"ids": VOCAB - 9}, False), ({"rank": 4}, True)],
    ids=["another trunk of the same form", "another draft vocabulary", "another rank"],
)
def test_a27_experts_and_hidden_states_of_another_trunk_start_anew_and_learning_goes_on(
    start: Any, caplog: pytest.LogCaptureFixture, change: dict[str, int], keeps_records: bool
) -> None:
    with start() as engine:
        learn(engine)
        old = engine.parts.registry.current("boats")
        assert old is not None
        assert old.trunk == engine.parts.bank.trunk.fingerprint()
    with start(**change) as engine:
        trunk = engine.parts.bank.trunk.fingerprint()
        assert (trunk == old.trunk) == keeps_records
        rows = {row["name"]: row for row in engine.domains()}
        assert (rows["boats"]["buffer"]["records"] > 0) == keeps_records
        versions = engine.parts.registry.versions("boats")
        assert [(v.trunk, v.parent) for v in versions] == [(trunk, None)]
        assert not versions[0].tensors["output_b"].any()
        said = [line for line in caplog.messages if "domain boats" in line]
        assert len(said) == 1 + (not keeps_records)
        assert keeps_records or all(old.trunk in line and trunk in line for line in said)
        learn(engine)
        published = engine.parts.registry.current("boats")
        assert published.number > versions[0].number
        for name, tensor in engine.parts.bank.tensors("boats").items():
            assert torch.equal(tensor, published.tensors[name])
    caplog.clear()
    with start(**change) as engine:
        assert engine.parts.registry.current("boats").number == published.number
        assert not [line for line in caplog.messages if "anew" in line]


def test_versions_that_name_no_trunk_stay_where_their_form_fits(start: Any, tmp_path: Path) -> None:
    with start() as engine:
        bank = ExpertBank(engine.parts.bank.trunk)
    other = Registry(tmp_path / "state" / "versions")
    number = other.publish("boats", bank.tensors("boats"), reason="by an earlier release").number
    assert number > 0
    with start() as engine:
        assert engine.parts.registry.current("boats").number == number


def test_what_was_purged_is_on_disk_no_more(start, tmp_path) -> None:
    with start() as engine:
        learn(engine)
        engine.generate("tree leaf forest", max_tokens=24, domain="trees", ignore_eos=True)
        assert engine.parts.scheduler is not None
        engine.compute(engine.parts.scheduler.drain)
    files = {kind: tmp_path / "state" / kind / "boats.safetensors" for kind in ("buffers", "memories")}
    sizes = {kind: file.stat().st_size for kind, file in files.items()}
    with start() as engine:
        gone = engine.buffers.purge("boats")
        assert gone["buffers"][0]["records"] > 0
        assert gone["memory"]["tokens"] > 0
        assert "purge" in [event["kind"] for event in engine.stats()["events"]]
        for kind, file in files.items():
            assert file.stat().st_size < sizes[kind] / 4
        assert engine.buffers.show("trees")["memory"]["tokens"] > 0
        engine.generate("boat sail harbour", max_tokens=4, domain="boats")
    with start() as engine:
        shown = engine.buffers.show("boats")
        assert sum(row["records"] + row["held_back"] for row in shown["buffers"]) <= 1
        assert shown["memory"]["tokens"] <= 4
        assert engine.buffers.show("trees")["memory"]["tokens"] > 0
