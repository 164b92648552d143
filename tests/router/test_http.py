from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from drafts.errors import BusyError, PolydraftError
from router.app.deferred import DeferredEngine
from router.app.http import create_app
from router.config import ServerConfig
from tests.router.fake_engine import FakeEngine, default_answer
from tests.router.serving import live_server, wait_until

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def client(engine: FakeEngine) -> TestClient:
    return TestClient(create_app(engine), raise_server_exceptions=False)


def body(path: str, prompt: str = "a math question", **extra: Any) -> dict[str, Any]:
    content = {"messages": [{"role": "user", "content": prompt}]} if path == CHAT else {"prompt": prompt}
    return {"model": "fake-model", "max_tokens": 500, "temperature": 0, **content, **extra}


def events(response: Any) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def text_of(choice: dict[str, Any]) -> str:
    for key in ("message", "delta"):
        if key in choice:
            return choice[key].get("content") or ""
    return choice["text"]


def streamed(client: TestClient, path: str, **extra: Any) -> tuple[str, str, list[dict[str, Any]]]:
    chunks = events(client.post(path, json=body(path, stream=True, **extra)))
    choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    assert all(choice["finish_reason"] is None for choice in choices[:-1])
    return "".join(map(text_of, choices)), choices[-1]["finish_reason"], chunks


def whole(client: TestClient, path: str, **extra: Any) -> tuple[str, str, dict[str, Any]]:
    response = client.post(path, json=body(path, **extra))
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    return text_of(choice), choice["finish_reason"], response.json()


