"""A restart with a neural draft: versions, what learning counted and what the mixture learned come back."""

from pathlib import Path
from unittest.mock import patch

import pytest
import torch

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
    trunk = tmp_path / "trunk.safetensors"
    Trunk.fresh(head_shape(target), torch.arange(VOCAB), 0).save(trunk)
    config = PolydraftConfig.model_validate(
        {
            **CONFIG,
            "drafts": {"sources": ["lookup", "ngram", "eagle"], "eagle": {"trunk": str(trunk)}},
            "learn": {"budget_share": 0.9, "update_every": 2, "guard": {"min_positions": 8, "margin": -1.0}},
        }
    )

    def engine() -> Engine:
        options = EngineOptions(state_dir=str(tmp_path / "state"))
        return Engine(config, target, byte_tokenizer(), options)

    with patch("router.mind.router.SentenceEncoder", lambda *_, **__: WordEncoder()):
        yield engine


def test_versions_and_what_was_learned_come_back(start) -> None:
    with start() as engine:
        for _ in range(12):
            engine.generate("boat sail harbour", max_tokens=24, domain="boats", ignore_eos=True)
        scheduler = engine.parts.scheduler
        assert scheduler is not None
        engine.compute(scheduler.drain)
        engine.generate("boat sail harbour", max_tokens=4, domain="boats")
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
