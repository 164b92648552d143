"""Parameters of a request through the facade: refused by name at submission, or honoured to the answer."""

import json
from typing import Any

import pytest

from drafts.errors import InvalidValueError, UnknownNameError
from osd.types import FinishReason
from tests.router.tiny_engine import tiny_engine


@pytest.fixture(scope="module")
def engine():
    with tiny_engine() as made:
        yield made


@pytest.mark.parametrize(
    ("sampling", "field"),
    [
        ({"logit_bias": {259: 1.0}}, "logit_bias"),
        ({"stop_token_ids": (259,)}, "stop_token_ids[0]"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"repetition_penalty": -1.0}, "repetition_penalty"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"response_format": {"kind": "json_schema", "json_schema": {"type": "no"}}}, "response_format"),
        ({"response_format": {"kind": "json_schema"}}, "response_format"),
        ({"response_format": {"kind": "json_object"}, "ignore_eos": True}, "ignore_eos"),
        ({"sources": ("lookup", "oracle")}, "sources"),
    ],
)
def test_a17_a20_impossible_parameters_are_refused_at_submission(engine, sampling: dict[str, Any], field):
    with pytest.raises(InvalidValueError) as caught:
        engine.submit("boat", **sampling)
    assert caught.value.field == field
    assert 400 <= caught.value.status < 500


def test_an_unknown_source_lists_the_known_ones(engine):
    with pytest.raises(UnknownNameError, match="known: lookup, ngram"):
        engine.submit("boat", sources=("eagle",))


def test_a20_json_comes_out_whole_streamed_and_not(engine):
    schema = {"type": "object", "properties": {"a": {"enum": ["x", 1]}}, "required": ["a"]}
    schema["additionalProperties"] = False
    wanted = {"response_format": {"kind": "json_schema", "json_schema": schema}, "max_tokens": 100}
    whole = engine.generate("boat", **wanted)
    assert whole.finish_reason is FinishReason.STOP
    assert json.loads(whole.text)["a"] in ("x", 1)
    assert "".join(piece.text for piece in engine.submit("boat", **wanted).stream()) == whole.text


def test_a03_deltas_hold_as_many_logprobs_as_tokens_and_add_up_to_the_completions(engine):
    pieces = list(engine.submit("tree leaf", logprobs=2, max_tokens=20).stream())
    assert all(len(piece.logprobs) == len(piece.token_ids) for piece in pieces)
    done = pieces[-1].completion
    assert tuple(item for piece in pieces for item in piece.logprobs) == done.logprobs
    assert [item.token_id for item in done.logprobs] == list(done.token_ids)
    assert all(len(item.top) == 2 and item.logprob <= item.top[0][1] <= 0 for item in done.logprobs)
    assert engine.generate("tree leaf", max_tokens=3).logprobs is None


def test_sources_of_a_request_propose_alone_or_not_at_all(engine):
    prompt = "ha ha ha ha ha ha ha ha"
    both = engine.generate(prompt, max_tokens=40)
    only = engine.generate(prompt, max_tokens=40, sources=("lookup",))
    none = engine.generate(prompt, max_tokens=40, sources=())
    assert both.token_ids == only.token_ids == none.token_ids
    assert {r.source for r in only.rounds} <= {"prefill", "lookup", "none"}
    assert none.proposed == 0
