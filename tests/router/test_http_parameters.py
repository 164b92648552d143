from __future__ import annotations

import re
from typing import Any

import pytest
from starlette.testclient import TestClient

from drafts.errors import InvalidValueError
from osd.types import ResponseFormat
from router.app.http import create_app
from tests.router.fake_engine import FakeEngine
from tests.router.http_rig import CHAT, TEXT, body, error_of, streamed, whole

SCHEMA = {"type": "object", "properties": {"answer": {"type": "integer"}}}


def structured(**wrapper: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, **wrapper}}


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{"type": "function"}]),
        ("functions", [{"name": "f"}]),
        ("modalities", ["audio"]),
        ("service_tier", "flex"),
        ("suffix", "x"),
        ("echo", True),
        ("parallel_tool_calls", 1),
        ("temperatur", 0.5),
    ],
)
def test_what_the_server_cannot_do_is_refused_by_name(
    client: TestClient, path: str, field: str, value: Any
) -> None:
    error = error_of(client.post(path, json=body(path, **{field: value})))
    assert error["code"] == "unsupported_parameter"
    assert error["param"] == field


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_harmless_fields_and_values_that_mean_off_are_accepted(
    client: TestClient, engine: FakeEngine, path: str
) -> None:
    extra = {"user": "me", "metadata": {"a": "b"}, "n": 1, "best_of": 1, "logit_bias": None, "tools": []}
    extra |= {"response_format": {"type": "text"}, "presence_penalty": 0, "frequency_penalty": 0.0}
    extra |= {"logprobs": False if path == CHAT else None, "top_logprobs": 0, "stop": None}
    assert whole(client, path, **extra)[1] == "stop"
    assert not {"logprobs", "response_format", "stop", "choice"} & set(engine.submitted[-1])


RANGES = [
    ("temperature", -1, "in 0..10"),
    ("temperature", 11, "in 0..10"),
    ("temperature", "warm", "a number in 0..10"),
    ("temperature", True, "a number in 0..10"),
    ("top_p", 0, "above 0 and at most 1"),
    ("top_p", 1.5, "above 0 and at most 1"),
    ("min_p", -0.1, "in 0..1"),
    ("repetition_penalty", 0, "above 0 and at most 10"),
    ("repetition_penalty", -1.0, "above 0 and at most 10"),
    ("presence_penalty", 2.5, "in -2..2"),
    ("frequency_penalty", -3, "in -2..2"),
    ("frequency_penalty", "0.5", "in -2..2"),
    ("max_tokens", 0, "in 1..2147483647"),
    ("max_tokens", 5.5, "a whole number"),
    ("n", 0, "in 1..16"),
    ("n", 17, "in 1..16"),
    ("k", 65, "in 0..64"),
    ("timeout", 0, "above 0 and at most 86400"),
    ("stop", 5, "a string or a list of strings"),
    ("stop", "", "none of them empty"),
    ("stop", ["a"] * 17, "up to 16 strings"),
    ("stop_token_ids", ["a"], "a list of whole numbers"),
    ("sources", "lookup", "a list of strings"),
    ("seed", "x", "a whole number in -9223372036854775808..18446744073709551615"),
    ("stream", "yes", "true or false"),
    ("logit_bias", [5], "an object"),
]


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(("field", "value", "allowed"), RANGES)
def test_values_out_of_bounds_are_refused_with_field_value_and_whole_range(
    client: TestClient, path: str, field: str, value: Any, allowed: str
) -> None:
    error = error_of(client.post(path, json=body(path, **{field: value})))
    assert error["type"] == "invalid_request_error"
    assert error["param"].split(".")[0] == field
    assert error["message"].startswith(field)
    assert allowed in error["message"]
    shown = value[0] if field == "stop_token_ids" else value
    assert repr(shown)[:60] in error["message"]


