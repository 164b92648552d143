import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drafts.errors import InvalidValueError
from osd.serve.stopping import StopRule, StopStrings
from osd.types import FinishReason, SamplingParams

VOCAB = ["a", "b", "ab", "ba", " ", "aab", "", "b a", "<end>", "c"]
END = 8


class Table:
    """Text of a token by table."""

    def push(self, token):
        return VOCAB[token]

    def flush(self):
        return ""


def run(blocks, params, eos=(END,)):
    rule = StopRule(params, eos, Table())
    kept, text, finish = [], "", None
    for block in blocks:
        push = rule.accept(block)
        assert push.kept <= len(block)
        assert finish is None or push.kept == 0
        kept += block[: push.kept]
        text += push.delta
        finish = push.finish
    return kept, text + rule.close(), finish


def plain(tokens, params, eos=(END,)):
    """The rule written over whole texts: the shortest prefix of the tokens that ends the output."""
    for n in range(1, len(tokens) + 1):
        last = tokens[n - 1]
        if (last in eos and not params.ignore_eos) or last in params.stop_token_ids:
            return tokens[:n], "".join(VOCAB[t] for t in tokens[: n - 1]), FinishReason.STOP
        text = "".join(VOCAB[t] for t in tokens[:n])
        ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in params.stop if stop in text]
        if ends:
            return tokens[:n], text[: min(ends)[1]], FinishReason.STOP
        if n == params.max_tokens:
            return tokens[:n], text, FinishReason.LENGTH
    return tokens, "".join(VOCAB[t] for t in tokens), None


def cut(tokens, sizes):
    blocks, at = [], 0
    for size in sizes:
        blocks.append(tokens[at : at + size])
        at += size
    return [*blocks, tokens[at:]]


@given(
    tokens=st.lists(st.integers(0, len(VOCAB) - 1), max_size=40),
    stops=st.lists(st.text("ab c", min_size=1, max_size=7), max_size=3),
    sizes=st.lists(st.integers(1, 16), max_size=40),
    max_tokens=st.integers(1, 45),
    ignore_eos=st.booleans(),
    stop_token_ids=st.lists(st.integers(0, len(VOCAB) - 1), max_size=2),
)
@settings(max_examples=500, deadline=None)
def test_a04_the_stop_is_the_same_for_every_way_of_cutting_blocks(
    tokens, stops, sizes, max_tokens, ignore_eos, stop_token_ids
):
    params = SamplingParams(
        stop=tuple(stops), max_tokens=max_tokens, ignore_eos=ignore_eos, stop_token_ids=tuple(stop_token_ids)
    )
    expected = plain(tokens, params)
    assert run([[token] for token in tokens], params) == expected
    assert run(cut(tokens, sizes), params) == expected


@pytest.mark.parametrize("place", range(5))
def test_a01_an_end_token_ends_the_output_at_every_place_of_a_block(place):
    tokens = [0, 1, 0, END, 1, 0, 1, 0]
    blocks = cut(tokens, [3 - place, 5]) if place <= 3 else cut(tokens, [4, 4])
    assert run(blocks, SamplingParams(max_tokens=50)) == ([0, 1, 0, END], "aba", FinishReason.STOP)


@pytest.mark.parametrize("max_tokens", range(1, 8))
def test_a02_a_stop_wins_over_the_length_limit_it_shares_a_block_with(max_tokens):
    kept, _, finish = run([[0, 1, END, 0, 1, 0]], SamplingParams(max_tokens=max_tokens))
    if max_tokens <= 2:
        assert (kept, finish) == ([0, 1, END][:max_tokens], FinishReason.LENGTH)
    else:
        assert (kept, finish) == ([0, 1, END], FinishReason.STOP)


def test_a02_a_stop_string_wins_over_the_limit_on_the_same_token():
    assert run([[0, 1, 2]], SamplingParams(max_tokens=2, stop=("ab",))) == ([0, 1], "", FinishReason.STOP)


def test_a03_the_token_that_completes_a_stop_string_is_kept_and_none_after_it():
    kept, text, finish = run([[0, 4, 7, 0, 0]], SamplingParams(stop=(" b",)))
    assert (kept, text, finish) == ([0, 4, 7], "a", FinishReason.STOP)
    assert "".join(VOCAB[t] for t in kept).startswith(text + " b")


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4, 5])
def test_a06_never_more_tokens_than_allowed(max_tokens):
    kept, _, finish = run([[0, 1, 0, 1, 0]] * 3, SamplingParams(max_tokens=max_tokens))
    assert (len(kept), finish) == (max_tokens, FinishReason.LENGTH)


@pytest.mark.parametrize("eos", [None, (), [END], (3, END), {END}])
def test_a09_no_end_token_one_or_a_list(eos):
    kept, _, finish = run([[0, 3, END, 0]], SamplingParams(max_tokens=4), eos)
    first = next((i for i, token in enumerate([0, 3, END, 0]) if token in (eos or ())), None)
    expected = (4, FinishReason.LENGTH) if first is None else (first + 1, FinishReason.STOP)
    assert (len(kept), finish) == expected


@pytest.mark.parametrize("place", range(5))
@pytest.mark.parametrize("ignore_eos", [False, True])
def test_a01_a_stop_token_ends_the_output_as_an_end_token_does_also_where_those_are_ignored(
    place, ignore_eos
):
    """An ordinary token with a text: it is counted and not shown."""
    tokens = [0, 1, 0, 9, 1, 0, 1, 0]
    blocks = cut(tokens, [3 - place, 5]) if place <= 3 else cut(tokens, [4, 4])
    params = SamplingParams(max_tokens=50, stop_token_ids=(9, 5), ignore_eos=ignore_eos)
    assert run(blocks, params) == ([0, 1, 0, 9], "aba", FinishReason.STOP)


def test_a09_ignore_eos_runs_to_the_limit():
    kept, _, finish = run([[0, END, END, 1]], SamplingParams(max_tokens=4, ignore_eos=True))
    assert (len(kept), finish) == (4, FinishReason.LENGTH)


@given(text=st.text("ab", max_size=30), stop=st.text("ab", min_size=1, max_size=5))
@settings(max_examples=300, deadline=None)
def test_b04_nothing_shown_can_still_become_part_of_a_stop_string(text, stop):
    """And not more is held back than may: the held tail is exactly the longest that begins the stop."""
    stops = StopStrings((stop,))
    shown = ""
    for n, char in enumerate(text, 1):
        shown += stops.feed(char)
        if stops.matched:
            assert shown == text[: text.index(stop)]
            return
        tail = max(size for size in range(len(stop)) if text[:n].endswith(stop[:size]))
        assert shown == text[: n - tail]
    assert shown + stops.flush() == text


def test_b04_a_stop_that_never_completes_is_shown_at_the_end():
    rule = StopRule(SamplingParams(stop=("abc",), max_tokens=2), (), Table())
    assert rule.accept([0]).delta == ""
    assert rule.accept([1]) == (1, "ab", FinishReason.LENGTH)
    assert rule.close() == ""


def test_an_empty_stop_string_is_refused():
    with pytest.raises(InvalidValueError, match=r"stop\[1\].*at least one character"):
        StopStrings(("x", ""))