def error_of(response: Any, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"].startswith("application/json")
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_b01_streamed_text_equals_the_whole_answer_byte_for_byte(client: TestClient, path: str) -> None:
    plain, _, _ = whole(client, path)
    pieces, _, _ = streamed(client, path)
    assert pieces == plain == default_answer("a math question")
    assert "🙂 漢字" in plain
    assert "�" not in plain
    emoji = len(plain.encode()[: plain.encode().index("🙂".encode())])
    for limit in [*range(1, 9), *range(emoji, emoji + 5)]:
        cut, _, _ = whole(client, path, max_tokens=limit)
        assert streamed(client, path, max_tokens=limit)[0] == cut
        assert plain.startswith(cut)


def test_b02_usage_comes_once_in_the_last_chunk_and_only_when_asked_for(client: TestClient) -> None:
    _, _, chunks = streamed(client, CHAT, stream_options={"include_usage": True})
    _, _, answer = whole(client, CHAT)
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == answer["usage"]
    assert all("usage" not in chunk for chunk in streamed(client, CHAT)[2])


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_b04_a_stop_string_across_tokens_never_reaches_the_client(client: TestClient, path: str) -> None:
    text = default_answer("a math question")
    for stop in (" is ün", "question'", "🙂 漢"):
        expected = text[: text.index(stop)]
        assert whole(client, path, stop=stop)[:2] == (expected, "stop")
        assert streamed(client, path, stop=[stop])[:2] == (expected, "stop")
    assert streamed(client, path, stop=["漢字.x"])[0] == text


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_b10_finish_reason_is_the_generators_on_every_path(client: TestClient, path: str) -> None:
    for k in (0, 4):
        for extra, reason in (({}, "stop"), ({"stop": "is"}, "stop"), ({"max_tokens": 2}, "length")):
            assert whole(client, path, k=k, **extra)[1] == reason
            assert streamed(client, path, k=k, **extra)[1] == reason


def test_b05_a_client_that_hangs_up_frees_its_slot_streaming_or_not() -> None:
    engine = FakeEngine(delay=0.01, slots=2)
    long = body(CHAT, max_tokens=100_000, ignore_eos=True)
    with live_server(engine) as url, httpx.Client(base_url=url, timeout=20) as client:
        for _ in range(10):
            with client.stream("POST", CHAT, json={**long, "stream": True}) as response:
                assert next(response.iter_lines()).startswith("data: ")
            wait_until(lambda: engine.running == 0)
        for path in (CHAT, TEXT):
            with pytest.raises(httpx.ReadTimeout):
                client.post(path, json=body(path, max_tokens=100_000, ignore_eos=True), timeout=0.3)
            wait_until(lambda: engine.running == 0)
        assert client.post(CHAT, json=body(CHAT)).status_code == 200
        assert "polydraft:num_requests_in_flight 0.0" in client.get("/metrics").text


def test_b05_a_client_that_leaves_before_the_first_byte_is_noticed() -> None:
    engine = FakeEngine(delay=0.01, slots=1)
    with live_server(engine) as url, httpx.Client(base_url=url, timeout=20) as client:
        long = body(CHAT, max_tokens=100_000, ignore_eos=True, stream=True)
        with client.stream("POST", CHAT, json=long) as holder:
            next(holder.iter_lines())
            with client.stream("POST", CHAT, json=long):
                pass
        wait_until(lambda: engine.running == 0)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("messages", [[], None, "hello", [3], [{"role": "king", "content": "x"}]])
def test_b06_messages_that_are_no_conversation_get_a_json_error(
    client: TestClient, messages: Any, stream: bool
) -> None:
    assert error_of(client.post(CHAT, json={"messages": messages, "stream": stream}))["code"].startswith(
        "invalid"
    )


def test_b06_missing_messages_are_an_error_and_system_only_is_answered(client: TestClient) -> None:
    assert error_of(client.post(CHAT, json={"stream": True}))["param"] == "messages"
    for role in ("system", "assistant", "developer"):
        response = client.post(
            CHAT, json={"messages": [{"role": role, "content": "be kind"}], "temperature": 0}
        )
        assert response.status_code == 200


def test_b07_an_assistant_turn_of_tool_calls_becomes_an_empty_string(
    client: TestClient, engine: FakeEngine
) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    history = [
        {"role": "user", "content": "add"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "4"},
        {"role": "user", "content": "and now?"},
    ]
    assert client.post(CHAT, json={"messages": history}).status_code == 200
    seen = engine.submitted[-1]
    assert seen["text"] == "add\n\n4\nand now?"
    assert seen["messages"][1]["content"] == ""
    assert seen["messages"][1]["tool_calls"] == [call]
    history[3]["content"] = None
    assert error_of(client.post(CHAT, json={"messages": history}))["param"] == "messages[3].content"


def test_b08_text_parts_are_the_string_they_spell_and_reach_the_same_domain(
    client: TestClient, engine: FakeEngine
) -> None:
    parts = [{"type": "text", "text": "some ma"}, {"type": "text", "text": "th"}]
    answers = [
        client.post(CHAT, json={"messages": [{"role": "user", "content": content}], "temperature": 0}).json()
        for content in ("some math", parts)
    ]
    assert engine.submitted[0]["messages"] == engine.submitted[1]["messages"]
    assert [answer["polydraft"]["domain"] for answer in answers] == ["math", "math"]


@pytest.mark.parametrize("part", [{"type": "image_url", "image_url": {"url": "x"}}, {"type": "input_audio"}])
def test_b08_parts_that_are_not_text_are_refused_by_type(client: TestClient, part: dict[str, Any]) -> None:
    content = [{"type": "text", "text": "what is this?"}, part]
    error = error_of(client.post(CHAT, json={"messages": [{"role": "user", "content": content}]}))
    assert part["type"] in error["message"]
    assert error["param"] == "messages[0].content[1].type"
    error_of(client.post(CHAT, json={"messages": [{"role": "user", "content": []}]}))


def test_b11_an_over_long_prompt_is_refused_with_both_numbers_and_serving_goes_on() -> None:
    client = TestClient(create_app(FakeEngine(context=40)))
    error = error_of(client.post(CHAT, json=body(CHAT, "x" * 40)))
    assert error["code"] == "context_length_exceeded"
    assert "41 tokens" in error["message"]
    assert "40 tokens" in error["message"]
    assert whole(client, CHAT, prompt="short")[1] == "stop"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 2),
        ("logprobs", True),
        ("top_logprobs", 3),
        ("response_format", {"type": "json_object"}),
        ("tools", [{"type": "function"}]),
        ("frequency_penalty", 0.5),
        ("presence_penalty", True),
        ("logit_bias", {"5": 1}),
        ("best_of", 3),
        ("temperatur", 0.5),
    ],
)
def test_what_the_server_cannot_do_is_refused_by_name(client: TestClient, field: str, value: Any) -> None:
    error = error_of(client.post(CHAT, json=body(CHAT, **{field: value})))
    assert error["code"] == "unsupported_parameter"
    assert error["param"] == field