@pytest.mark.parametrize(
    ("path", "extra", "field", "words"),
    [
        (CHAT, {"top_logprobs": 3}, "top_logprobs", "logprobs: true"),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "in 0..20"),
        (CHAT, {"logprobs": 3}, "logprobs", "true or false"),
        (TEXT, {"logprobs": 21}, "logprobs", "in 0..20"),
        (TEXT, {"logprobs": True}, "logprobs", "a whole number in 0..20"),
        (TEXT, {"top_logprobs": 2}, "top_logprobs", "only 0"),
        (CHAT, {"stream_options": {"include_usage": True}}, "stream_options", "stream: true"),
        (CHAT, {"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "one of include_usage"),
        (CHAT, {"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens", "the same"),
        (CHAT, {"max_tokens": 5, "min_tokens": 6}, "min_tokens", "0..5"),
        (TEXT, {"max_tokens": None, "min_tokens": 17}, "min_tokens", "0..16"),
        (TEXT, {"n": 2, "best_of": 3}, "best_of", "the same as n (2)"),
        (CHAT, {"best_of": 3}, "best_of", "the same as n (1)"),
        (CHAT, {"logit_bias": {"x": 1}}, "logit_bias.x", "a token id"),
        (CHAT, {"logit_bias": {"-1": 1}}, "logit_bias.-1", "a token id"),
        (CHAT, {"logit_bias": {"9" * 5000: 1}}, "logit_bias." + "9" * 5000, "a token id"),
        (CHAT, {"logit_bias": {"5": 101}}, "logit_bias.5", "in -100..100"),
        (CHAT, {"logit_bias": {"5": -100, "05": 0}}, "logit_bias.05", "without leading zeros: '5'"),
        (CHAT, {"response_format": {"type": "xml"}}, "response_format.type", "one of text, json_object"),
        (CHAT, {"response_format": {}}, "response_format.type", "one of text"),
        (CHAT, {"response_format": {"type": "text", "x": 1}}, "response_format.x", "only type"),
        (CHAT, {"response_format": {"type": "json_schema"}}, "response_format.json_schema", "an object"),
        (CHAT, {"response_format": structured(schema=None)}, "response_format.json_schema.schema", "schema"),
        (CHAT, {"response_format": structured(name="")}, "response_format.json_schema.name", "1..64"),
        (CHAT, {"response_format": structured(strict=1)}, "response_format.json_schema.strict", "true or"),
        (CHAT, {"response_format": structured(), "ignore_eos": True}, "ignore_eos", "response_format"),
        (TEXT, {"prompt": []}, "prompt", "at least one prompt"),
        (TEXT, {"prompt": 5}, "prompt", "a string or a list of strings or a list of whole numbers"),
        (TEXT, {"prompt": ["a"] * 9, "n": 16}, "prompt", "up to 128"),
        (TEXT, {"prompt": None}, "prompt", "a string"),
    ],
)
def test_fields_that_do_not_go_together_are_refused_by_name(
    client: TestClient, engine: FakeEngine, path: str, extra: dict[str, Any], field: str, words: str
) -> None:
    error = error_of(client.post(path, json=body(path, **extra)))
    assert error["type"] == "invalid_request_error"
    assert error["param"] == field
    assert error["message"].startswith(field)
    assert words in error["message"]
    assert not engine.submitted


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("stream", [False, True])
def test_every_parameter_reaches_the_engine_as_sent(
    client: TestClient, engine: FakeEngine, path: str, stream: bool
) -> None:
    sent = {
        **{"temperature": 0.7, "top_p": 0.9, "top_k": 3, "min_p": 0.05, "seed": 5, "k": 2, "timeout": 9.5},
        **{"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": -0.5},
        **{"min_tokens": 2, "max_tokens": 9, "ignore_eos": True},
    }
    changed = {
        "logit_bias": {"5": -100, "7": 2.5},
        "stop": "zz",
        "stop_token_ids": [9],
        "sources": ["lookup"],
    }
    logprobs = {"logprobs": True, "top_logprobs": 4} if path == CHAT else {"logprobs": 4}
    request = body(path, store=False, stream=stream, **sent, **changed, **logprobs)
    assert client.post(path, json=request).status_code == 200
    seen = engine.submitted[-1]
    assert {name: seen[name] for name in sent} == sent
    assert seen["logit_bias"] == {5: -100, 7: 2.5}
    assert (seen["stop"], seen["stop_token_ids"], seen["sources"]) == (("zz",), (9,), ("lookup",))
    assert (seen["logprobs"], seen["store"], seen["template"]) == (4, False, path == CHAT)


def test_the_length_limit_has_two_names_and_a_default_of_its_own(
    client: TestClient, engine: FakeEngine
) -> None:
    for path, default in ((CHAT, 256), (TEXT, 16)):
        whole(client, path, max_tokens=None)
        whole(client, path, max_tokens=None, max_completion_tokens=7)
        whole(client, path, max_tokens=7, max_completion_tokens=7)
        assert [seen["max_tokens"] for seen in engine.submitted[-3:]] == [default, 7, 7]


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_structured_output_reaches_the_engine_in_each_of_its_kinds(
    client: TestClient, engine: FakeEngine, path: str
) -> None:
    assert whole(client, path, response_format={"type": "json_object"})[0] == '{"answer": 42}'
    assert engine.submitted[-1]["response_format"] == ResponseFormat(kind="json_object", json_schema=None)
    for extra in ({}, {"strict": True}, {"strict": False, "description": "x"}, {"strict": None}):
        assert whole(client, path, response_format=structured(**extra))[0] == '{"answer": 42}'
        seen = engine.submitted[-1]["response_format"]
        assert seen == ResponseFormat(kind="json_schema", json_schema=SCHEMA)


def test_a_time_limit_that_ends_an_answer_has_a_reason_of_its_own() -> None:
    client = TestClient(create_app(FakeEngine(delay=0.002)))
    long = {"ignore_eos": True, "max_tokens": 100_000, "timeout": 0.02}
    for path in (CHAT, TEXT):
        assert whole(client, path, **long)[1] == "timeout"
        assert streamed(client, path, **long)[1] == "timeout"
    assert 'finished_reason="timeout"} 4.0' in client.get("/metrics").text


def test_a_client_may_name_the_domain_by_field_or_header(client: TestClient) -> None:
    header = {"X-Polydraft-Domain": "code"}
    assert whole(client, CHAT, domain="code")[2]["polydraft"]["domain"] == "code"
    response = client.post(CHAT, json=body(CHAT), headers=header)
    assert response.json()["polydraft"]["domain"] == response.headers["X-Polydraft-Domain"] == "code"
    assert "math" in error_of(client.post(CHAT, json=body(CHAT, domain="math"), headers=header))["message"]
    unknown = error_of(client.post(CHAT, json=body(CHAT, domain="nope", stream=True)), 404)
    assert "base, code, math" in unknown["message"]


def test_python_callers_are_told_the_same_ranges(engine: FakeEngine) -> None:
    for field, value, allowed in (
        ("temperature", 11, "temperature: got 11; a number in 0..10"),
        ("top_p", 0, "top_p: got 0; a number above 0 and at most 1"),
        ("stop_token_ids", [-1], "stop_token_ids.0: got -1"),
        ("temperatur", 1, "one of temperature, top_p"),
        ("min_tokens", 300, "min_tokens: got 300; 300 exceeds max_tokens 256"),
    ):
        with pytest.raises(InvalidValueError, match=re.escape(allowed)):
            engine.submit("x", **{field: value})


def test_a_body_that_is_no_object_is_refused_as_such(client: TestClient) -> None:
    for content in ("[]", '"x"', "null", "5", ""):
        error = error_of(client.post(CHAT, content=content, headers={"content-type": "application/json"}))
        assert error["param"] is None
        assert "a JSON object" in error["message"]


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e400"])
def test_numbers_that_are_not_finite_are_refused(client: TestClient, number: str) -> None:
    names = ["temperature", "top_p", "min_p", "timeout"]
    for field in [*names, "presence_penalty", "frequency_penalty", "repetition_penalty"]:
        content = f'{{"prompt": "x", "{field}": {number}}}'
        headers = {"content-type": "application/json"}
        assert error_of(client.post(TEXT, content=content, headers=headers))["param"] == field
