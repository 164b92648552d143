"""The comparison of trunks on a tiny target: a fixed subset, equal data for all, results that go on."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
import trunk as benchmark

from drafts.errors import InvalidValueError
from osd.learn import pretrain
from osd.serve.collect import Prompt, collect
from osd.serve.load import build_target
from osd.shards import shard_files
from tests.tiny import tiny_model


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of greedy and one of drawn shards, and a target that is loaded without a file."""
    monkeypatch.chdir(tmp_path)
    target = build_target(tiny_model("llama"), name="tiny", feature_layers=(1, 2, 3))
    monkeypatch.setattr(benchmark, "load_target", lambda *_: (target, None))
    monkeypatch.setattr(pretrain, "fastest_product", lambda width: pretrain.PRODUCTS["plain"])
    (tmp_path / "d.yaml").write_text("target: {model: tiny}\n")
    generator = torch.Generator().manual_seed(3)
    asked = [
        Prompt(
            "ab"[n % 2], "made up", f"p{n}", tuple(torch.randint(3, 128, (5,), generator=generator).tolist())
        )
        for n in range(24)
    ]
    for name, temperature in (("greedy", 0.0), ("drawn", 1.0)):
        collect(target, asked, tmp_path / name, max_tokens=6, batch=8, evidence_k=8, temperature=temperature)
    return tmp_path


def compared(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *options: str) -> dict:
    limits = ["--answers", "20", "--held", "6", "--epochs", "2", "--draft-vocab", "64", "--json", "r.json"]
    arguments = ["--config", "d.yaml", "--shards", "greedy", "drawn", *limits, *options]
    monkeypatch.setattr(sys, "argv", ["trunk.py", *arguments])
    benchmark.main()
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert printed == json.loads(Path("r.json").read_text())
    return printed["variants"]


def test_variants_learn_from_the_same_answers_and_a_second_run_adds_to_the_first(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first = compared(monkeypatch, capsys, "--variants", "baseline", "layers=1+3&init=target")
    both = compared(monkeypatch, capsys, "--variants", "baseline", "loss=reverse_kl", "seed=1")
    assert {name: both[name] for name in first} == first
    assert list(both) == [*first, "loss=reverse_kl", "seed=1"]
    assert both["layers=1+3&init=target"]["layers"] == [1, 3]
    assert len({(v["answers"], v["answer_tokens"], v["held_back"]) for v in both.values()}) == 1
    curve = both["baseline"]["curve"]
    assert [point["tokens"] for point in curve] == sorted({point["tokens"] for point in curve})
    assert curve[-1]["tokens"] == 2 * both["baseline"]["answer_tokens"]
    assert set(curve[-1]["labels"]) == {"all", "a", "b"}
    assert curve != both["seed=1"]["curve"]
    with pytest.raises(InvalidValueError, match="same subset"):
        compared(monkeypatch, capsys, "--answers", "10")


def test_held_back_prompts_are_trained_on_in_no_folder(place: Path) -> None:
    files = [file for name in ("greedy", "drawn") for file in shard_files(place / name)]
    training, held = benchmark.chosen_prompts(files, 20, 6, 0)
    assert len(held) == 6
    assert len(training) == 10
    assert not training & held
    assert (training, held) == benchmark.chosen_prompts(files, 20, 6, 0)
    assert held != benchmark.chosen_prompts(files, 20, 6, 1)[1]


def test_a_variant_is_changes_of_the_baseline() -> None:
    shared = {"epochs": 2, "layers": [1, 2]}
    assert benchmark.variant("baseline", shared).layers == (1, 2)
    changed = benchmark.variant("layers=9+20+30&rate=3e-4&support=full", shared)
    assert (changed.layers, changed.rate, changed.support, changed.epochs) == ((9, 20, 30), 3e-4, "full", 2)
    for bad in ("depth=2", "layers"):
        with pytest.raises(InvalidValueError, match="field=value"):
            benchmark.variant(bad, shared)
