"""Rehearsal counts what serving would have counted, and scores every answer before it teaches."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from drafts.config import DraftsConfig
from drafts.kinds.base import DraftRow, Guess, MemorySource
from drafts.kinds.ngram import NgramSource
from osd.learn.config import LearnConfig
from osd.learn.pretrain_data import Answer
from osd.learn.rehearse import (
    Chains,
    Drafted,
    expert_table,
    head_chains,
    mean_accepted_length,
    memory_chains,
    memory_table,
    rehearse_memories,
    train_experts,
)
from osd.learn.simulate import chain_counts
from tests.drafts.head_rig import IDS, matrices
from tests.osd.learn_rig import finished, tiny_head


def answer(tokens: Sequence[int], prompt: int = 2, label: str = "a") -> Answer:
    width = len(tokens) - 1
    ids = torch.tensor(tokens[prompt:])[:, None]
    return Answer(
        label, "", torch.tensor(tokens), prompt, torch.zeros(width, 4), ids, torch.zeros_like(ids).half()
    )


class Counting(MemorySource):
    """Guesses that tokens go up by one, which is wrong where the text turns back."""

    name = "counting"

    def guesses(self, row: DraftRow, path: Sequence[int]) -> list[Guess]:
        text = [*row.tokens, *path]
        return [(text[-1] + 1, 0.9)]


def test_chains_are_counted_pass_by_pass() -> None:
    found = memory_chains(Counting(), "a", [0, 0, 10, 11, 12, 13, 3, 4], 2, depth=2)
    assert (found.tokens, found.passes) == (5, 3)
    assert found.lengths == {2: 3}
    assert found.ask_ms > 0.0


def test_counts_by_flags_are_those_by_text() -> None:
    right = torch.tensor([[False, True, True, False, True], [False, True, True, False, False]])
    assert chain_counts(right, 2) == (4, 2)
    assert chain_counts(right[:, :1], 2) == (0, 0)


def test_a_silent_draft_is_plain_decoding() -> None:
    found = memory_chains(NgramSource(), "base", [1, 2, 3, 4, 5, 6], 2, depth=4)
    assert found.lengths == {0: 3}
    assert mean_accepted_length([found]) == 1.0
    assert mean_accepted_length([Chains()]) == 1.0


def test_answers_are_scored_before_they_teach_and_memories_specialise() -> None:
    one, two = [1, 2, *range(10, 22)], [1, 2, *range(60, 72)]
    drafted = Drafted([answer(t) for t in (one, two, one, two)], ["x", "y", "x", "y"], ["base", "x", "y"])
    found = rehearse_memories(drafted, DraftsConfig(), depth=4)
    passes = {name: [item.passes for item in chains] for name, chains in found.items()}
    assert passes["own_memory"][:2] == [11, 11]
    assert passes["own_memory"][2] == passes["own_memory"][3] < 11
    assert passes["other_memory"][2] == 11
    assert passes["lookup"] == [11] * 4
    assert passes["shared_memory"][3] < 11


def test_one_domain_has_no_other_memory() -> None:
    drafted = Drafted([answer([1, 2, 3, 4])], ["x"], ["base", "x"])
    assert "other_memory" not in rehearse_memories(drafted, DraftsConfig(), depth=2)


def test_a_memory_alone_knows_nothing_of_the_request() -> None:
    source = NgramSource()
    source.add_domain("x")
    source.teach("x", [1, 2, *range(10, 22)], 2)
    repeating = answer([1, 2, *[5, 6, 7] * 4], label="r")
    known = answer([1, 2, *range(10, 22)], label="k")
    table = memory_table(source, ["base", "x"], [repeating, known], depth=4)
    assert table["base"] == {"k": 1.0, "r": 1.0}
    assert table["x"]["r"] == 1.0
    assert table["x"]["k"] > 2.0


@pytest.fixture(scope="module")
def learned() -> list[Answer]:
    found = []
    for seed in range(24):
        record = finished(seed)
        tokens = [*record.request.prompt_ids, *record.output_ids]
        assert record.evidence is not None
        assert record.features is not None
        evidence = record.evidence.top_ids.int(), record.evidence.top_logprobs
        found.append(Answer("math", "", torch.tensor(tokens), 5, record.features, *evidence))
    return found


def test_experts_learn_from_recorded_answers(learned: list[Answer]) -> None:
    head = tiny_head("math")
    guard = {"min_positions": 16}
    config = LearnConfig.model_validate({"rate": 0.02, "update_every": 4, "passes": 20.0, "guard": guard})
    experts = train_experts(head, config, learned[:18], ["math"] * 18)
    embedding, output = matrices()
    late = learned[18:]
    plain = head_chains(head.trunk, embedding, output[IDS], late, 3)
    assert [max(item.lengths) for chains in plain for item in chains[:1]] == [1, 2, 3]
    table = expert_table(head.trunk, embedding, output[IDS], experts, late, 3)
    assert table["math"]["math"] > mean_accepted_length(plain[-1]) + 0.1
