"""Every request parameter in the engine: the same at every place of a block as in plain decoding."""

import itertools
import math
from types import MappingProxyType, SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from drafts.errors import InvalidValueError
from drafts.mixture import Mixture
from osd.serve.logprobs import token_logprobs
from osd.types import FinishReason
from tests.osd.draft_rig import mixture
from tests.osd.engine_rig import (
    Branching,
    Client,
    Forced,
    LetterTokenizer,
    greedy,
    make_engine,
    prompts,
    target,
)
from tests.tiny import VOCAB

KINDS = ["lookup", "ngram", "eagle"]
FORMS = [(Forced, 4), (Branching, None)]


def with_ends(*ends):
    """The tiny target with other end tokens."""

    class Patched:
        eos_token_ids = frozenset(ends)

        def __getattr__(self, name):
            return getattr(target(), name)

    return Patched()


def ask(prompt, source=None, k=4, **sampling):
    """One request alone: its client, and the output."""
    client = Client(make_engine(source, fixed_k=k))
    client.submit("a", prompt, **sampling)
    return client, list(client.run()["a"])


def following(text, start=0, size=4):
    """Proposes the text's own next tokens from output position ``start`` on."""

    def script(row, limit):
        at = row.output_length
        return text[at : at + size] if at >= start else []

    return script


# --- A01, A03, A09: ends


@pytest.mark.parametrize(("form", "k"), FORMS)
@pytest.mark.parametrize("at", range(1, 6))
def test_a01_a_stop_token_on_every_chain_position_and_the_bonus_ends_the_answer(at, form, k):
    prompt = prompts(1, seed=20)[0]
    text = greedy(prompt, 24, stop=())
    index = next(i for i in range(5, 20) if text[i] not in text[:i])
    source = form(following(text, index - at + 1))
    sampling = {"stop_token_ids": (text[index],), "ignore_eos": True}
    client, got = ask(prompt, source, k, **sampling)
    assert got == text[: index + 1] == ask(prompt, **sampling)[1]
    outcome = client.outcomes["a"]
    assert outcome.record.finish is FinishReason.STOP
    assert len(outcome.record.output_ids) == index + 1
    assert client.texts["a"] == outcome.text
    assert chr(0x100 + text[index]) not in outcome.text
    sizes = [r.emitted for r in outcome.record.rounds]
    assert sizes[-1] == at if form is Forced else sizes[-1] > 0


@given(start=st.integers(0, 15), length=st.integers(1, 3), cuts=st.lists(st.integers(0, 8), min_size=1))
@settings(max_examples=8, deadline=None)
def test_a03_a04_a_stop_string_ends_tokens_text_and_logprobs_at_one_place_for_any_cuts(start, length, cuts):
    prompt = prompts(1, seed=24)[0]
    text = greedy(prompt, 24, stop=())
    visible = [at for at, token in enumerate(text) if token > 2]
    shown = "".join(chr(0x100 + text[at]) for at in visible)
    stop = shown[start : start + length]
    sizes = itertools.cycle(cuts)

    def script(row, limit):
        return text[row.output_length : row.output_length + next(sizes)]

    asked = {"stop": (stop,), "ignore_eos": True, "logprobs": 2, "max_tokens": 24}
    client, got = ask(prompt, Forced(script), 8, **asked)
    end = visible[shown.index(stop) + len(stop) - 1] + 1
    assert got == text[:end]
    outcome = client.outcomes["a"]
    assert outcome.text == client.texts["a"] == shown[: shown.index(stop)]
    assert [item.token_id for item in outcome.record.logprobs] == got
    assert client.logprobs["a"] == list(outcome.record.logprobs)


@pytest.mark.parametrize("source", KINDS)
@pytest.mark.parametrize("ends", [None, "list", "ignored"])
def test_a09_none_a_list_or_ignored_end_tokens(source, ends):
    prompt = prompts(1, seed=22)[0] * 3
    text = greedy(prompt, 40, stop=())
    chosen = [] if ends is None else [text[30], text[12], 2]
    model = with_ends(*chosen)
    stop = min(text.index(token) for token in chosen if token in text) + 1 if chosen else 40
    ignore = ends == "ignored"
    client = Client(make_engine(drafter=mixture((source,)), fixed_k=4, target=model))
    client.submit("a", prompt, max_tokens=40, ignore_eos=ignore)
    got = list(client.run()["a"])
    assert got == (text if ignore else text[:stop])
    assert client.outcomes["a"].record.finish is (
        FinishReason.LENGTH if ignore or not chosen else FinishReason.STOP
    )


