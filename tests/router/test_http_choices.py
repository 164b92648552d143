from __future__ import annotations

from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from drafts.errors import PolydraftError
from router.app.http import create_app
from tests.router.fake_engine import FakeEngine, default_answer, encode
from tests.router.http_rig import CHAT, TEXT, body, error_of, events, text_of
from tests.router.serving import live_server, wait_until

LONG = {"ignore_eos": True, "max_tokens": 100_000}


def by_choice(chunks: list[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    found: dict[int, list[dict[str, Any]]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            found.setdefault(choice["index"], []).append(choice)
    return found


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_choices_are_different_samples_of_one_seed(client: TestClient, engine: FakeEngine, path: str) -> None:
    answer = client.post(path, json=body(path, n=3, temperature=1, seed=7)).json()
    texts = [text_of(choice) for choice in answer["choices"]]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert texts == [default_answer("a math question"), *(f"{i}: {texts[0]}" for i in (1, 2))]
    assert [(seen["seed"], seen["choice"]) for seen in engine.submitted] == [(7, 0), (7, 1), (7, 2)]
    assert len({handle.request_id for handle in engine.handles}) == 3


def test_unseeded_choices_share_a_fresh_seed_that_no_other_prompt_or_request_has(
    client: TestClient, engine: FakeEngine
) -> None:
    for _ in range(2):
        client.post(TEXT, json=body(TEXT, prompt=["same", "same"], n=2, temperature=1))
    seeds = [seen["seed"] for seen in engine.submitted]
    assert [seen["choice"] for seen in engine.submitted] == [0, 1] * 4
    assert seeds[::2] == seeds[1::2]
    assert len(set(seeds)) == 4
    client.post(TEXT, json=body(TEXT, temperature=1))
    assert not {"seed", "choice"} & set(engine.submitted[-1])


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_streamed_choices_are_interleaved_by_index_and_equal_the_whole_ones(
    client: TestClient, path: str
) -> None:
    request = body(path, n=4, temperature=1, seed=1)
    whole = client.post(path, json=request).json()
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = events(client.post(path, json={**request, **options}))
    found = by_choice(chunks)
    assert sorted(found) == [0, 1, 2, 3]
    for index, choices in found.items():
        assert "".join(map(text_of, choices)) == text_of(whole["choices"][index])
        reasons = [choice["finish_reason"] for choice in choices]
        assert reasons == [None] * (len(choices) - 1) + ["stop"]
        if path == CHAT:
            assert [choice["delta"].get("role") for choice in choices].count("assistant") == 1
    assert [chunk for chunk in chunks if chunk["usage"] is not None] == [chunks[-1]]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == whole["usage"]
    assert {chunk["id"] for chunk in chunks} == {chunks[0]["id"]}


def test_a05_usage_sums_the_choices_counts_prompts_once_and_equals_the_metrics() -> None:
    client = TestClient(create_app(FakeEngine(cached=5)))
    answer = client.post(TEXT, json=body(TEXT, prompt=["a math one", "math"], n=2, logprobs=0)).json()
    usage, details = answer["usage"], answer["usage"]["completion_tokens_details"]
    assert usage["prompt_tokens"] == len("a math one") + 1 + len("math") + 1
    assert usage["prompt_tokens_details"] == {"cached_tokens": 10}
    tokens = sum(len(choice["logprobs"]["tokens"]) for choice in answer["choices"])
    assert usage["completion_tokens"] == tokens
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert 0 < details["accepted_prediction_tokens"] <= usage["completion_tokens"]
    parts = answer["polydraft"]["choices"]
    for name, counted in (("accepted", 0), ("drafted", 0), ("rounds", 0)):
        assert answer["polydraft"][name] == sum(part[name] for part in parts) > counted
    page = client.get("/metrics").text
    for name, value in (
        ("prompt_tokens_total", usage["prompt_tokens"]),
        ("generation_tokens_total", usage["completion_tokens"]),
        ("spec_decode_num_accepted_tokens_total", details["accepted_prediction_tokens"]),
        ("spec_decode_num_draft_tokens_total", sum(details.values())),
    ):
        assert f'polydraft:{name}{{domain="math"}} {float(value)}' in page
    assert 'polydraft:request_success_total{domain="math",finished_reason="stop"} 4.0' in page
    assert "polydraft:num_requests_in_flight 0.0" in page


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_are_answered_in_the_order_of_prompt_and_choice(
    client: TestClient, stream: bool
) -> None:
    request = body(TEXT, prompt=["one", "two", "three"], n=2, temperature=1, seed=3, stream=stream)
    response = client.post(TEXT, json=request)
    if stream:
        texts = {i: "".join(map(text_of, parts)) for i, parts in by_choice(events(response)).items()}
    else:
        texts = {choice["index"]: text_of(choice) for choice in response.json()["choices"]}
    answers = [default_answer(prompt) for prompt in ("one", "two", "three")]
    expected = [text for answer in answers for text in (answer, f"1: {answer}")]
    assert [texts[index] for index in range(6)] == expected


def test_prompts_may_be_lists_of_token_ids(client: TestClient, engine: FakeEngine) -> None:
    one, two = encode("go"), encode("stay")
    single = client.post(TEXT, json=body(TEXT, prompt=one)).json()
    both = client.post(TEXT, json=body(TEXT, prompt=[one, two])).json()
    assert text_of(single["choices"][0]) == default_answer("go")
    assert [text_of(choice) for choice in both["choices"]] == [default_answer("go"), default_answer("stay")]
    assert error_of(client.post(TEXT, json=body(TEXT, prompt=[1, "a"])))["param"] == "prompt"


@pytest.mark.parametrize("stream", [False, True])
def test_an_error_of_one_choice_is_the_answer_and_ends_the_others(stream: bool) -> None:
    engine = FakeEngine(
        delay=0.01, fail=lambda prompt: PolydraftError("step failed") if prompt == "bad" else None
    )
    client = TestClient(create_app(engine), raise_server_exceptions=False)
    response = client.post(TEXT, json=body(TEXT, prompt=["good", "bad", "good"], stream=stream, **LONG))
    if stream:
        assert events(response)[-1]["error"]["code"] == "internal_error"
    else:
        assert error_of(response, 500)["message"] == "step failed"
    assert [handle.cancelled.is_set() for handle in engine.handles] == [True] * 3
    wait_until(lambda: engine.running == 0)
    assert 'polydraft:request_failure_total{code="internal_error"} 1.0' in client.get("/metrics").text


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_queue_refuses_all_choices_says_when_to_retry_and_leaves_none_running(stream: bool) -> None:
    engine = FakeEngine(delay=0.01, capacity=2)
    client = TestClient(create_app(engine), raise_server_exceptions=False)
    response = client.post(CHAT, json=body(CHAT, n=3, stream=stream, **LONG))
    assert error_of(response, 503)["code"] == "busy"
    assert int(response.headers["Retry-After"]) > 0
    assert [handle.cancelled.is_set() for handle in engine.handles] == [True, True]
    wait_until(lambda: engine.open == 0)
    assert client.post(CHAT, json=body(CHAT, n=2)).status_code == 200


def test_b05_hanging_up_ends_every_choice_streaming_or_not() -> None:
    engine = FakeEngine(delay=0.01, slots=8)
    request = body(CHAT, n=4, temperature=1, **LONG)
    with live_server(engine) as url, httpx.Client(base_url=url, timeout=20) as client:
        with client.stream("POST", CHAT, json={**request, "stream": True}) as response:
            assert next(response.iter_lines()).startswith("data: ")
        wait_until(lambda: engine.open == 0)
        with pytest.raises(httpx.ReadTimeout):
            client.post(CHAT, json=request, timeout=0.3)
        wait_until(lambda: engine.open == 0)
        assert "polydraft:num_requests_in_flight 0.0" in client.get("/metrics").text
    assert len(engine.handles) == 8
