from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from drafts.kinds.eagle import EagleSource
from drafts.trunk import Trunk
from osd.serve.load import build_target
from router.app import trunk as app
from tests.tiny import tiny_model


class Letters:
    """A tokenizer of one token a letter."""

    def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> dict[str, list[int]]:
        return {"input_ids": [1, *(3 + ord(letter) % 100 for letter in messages[0]["content"])]}


def test_a_trunk_from_prompts_to_a_file_that_the_source_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = build_target(tiny_model("llama"), name="tiny")
    monkeypatch.setattr(app, "load_target", lambda name: (target, Letters()))
    asked, kept = tmp_path / "prompts.jsonl", tmp_path / "evaluation.jsonl"
    lines = [
        {"prompt": f"say {n} twice", "domain": "ab"[n % 2], "source": f"made up, MIT {n}"} for n in range(20)
    ]
    asked.write_text("\n".join(json.dumps(line) for line in lines))
    kept.write_text(json.dumps({"prompt": "say 3 twice"}))
    out = tmp_path / "trunk.safetensors"
    app.main(
        [asked],
        [kept],
        "tiny",
        tmp_path / "shards",
        out,
        epochs=1,
        draft_vocab=64,
        max_tokens=6,
        drawn_tokens=0,
    )

    facts = json.loads((tmp_path / "trunk.provenance.json").read_text())
    assert facts["data"]["prompts"] == 19
    assert list(facts["data"]["sources"]) == ["made up, MIT"]
    assert facts["data"]["labels"] == {"a": 10, "b": 9}
    assert facts["fingerprint"] == Trunk.load(out).fingerprint()
    assert str(tmp_path) not in json.dumps(facts)
    assert {"all", "a", "b"} == set(facts["epochs"][0]["labels"])
    source = EagleSource.from_file(
        out,
        embedding=target.embedding,
        output_weight=target.output_weight,
        feature_layers=target.feature_layers,
    )
    assert source.describe("base")["draft_vocabulary"] == 64
    assert 2 in source.trunk.token_ids


def test_drawn_answers_add_text_but_no_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = build_target(tiny_model("llama"), name="tiny")
    monkeypatch.setattr(app, "load_target", lambda name: (target, Letters()))
    asked = tmp_path / "prompts.jsonl"
    asked.write_text("\n".join(json.dumps({"prompt": f"say {n}", "source": "made up"}) for n in range(10)))
    out = tmp_path / "trunk.safetensors"
    app.main(
        [asked], [], "tiny", tmp_path / "shards", out, epochs=1, draft_vocab=64, max_tokens=6, drawn_tokens=4
    )
    facts = json.loads((tmp_path / "trunk.provenance.json").read_text())
    assert facts["data"]["prompts"] == 10
    assert facts["data"]["answers"] == 19
    assert facts["held_back_prompts"] == 1
