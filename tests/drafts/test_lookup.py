from __future__ import annotations

import random

import pytest

from drafts.config import LookupConfig
from drafts.kinds.base import DraftRow
from drafts.kinds.lookup import LookupSource, SuffixIndex
from drafts.proposal import EMPTY


def row(tokens: list[int], prompt_length: int = 1) -> DraftRow:
    return DraftRow("r", "base", tokens, prompt_length)


def propose(tokens: list[int], limit: int = 4, **config: int) -> tuple[int, ...]:
    return LookupSource(LookupConfig(**config)).propose([row(tokens)], [limit])[0].tokens


def brute_force(tokens: list[int], min_match: int, max_match: int) -> tuple[int, int]:
    """Longest earlier match of the suffix, most recent among equals, by trying every position."""
    best = (0, 0)
    for at in range(len(tokens) - 1, 0, -1):
        length = 0
        while length < min(max_match, at) and tokens[at - 1 - length] == tokens[-1 - length]:
            length += 1
        if length >= min_match and length > best[1]:
            best = (at, length)
    return best


def test_it_continues_the_longest_match() -> None:
    assert propose([1, 2, 3, 7, 9, 3, 8, 1, 2, 3], limit=2) == (7, 9)


def test_the_most_recent_of_equal_matches_wins() -> None:
    assert propose([5, 3, 7, 0, 4, 3, 8, 0, 6, 3], limit=1) == (8,)


def test_a_text_that_repeats_goes_on_repeating() -> None:
    assert propose([9, 1, 2, 1, 2], limit=5) == (1, 2, 1, 2, 1)
    assert propose([4, 4], limit=3) == (4, 4, 4)


@pytest.mark.parametrize("tokens", [[], [1], [1, 2, 3]])
def test_without_a_match_it_is_silent(tokens: list[int]) -> None:
    assert LookupSource().propose([row(tokens)], [4]) == [EMPTY]


def test_matches_below_min_match_do_not_propose() -> None:
    tokens = [1, 2, 3, 9, 2, 3]
    assert propose(tokens, limit=1, min_match=2) == (9,)
    assert propose(tokens, limit=1, min_match=3) == ()


@pytest.mark.parametrize(("min_match", "max_match"), [(1, 16), (1, 1), (2, 16), (3, 5)])
def test_every_match_is_the_one_that_trying_all_positions_finds(min_match: int, max_match: int) -> None:
    """Texts of three symbols, indexed in random portions; deterministic by seed."""
    rng = random.Random(min_match * 100 + max_match)
    for _ in range(40):
        tokens: list[int] = []
        index = SuffixIndex(min_match, max_match, candidates=256)
        for _ in range(12):
            tokens += [rng.randrange(3) for _ in range(rng.randrange(1, 6))]
            index.extend(tokens)
            assert len(index) == len(tokens)
            at, length = index.longest(tokens)
            expected = brute_force(tokens, min_match, max_match)
            assert (at, length) == expected


def test_confidence_grows_with_the_match_and_with_depth() -> None:
    source = LookupSource()
    short = source.propose([row([1, 2, 3, 9, 5, 3])], [3])[0].confidence
    long = source.propose([row([1, 2, 3, 9, 5, 1, 2, 3])], [3])[0].confidence
    assert long[0] > short[0]
    assert list(short) == sorted(short)
    assert all(0 < c < 1 for c in short + long)


def test_a_row_is_indexed_once_and_then_only_its_new_tokens() -> None:
    source, item = LookupSource(), row([1, 2, 3, 1, 2])
    source.propose([item], [2])
    index = item.scratch["lookup"]
    item.tokens += [3, 1]
    source.propose([item], [2])
    assert item.scratch["lookup"] is index
    assert len(index) == 7


def test_a06_a_match_at_the_end_never_exceeds_the_limit() -> None:
    for limit in range(6):
        assert len(propose([7, 7, 7, 7], limit=limit)) == limit
