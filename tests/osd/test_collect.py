from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from osd.learn.pretrain_data import load_shards
from osd.serve.collect import Prompt, collect, encode_prompts
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


class Words:
    """A tokenizer of one token a word."""

    def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> dict[str, list[int]]:
        return {"input_ids": [1, *(len(word) for word in messages[0]["content"].split())]}


def test_prompts_repeat_neither_each_other_nor_what_is_kept_for_evaluation() -> None:
    entries = [
        {"prompt": "one two", "domain": "a", "source": "s"},
        {"prompt": " one two "},
        {"prompt": "kept for evaluation"},
        {"prompt": "far too long a prompt for this limit"},
    ]
    found = encode_prompts(entries, Words(), 5, frozenset({"kept for evaluation"}))
    assert [(p.text, p.domain, p.source) for p in found] == [("one two", "a", "s")]


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
