"""The comparison's and the check's plain model, with a real (tiny) Hugging Face model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from osd.types import Assignment, FinishReason, Round
from router.app.arms import GenerateArm
from router.app.inflight import Served
from router.app.traffic import TrafficItem, parse_traffic
from router.app.verify_replay import verify
from router.bodies.api import Completion
from tests.router.fake_engine import EOS, VOCABULARY, FakeEngine

ITEMS = parse_traffic(['{"prompt": "one two"}', '{"prompt": "three"}', '{"prompt": "four, five"}'])


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=None,
        initializer_range=0.5,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def engine(model: Any) -> FakeEngine:
    engine = FakeEngine()
    engine.model = model
    return engine


def served(engine: FakeEngine, item: TrafficItem, answer: tuple[int, ...], max_tokens: int) -> Served:
    ended = answer[-1] == EOS
    completion = Completion(
        "r",
        "",
        answer,
        len(engine.prompt_ids(messages=item.messages)),
        FinishReason.STOP if ended else FinishReason.LENGTH,
        "base",
        Assignment(),
        (Round(0, 0, 0, len(answer), "none", 0),),
    )
    return Served(item, 0, completion)


def test_answers_of_generate_pass_the_check_and_changed_ones_fail(engine: FakeEngine) -> None:
    arm = GenerateArm(engine, max_tokens=12, temperature=0.0, seed=0)
    arm.warm_up()
    run = arm.run(ITEMS)
    assert set(run.answers) == set(run.each) == {0, 1, 2}
    good = [served(engine, item, run.answers[item.index], 12) for item in ITEMS]
    result = verify(engine, good, 3, 12)
    assert (result.checked, result.mismatched, result.ties) == (3, 0, 0)
    assert result.tokens == sum(len(answer) for answer in run.answers.values())
    changed = list(run.answers[1])
    changed[5] = changed[5] % (VOCABULARY - 2) + 1
    bad = [good[0], served(engine, ITEMS[1], tuple(changed), 12), good[2]]
    assert verify(engine, bad, 3, 12).mismatches[0]["position"] == 5
    assert engine.mode["learn"] is False


def test_a_stop_without_an_end_token_and_one_token_too_many_are_mismatches(engine: FakeEngine) -> None:
    answer = GenerateArm(engine, max_tokens=12, temperature=0.0, seed=0).run(ITEMS[:1]).answers[0]
    whole = served(engine, ITEMS[0], answer, 12)
    assert whole.completion is not None
    cut = replace(whole.completion, token_ids=answer[:4], finish_reason=FinishReason.STOP)
    assert verify(engine, [replace(whole, completion=cut)], 1, 12).mismatched == 1
    assert verify(engine, [whole], 1, 11).mismatched == 1


def test_sampled_generation_follows_its_seed(engine: FakeEngine) -> None:
    runs = [
        GenerateArm(engine, max_tokens=12, temperature=1.0, seed=seed).run(ITEMS).answers
        for seed in (1, 1, 2)
    ]
    assert runs[0] == runs[1] != runs[2]