@pytest.mark.parametrize("source", KINDS)
@pytest.mark.parametrize("limit", [1, 2, 3, 4, 5])
def test_a06_no_source_makes_an_answer_longer_than_allowed(source, limit):
    prompt = prompts(1, seed=23)[0] * 4
    text = greedy(prompt, 8, stop=())
    client = Client(make_engine(drafter=mixture((source,)), fixed_k=4))
    client.submit("before", [*prompt, *text], max_tokens=8, ignore_eos=True)
    client.run()
    client.submit("a", [*prompt, *text, *prompt], max_tokens=limit, ignore_eos=True)
    got = client.run()["a"]
    assert list(got) == greedy([*prompt, *text, *prompt], limit, stop=())
    record = client.outcomes["a"].record
    assert record.finish is FinishReason.LENGTH
    assert sum(r.proposed for r in record.rounds) <= max(limit - 2, 0) * limit
    if limit == 1:
        assert sum(r.proposed for r in record.rounds) == 0


# --- A16, A17: what changes the logits

PENALTIES = [
    {"frequency_penalty": 1.5},
    {"presence_penalty": 1.0},
    {"repetition_penalty": 1.3},
    {"min_tokens": 10},
    {"frequency_penalty": 1.5, "presence_penalty": 1.0, "repetition_penalty": 1.3, "min_tokens": 10},
    {"logit_bias": {5: 4.0, 6: -100.0}, "min_p": 0.1},
]


@pytest.mark.parametrize("temperature", [0.0, 1e-3, 0.9])
@pytest.mark.parametrize("penalty", PENALTIES)
def test_a17_penalised_answers_are_those_of_plain_decoding_token_by_token(penalty, temperature):
    """Forced chains and trees; one script repeats tokens, so that branches hold different counts."""
    prompt = [7, 8, 9] * 4
    sampling = {"temperature": temperature, "seed": 3, "max_tokens": 20, **penalty}
    _, expected = ask(prompt, **sampling)
    for form, k in FORMS:
        for wrong in (False, True):

            def script(row, limit, wrong=wrong):
                ahead = expected[row.output_length : row.output_length + 4]
                return [*ahead[:2], *ahead[:2]] if wrong else ahead

            client, got = ask(prompt, form(script), k, **sampling)
            assert got == expected
            if not wrong and len(expected) > 6:
                assert max(r.accepted for r in client.outcomes["a"].record.rounds) >= 2


@pytest.mark.parametrize("extra", [{}, {"ignore_eos": True}])
def test_a17_the_end_token_is_possible_at_exactly_the_token_after_min_tokens(extra):
    """The end token is the likeliest everywhere, and so is what drafts propose."""
    prompt = prompts(1, seed=25)[0]
    sampling = {"logit_bias": {2: 100.0}, "min_tokens": 10, "max_tokens": 14, **extra}
    for form, k in FORMS:
        _, got = ask(prompt, form(lambda row, limit: [2] * 4), k, **sampling)
        assert 2 not in got[:10]
        assert got[10:] == ([2] * 4 if extra else [2])


def test_a17_min_tokens_holds_back_stop_tokens_too():
    prompt = prompts(1, seed=26)[0]
    text = greedy(prompt, 3, stop=())
    _, got = ask(prompt, min_tokens=6, stop_token_ids=(text[0], text[1]), ignore_eos=True)
    assert not {text[0], text[1]} & set(got[:6])


@pytest.mark.parametrize(("form", "k"), FORMS)
def test_a16_a_forbidden_token_never_appears_though_every_draft_proposes_it(form, k):
    prompt = prompts(1, seed=27)[0]
    text = greedy(prompt, 24, stop=())
    banned = max(set(text), key=text.count)
    sampling = {"logit_bias": {banned: -100.0}, "ignore_eos": True}
    _, expected = ask(prompt, **sampling)
    _, got = ask(prompt, form(lambda row, limit: [banned] * 4), k, **sampling)
    assert got == expected
    assert banned not in got