def test_harmless_fields_and_values_that_mean_off_are_accepted(client: TestClient) -> None:
    extra = {"user": "me", "metadata": {"a": "b"}, "n": 1, "logprobs": False, "logit_bias": None, "tools": []}
    extra |= {"response_format": {"type": "text"}, "presence_penalty": 0, "frequency_penalty": 0.0}
    assert whole(client, CHAT, **extra)[1] == "stop"


@pytest.mark.parametrize(
    "extra",
    [
        {"temperature": -1},
        {"temperature": "warm"},
        {"top_p": 0},
        {"max_tokens": 0},
        {"stop": ""},
        {"stop": ["a"] * 17},
        {"seed": "x"},
        {"stream_options": {"include_usage": True}},
        {"max_tokens": 5, "max_completion_tokens": 6},
    ],
)
def test_values_out_of_bounds_are_client_errors(client: TestClient, extra: dict[str, Any]) -> None:
    assert error_of(client.post(CHAT, json=body(CHAT, **extra)))["type"] == "invalid_request_error"


def test_parameters_reach_the_engine_as_sent(client: TestClient, engine: FakeEngine) -> None:
    whole(client, CHAT, temperature=0.7, top_p=0.9, seed=5, stop=["zz"], max_tokens=9, store=False, top_k=3)
    seen = engine.submitted[-1]
    assert (seen["temperature"], seen["top_p"], seen["seed"], seen["stop"]) == (0.7, 0.9, 5, ("zz",))
    assert (seen["max_tokens"], seen["store"], seen["top_k"]) == (9, False, 3)
    client.post(TEXT, json={"prompt": ["verbatim"]})
    assert engine.submitted[-1]["template"] is False
    assert engine.submitted[-1]["max_tokens"] == 16


def test_a_client_may_name_the_domain_by_field_or_header(client: TestClient) -> None:
    header = {"X-Polydraft-Domain": "code"}
    assert whole(client, CHAT, domain="code")[2]["polydraft"]["domain"] == "code"
    response = client.post(CHAT, json=body(CHAT), headers=header)
    assert response.json()["polydraft"]["domain"] == response.headers["X-Polydraft-Domain"] == "code"
    assert "math" in error_of(client.post(CHAT, json=body(CHAT, domain="math"), headers=header))["message"]
    unknown = error_of(client.post(CHAT, json=body(CHAT, domain="nope", stream=True)), 404)
    assert "base, code, math" in unknown["message"]


