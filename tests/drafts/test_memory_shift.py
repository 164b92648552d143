"""A domain's memory follows its traffic, stays within its bytes, and says how far its guesses reach."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drafts.config import NgramConfig
from drafts.kinds.base import DraftRow
from drafts.kinds.ngram import NgramSource
from drafts.memory import Memory

QUESTION = [1, 2, 3]


def memory(half_life: int) -> NgramSource:
    return NgramSource(NgramConfig(half_life_tokens=half_life, own_weight=0.0))


def next_guess(source: NgramSource) -> int:
    return source.guesses(DraftRow("r", "base", list(QUESTION), len(QUESTION)), [])[0][0]


@settings(max_examples=40, deadline=None)
@given(past=st.integers(1, 400), length=st.integers(1, 20), half_life=st.integers(100, 2000))
def test_after_a_shift_the_old_continuation_is_overtaken_within_a_half_life(past, length, half_life):
    """However long the old answer was given: what is older than a half-life weighs at most half."""
    source = memory(half_life)
    old, new = [10, *range(100, 100 + length)], [20, *range(200, 200 + length)]
    for _ in range(past):
        source.teach("base", [*QUESTION, *old], len(QUESTION))
    assert next_guess(source) == 10
    for _ in range(half_life // len(new) + 2):
        source.teach("base", [*QUESTION, *new], len(QUESTION))
    assert next_guess(source) == 20


def test_without_decay_the_old_continuation_would_stay():
    source = memory(1_000_000_000)
    for _ in range(400):
        source.teach("base", [*QUESTION, 10], len(QUESTION))
    for _ in range(300):
        source.teach("base", [*QUESTION, 20], len(QUESTION))
    assert next_guess(source) == 10


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1000), limit=st.integers(64 * 1024, 256 * 1024), answers=st.integers(1, 12))
def test_bytes_are_bounded_whatever_is_learned_and_loaded(seed, limit, answers):
    rng = random.Random(seed)
    made = Memory(max_order=4, max_bytes=limit, max_followers=8, half_life_tokens=1000)
    for _ in range(answers):
        made.learn([rng.randrange(5000) for _ in range(400)], 20)
        assert made.bytes <= limit
        assert made.followers == sum(map(len, made.contexts.values()))
    tighter = Memory(max_order=4, max_bytes=limit // 2, max_followers=8, half_life_tokens=1000)
    tighter.load_state(made.state())
    assert tighter.bytes <= limit // 2


@pytest.mark.parametrize("repeats", [0.7, 0.9])
def test_the_sum_of_reach_tells_how_far_a_chain_gets(repeats):
    """Within a quarter; where text hardly repeats, what was seen once is believed too much (combiner)."""
    rng = random.Random(1)

    def walk(length: int) -> list[int]:
        text = [0]
        while len(text) < length:
            text.append((text[-1] * 7 + 1) % 53 if rng.random() < repeats else rng.randrange(53))
        return text

    source = memory(50_000)
    for _ in range(300):
        source.teach("base", walk(60), 1)
    promised, got = 0.0, 0
    for _ in range(400):
        text = walk(30)
        chain = source.propose([DraftRow("r", "base", text[:20], 1)], [4])[0]
        promised += sum(chain.reach)
        got += len(chain.path(text[20:]))
    assert abs(promised - got) < 0.25 * got