def test_requests_that_change_the_logits_leave_their_neighbours_alone():
    asked = prompts(4, seed=28)
    client = Client(make_engine(Forced(lambda row, limit: row.tokens[:3])))
    for index, prompt in enumerate(asked):
        extra = [{}, PENALTIES[4], {"temperature": 1.0, "seed": 1, "logprobs": 1}, PENALTIES[5]][index]
        client.submit(str(index), prompt, **extra)
    got = client.run()
    assert list(got["0"]) == greedy(asked[0], 24)
    for index, extra in ((1, PENALTIES[4]), (2, {"temperature": 1.0, "seed": 1}), (3, PENALTIES[5])):
        assert list(got[str(index)]) == ask(asked[index], **extra)[1]


@pytest.mark.parametrize("sampling", [{"presence_penalty": 1.0}, {"temperature": 0.7, "min_p": 0.1}])
def test_a18_a_row_without_finite_logits_fails_alone_on_the_shaped_paths(sampling):
    class Broken:
        passes = 0

        def __getattr__(self, name):
            return getattr(target(), name)

        def forward(self, cache, rows):
            output = target().forward(cache, rows)
            self.passes += 1
            if self.passes == 6:
                logits = output.logits.clone()
                logits[output.offsets[1], 3] = math.nan
                output = type(output)(logits, output.offsets)
            return output

    asked = prompts(3, seed=41)
    client = Client(make_engine(target=Broken()))
    for index, prompt in enumerate(asked):
        client.submit(str(index), prompt, ignore_eos=True, seed=index, **sampling)
    got = client.run()
    assert client.outcomes["1"].record.finish is FinishReason.ERROR
    assert client.outcomes["1"].error.code == "target_numerics"
    for index in (0, 2):
        assert list(got[str(index)]) == ask(asked[index], ignore_eos=True, seed=index, **sampling)[1]


# --- A15: choices


def test_a15_choices_of_one_seed_differ_reproducibly_and_are_equal_when_greedy():
    prompt = prompts(1, seed=29)[0]

    def choices(**sampling):
        client = Client(make_engine())
        for choice in range(4):
            client.submit(str(choice), prompt, choice=choice, seed=42, ignore_eos=True, **sampling)
        return client.run()

    first = choices(temperature=1.0)
    assert first == choices(temperature=1.0)
    assert len(set(first.values())) == 4
    assert len(set(choices().values())) == 1
    assert ask(prompt, temperature=1.0, seed=42, ignore_eos=True)[1] == list(first["0"])


# --- log-probabilities


@pytest.mark.parametrize(("form", "k"), FORMS)
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "seed": 4, "top_k": 9, **PENALTIES[4]}])
def test_logprobs_are_the_targets_raw_distribution_at_every_kept_token(form, k, sampling):
    prompt = prompts(1, seed=32)[0]
    asked = {"logprobs": 3, "ignore_eos": True, **sampling}
    client, got = ask(prompt, **asked)
    plain = client.outcomes["a"].record.logprobs
    client, again = ask(prompt, form(following(got)), k, **asked)
    found = client.outcomes["a"].record.logprobs
    assert again == got == [item.token_id for item in found]
    assert client.logprobs["a"] == list(found)
    with torch.no_grad():
        logits = target().reference(torch.tensor([[*prompt, *got]])).logits[0, len(prompt) - 1 : -1]
    raw = logits.double().log_softmax(-1)
    for at, (item, other) in enumerate(zip(found, plain, strict=True)):
        assert item.logprob == pytest.approx(float(raw[at, got[at]]), abs=1e-4)
        assert item.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert [token for token, _ in item.top] == raw[at].topk(3).indices.tolist()
        assert [p for _, p in item.top] == pytest.approx(raw[at].topk(3).values.tolist(), abs=1e-4)