def test_usage_counts_accepted_and_rejected_draft_tokens(client: TestClient) -> None:
    answer = whole(client, CHAT)[2]
    usage, extra = answer["usage"], answer["polydraft"]
    details = usage["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] == extra["accepted"] > 0
    assert details["accepted_prediction_tokens"] + details["rejected_prediction_tokens"] == extra["drafted"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert extra["mean_accepted_length"] == usage["completion_tokens"] / extra["rounds"] > 1
    assert {"domain", "confidence", "runner_up", "versions"} <= set(extra)


def test_metrics_equal_the_sum_over_answers(client: TestClient) -> None:
    answers = [whole(client, path)[2] for path in (CHAT, TEXT, CHAT)]
    page = client.get("/metrics").text
    for name, value in (
        ("spec_decode_num_accepted_tokens_total", sum(a["polydraft"]["accepted"] for a in answers)),
        ("spec_decode_num_draft_tokens_total", sum(a["polydraft"]["drafted"] for a in answers)),
        ("generation_tokens_total", sum(a["usage"]["completion_tokens"] for a in answers)),
    ):
        assert f'polydraft:{name}{{domain="math"}} {float(value)}' in page
    assert 'polydraft:request_success_total{domain="math",finished_reason="stop"} 3.0' in page


def test_b28_two_apps_in_one_process_keep_their_metrics_apart(engine: FakeEngine) -> None:
    first, second = TestClient(create_app(engine)), TestClient(create_app(engine))
    whole(first, CHAT)
    assert "request_success_total{" in first.get("/metrics").text
    assert "request_success_total{" not in second.get("/metrics").text


def test_domains_are_listed_registered_and_removed(client: TestClient) -> None:
    names = [row["name"] for row in client.get("/v1/domains").json()["data"]]
    assert names == ["base", "math", "code"]
    created = client.post(
        "/v1/domains", json={"name": "poems", "description": "verse", "examples": ["a sonnet"]}
    )
    assert created.status_code == 201
    assert created.json()["name"] == "poems"
    assert "requests" in created.json()
    error_of(client.post("/v1/domains", json={"name": "poems"}))
    error_of(client.post("/v1/domains", json={"name": "x", "exampels": []}))
    assert client.delete("/v1/domains/poems").json()["deleted"] is True
    assert "code" in error_of(client.delete("/v1/domains/poems"), 404)["message"]


def test_errors_of_the_engine_keep_status_and_code_and_unexpected_ones_tell_nothing() -> None:
    problems = {
        "busy": BusyError("full"),
        "boom": RuntimeError("secret"),
        "odd": PolydraftError("step failed"),
    }
    client = TestClient(
        create_app(FakeEngine(fail=lambda prompt: problems.get(prompt))), raise_server_exceptions=False
    )
    assert error_of(client.post(CHAT, json=body(CHAT, "busy")), 503)["code"] == "busy"
    assert "secret" not in error_of(client.post(CHAT, json=body(CHAT, "boom")), 500)["message"]
    assert error_of(client.post(CHAT, json=body(CHAT, "odd")), 500)["type"] == "server_error"
    chunks = events(client.post(CHAT, json=body(CHAT, "busy", stream=True)))
    assert chunks[-1]["error"]["code"] == "busy"


def test_unknown_paths_methods_models_and_bodies_get_the_same_error_shape(client: TestClient) -> None:
    error_of(client.get("/v1/nothing"), 404)
    error_of(client.get(CHAT), 405)
    assert error_of(client.post(CHAT, json=body(CHAT, model="other")), 404)["code"] == "model_not_found"
    assert (
        "not JSON"
        in error_of(client.post(CHAT, content=b"{", headers={"content-type": "application/json"}))["message"]
    )


def test_ready_turns_true_only_when_the_engine_has_loaded() -> None:
    gate: list[FakeEngine] = []

    def load() -> FakeEngine:
        wait_until(lambda: bool(gate))
        return gate[0]

    deferred = DeferredEngine(load, model_name="soon").start()
    client = TestClient(create_app(deferred))
    assert client.get("/health").status_code == 200
    assert (client.get("/ready").status_code, client.get("/ready").json()["model"]) == (503, "soon")
    assert error_of(client.post(CHAT, json=body(CHAT)), 503)["code"] == "not_ready"
    assert "polydraft:engine_ready 0.0" in client.get("/metrics").text
    gate.append(FakeEngine())
    wait_until(lambda: deferred.ready)
    assert client.get("/ready").status_code == 200
    assert whole(client, CHAT)[1] == "stop"
    deferred.close()
    deferred.close()
    assert gate[0].closed == 1
    assert client.get("/ready").status_code == 503


def test_the_event_loop_stays_free_while_answers_are_generated() -> None:
    engine = FakeEngine(delay=0.05, slots=64)
    with live_server(engine) as url, httpx.Client(base_url=url, timeout=20) as client:
        long = body(CHAT, max_tokens=100_000, ignore_eos=True, stream=True)
        streams = [client.stream("POST", CHAT, json=long) for _ in range(45)]
        for stream in streams:
            stream.__enter__()
        wait_until(lambda: engine.running == 45)
        assert client.get("/health").status_code == 200
        for stream in streams:
            stream.__exit__(None, None, None)
        wait_until(lambda: engine.running == 0)


def test_a_body_over_the_limit_is_refused_with_the_limit() -> None:
    client = TestClient(create_app(FakeEngine(), ServerConfig(max_request_bytes=1024)))
    assert "1024 bytes" in error_of(client.post(CHAT, json=body(CHAT, "x" * 2000)), 413)["message"]
    assert whole(client, CHAT)[1] == "stop"
