from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from drafts import checkpoint
from drafts.errors import CheckpointError, InvalidValueError
from osd.learn.pretrain_data import load_shards
from osd.serve.collect import Prompt, collect
from osd.serve.load import build_target
from osd.serve.target import TargetModel
from tests.tiny import tiny_model


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return build_target(tiny_model("llama"), name="tiny")


def prompts(count: int, vocab: int) -> list[Prompt]:
    generator = torch.Generator().manual_seed(3)
    lengths = [2 + (5 * n) % 17 for n in range(count)]
    return [
        Prompt("even" if n % 2 else "odd", "made up", f"p{n}", tuple(ids.tolist()))
        for n, length in enumerate(lengths)
        for ids in [torch.randint(3, vocab, (length,), generator=generator)]
    ]


def test_collected_answers_are_the_models_own_with_its_hidden_states_and_evidence(
    target: TargetModel, tmp_path: Path
) -> None:
    files = collect(target, prompts(7, target.vocab_size), tmp_path, max_tokens=9, batch=3, evidence_k=8)
    answers = load_shards(files)
    assert len(files) == 3
    assert len(answers) == 7
    for answer in answers:
        with torch.inference_mode():
            out = target.reference(answer.tokens[None], output_hidden_states=True)
        logits = out.logits[0, answer.prompt_length - 1 : -1].float()
        assert torch.equal(logits.argmax(-1), answer.tokens[answer.prompt_length :])
        expected = logits.log_softmax(-1).gather(-1, answer.top_ids.long())
        torch.testing.assert_close(expected, answer.top_logprobs.float(), atol=5e-3, rtol=5e-3)
        layer = target.feature_layers[0]
        hidden = out.hidden_states[layer][0, :-1]
        got = answer.features[:, : target.hidden_size].float()
        torch.testing.assert_close(got, hidden.float(), atol=5e-3, rtol=5e-3)
        assert answer.features.shape == (len(answer.tokens) - 1, target.feature_width)


def test_what_was_collected_is_kept_and_other_settings_make_other_shards(
    target: TargetModel, tmp_path: Path
) -> None:
    asked = prompts(4, target.vocab_size)
    first = collect(target, asked, tmp_path, max_tokens=4, batch=2, evidence_k=4)
    stamps = [path.stat().st_mtime_ns for path in first]
    assert collect(target, asked, tmp_path, max_tokens=4, batch=2, evidence_k=4) == first
    assert [path.stat().st_mtime_ns for path in first] == stamps
    assert not set(collect(target, asked, tmp_path, max_tokens=5, batch=2, evidence_k=4)) & set(first)


def test_drawn_answers_repeat_by_seed_and_carry_evidence_at_temperature_one(
    target: TargetModel, tmp_path: Path
) -> None:
    asked = prompts(5, target.vocab_size)

    def drawn(folder: str, seed: int, temperature: float = 2.0) -> list[list[int]]:
        files = collect(
            target,
            asked,
            tmp_path / folder,
            max_tokens=9,
            batch=3,
            evidence_k=8,
            temperature=temperature,
            seed=seed,
        )
        for answer in load_shards(files):
            with torch.inference_mode():
                logits = target.reference(answer.tokens[None]).logits[0, answer.prompt_length - 1 : -1]
            expected = logits.float().log_softmax(-1).gather(-1, answer.top_ids.long())
            torch.testing.assert_close(expected, answer.top_logprobs.float(), atol=5e-3, rtol=5e-3)
        return [answer.tokens.tolist() for answer in load_shards(files)]

    first = drawn("first", 1)
    assert drawn("again", 1) == first
    assert drawn("other", 2) != first
    assert drawn("greedy", 1, temperature=0.0) != first


class Killed(BaseException):
    """Stands for SIGKILL: nothing may catch it."""


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_run_killed_at_any_write_goes_on_to_the_same_shards(
    target: TargetModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    asked = prompts(5, target.vocab_size)

    def run(folder: Path) -> dict[str, bytes]:
        monkeypatch.setattr(
            checkpoint, "_PROCESS", secrets.token_hex(4)
        )  # as a process of its own would have
        collect(target, asked, folder, max_tokens=4, batch=2, evidence_k=4, temperature=1.0)
        return {path.name: path.read_bytes() for path in folder.iterdir()}

    whole = run(tmp_path / "whole")
    place: Any = os if call == "fsync" else Path
    real = getattr(place, call)
    kills = 0
    for deadline in range(1, 40):
        left = deadline

        def counted(*arguments: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                raise Killed
            return real(*arguments)

        folder = tmp_path / f"killed{deadline}"
        monkeypatch.setattr(place, call, counted)
        try:
            run(folder)
        except Killed:
            kills += 1
        monkeypatch.setattr(place, call, real)
        assert run(folder) == whole
        if left > 0:
            break
    assert kills == deadline - 1 >= 7


def test_a_shard_that_lost_its_list_or_its_tensors_is_made_again_or_named(
    target: TargetModel, tmp_path: Path
) -> None:
    asked = prompts(4, target.vocab_size)
    files = collect(target, asked, tmp_path, max_tokens=4, batch=2, evidence_k=4)
    before = files[0].with_suffix(".safetensors").read_bytes()
    files[0].with_suffix(".safetensors").write_bytes(before[:100])
    with pytest.raises(CheckpointError, match=files[0].name):
        load_shards(files)
    files[0].unlink()
    collect(target, asked, tmp_path, max_tokens=4, batch=2, evidence_k=4)
    assert files[0].with_suffix(".safetensors").read_bytes() == before


def test_shards_of_another_target_or_other_layers_are_refused(target: TargetModel, tmp_path: Path) -> None:
    asked = prompts(4, target.vocab_size)
    files = collect(target, asked, tmp_path / "a", max_tokens=4)
    same = build_target(tiny_model("llama"), name="moved elsewhere")
    assert collect(same, asked, tmp_path / "a", max_tokens=4) == files
    other = build_target(tiny_model("llama", seed=1), name="tiny")
    fewer = build_target(tiny_model("llama"), name="tiny", feature_layers=(1, 3))
    for wrong in (other, fewer):
        with pytest.raises(CheckpointError, match="holds answers of"):
            collect(wrong, asked, tmp_path / "a", max_tokens=4)
    with pytest.raises(CheckpointError, match="the other shards are"):
        load_shards([*files, *collect(other, asked, tmp_path / "b", max_tokens=4)])


def test_training_may_read_fewer_layers_than_were_collected(target: TargetModel, tmp_path: Path) -> None:
    files = collect(target, prompts(3, target.vocab_size), tmp_path, max_tokens=4)
    every = load_shards(files)
    width = target.hidden_size
    last = target.feature_layers[-1]
    for answer, short in zip(every, load_shards(files, (last,)), strict=True):
        assert torch.equal(answer.features[:, -width:], short.features)
    with pytest.raises(InvalidValueError, match="of those collected"):
        load_shards(files, (last, 99))


def test_a_disk_that_is_too_full_and_answers_that_do_not_fit_are_told_before_anything_is_asked(
    target: TargetModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = prompts(4, target.vocab_size)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(InvalidValueError, match="GiB free"):
        collect(target, asked, tmp_path, max_tokens=4)
    monkeypatch.undo()
    with pytest.raises(InvalidValueError, match="max_tokens"):
        collect(target, asked, tmp_path, max_tokens=target.max_positions)
    collect(target, asked, tmp_path, max_tokens=4)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=0))
    collect(target, asked, tmp_path, max_tokens=4)