def test_logprobs_none_asks_for_nothing_and_zero_for_no_alternatives():
    prompt = prompts(1, seed=33)[0]
    client, _ = ask(prompt)
    assert client.outcomes["a"].record.logprobs is None
    client, got = ask(prompt, logprobs=0)
    found = client.outcomes["a"].record.logprobs
    assert len(found) == len(got)
    assert all(item.top == () for item in found)


def test_equal_alternatives_come_by_id_and_impossible_ones_not_at_all():
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0, 1.0, 1.0], [-math.inf, 0.0, *[-math.inf] * 4]])
    first, second = token_logprobs(logits, [0, 1], [4, 1], 4)
    assert [token for token, _ in first.top] == [1, 3, 2, 4]
    assert first.logprob == first.top[3][1] < first.top[0][1]
    assert (second.logprob, second.top) == (0.0, ((1, 0.0),))


# --- what a target cannot do is refused; sources of a request


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"logit_bias": {VOCAB: 1.0}}, f"logit_bias: got {VOCAB}; token ids 0..{VOCAB - 1}"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias: got -1"),
        ({"stop_token_ids": (5, 10**9)}, r"stop_token_ids\[1\]: got 1000000000"),
        ({"ignore_eos": True, "response_format": {"kind": "json_object"}}, "ignore_eos: got True"),
        ({"response_format": {"kind": "json_object"}}, "response_format: .*fast tokenizer"),
    ],
)
def test_what_the_target_cannot_do_ends_the_request_with_a_typed_error(sampling, message):
    client = Client(make_engine())
    client.submit("a", [5, 6], **sampling)
    client.submit("b", [5, 6])
    client.run()
    assert isinstance(client.outcomes["a"].error, InvalidValueError)
    with pytest.raises(InvalidValueError, match=message):
        raise client.outcomes["a"].error
    assert client.outcomes["b"].error is None


class Other(Forced):
    name = "other"


def test_a_request_may_restrict_its_sources_or_use_none():
    prompt = prompts(1, seed=34)[0]
    text = greedy(prompt, 24, stop=())
    said = SimpleNamespace(forced=0, other=0)

    def spoken(name):
        def script(row, limit):
            setattr(said, name, getattr(said, name) + 1)
            return text[row.output_length : row.output_length + 4]

        return script

    both = Mixture({"forced": Forced(spoken("forced")), "other": Other(spoken("other"))})
    for sources, expected in ((None, {"forced+other"}), (("other",), {"other"}), ((), {"none"})):
        said.forced = said.other = 0
        client = Client(make_engine(drafter=both, fixed_k=4))
        client.submit("a", prompt, sources=sources, ignore_eos=True)
        assert list(client.run()["a"]) == text
        used = {r.source for r in client.outcomes["a"].record.rounds[1:] if r.proposed or sources == ()}
        assert used == expected
        assert bool(said.forced) == (sources is None)
        assert bool(said.other) == (sources != ())


@pytest.mark.parametrize(("form", "k"), [(None, 0), *FORMS])
def test_a_special_tokens_text_among_the_stop_strings_stops_at_that_token(form, k):
    prompt = prompts(1)[0]
    plain = greedy(prompt, 24, stop=())
    at = next(at for at in range(5, 24) if plain[at] not in plain[:at])

    class Named(LetterTokenizer):
        added_tokens_decoder = MappingProxyType(
            {
                plain[at]: AddedToken("<|turn|>", special=True),
                plain[at - 1]: AddedToken("<|plain|>", special=False),
                VOCAB: AddedToken("<|unused|>", special=True),
            }
        )

    source = None if form is None else form(lambda row, limit: plain[row.output_length :][:limit])
    client = Client(make_engine(source, fixed_k=k, tokenizer=Named()))
    stops = ["<|plain|>", "<|unused|>", "<|turn|>"]
    client.submit("named", prompt, ignore_eos=True, stop=stops, min_tokens=3)
    client.submit("other", prompt, ignore_eos=True, stop=stops[:2], min_tokens=3)
    answers = client.run()
    assert (answers["named"], answers["other"]) == (tuple(plain[: at + 1]), tuple(plain))
    record = client.outcomes["named"].record
    assert record.finish is FinishReason.STOP
    assert client.texts["named"] == LetterTokenizer().decode(plain[:at])
