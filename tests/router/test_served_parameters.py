"""Request parameters through the service over the real engine with a tiny target."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import httpx
import openai
import pytest

from router.bodies.embedded import Engine
from tests.router.http_rig import CHAT, TEXT, body, events, text_of
from tests.router.serving import live_server, wait_until
from tests.router.tiny_engine import tiny_engine

REPEATS = "ha ha ha ha ha ha ha ha"


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with tiny_engine() as built:
        yield built


@pytest.fixture(scope="module")
def url(engine: Engine) -> Iterator[str]:
    with live_server(engine) as address:
        yield address


@pytest.fixture(scope="module")
def web(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=60) as made:
        yield made


def ask(web: httpx.Client, path: str, **extra: Any) -> httpx.Response:
    request = body(path, **{"prompt": REPEATS, "model": "tiny", "max_tokens": 24, **extra})
    return web.post(path, json=request)


def joined(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """The one choice of a stream, put together; every chunk but the last of the choice has a null reason."""
    choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
    logprobs: dict[str, list[Any]] = {}
    for choice in choices:
        for name, items in (choice["logprobs"] or {}).items():
            logprobs.setdefault(name, []).extend(items or [])
    text = "".join(map(text_of, choices))
    return {"text": text, "logprobs": logprobs or None, "finish_reason": choices[-1]["finish_reason"]}


def answer_of(web: httpx.Client, path: str, stream: bool, **extra: Any) -> tuple[dict[str, Any], int]:
    """A choice as text, log-probabilities and reason, and the number of its tokens."""
    if stream:
        chunks = events(ask(web, path, stream=True, stream_options={"include_usage": True}, **extra))
        return joined(chunks), chunks[-1]["usage"]["completion_tokens"]
    answer = ask(web, path, **extra).json()
    choice = answer["choices"][0]
    reason = choice["finish_reason"]
    shown = {"text": text_of(choice), "logprobs": choice["logprobs"], "finish_reason": reason}
    return shown, answer["usage"]["completion_tokens"]


def plain_tokens(engine: Engine, path: str, **extra: Any) -> tuple[int, ...]:
    options = {"temperature": 0, "max_tokens": 24, "ignore_eos": True, "k": 0, **extra}
    return engine.submit(REPEATS, template=path == CHAT, **options).result(60).token_ids


def near(one: Any, other: Any) -> bool:
    """Equal but for how the last bits of numbers round."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(near(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(near, one, other))
    return bool(one == pytest.approx(other, abs=1e-4) if isinstance(one, float) else one == other)


def test_a03_a_stop_string_ends_text_tokens_and_logprobs_at_the_same_token(
    engine: Engine, web: httpx.Client
) -> None:
    content = {token: engine.token_bytes(token) for token in range(len(engine.tokenizer))}
    unreadable = [token for token in content if not 32 <= content[token][0] < 127 or len(content[token]) > 1]
    bias = {str(token): -100 for token in unreadable}
    text = answer_of(web, TEXT, False, logit_bias=bias)[0]["text"]
    assert len(text) == 24
    for stop in [*(text[at : at + 3] for at in range(2, 20, 4)), "no such text"]:
        extra = {"stop": [stop], "logprobs": 2, "logit_bias": bias}
        found = [answer_of(web, TEXT, stream, k=k, **extra) for k in (0, 4) for stream in (False, True)]
        for choice, count in found:
            lists = choice["logprobs"]
            assert {len(lists[name]) for name in lists} == {count}
            ended = stop if stop in text else ""
            assert choice["text"] == text.partition(stop)[0]
            assert choice["finish_reason"] == ("stop" if ended else "length")
            assert "".join(lists["tokens"]) == choice["text"] + ended
            assert lists["text_offset"] == list(range(count))
            assert near(choice, found[0][0])


def test_the_text_of_a_special_token_stops_at_that_token(web: httpx.Client) -> None:
    bias = {"1": 100}
    choice, count = answer_of(web, TEXT, False, logit_bias=bias, stop="<eos>")
    assert (choice["finish_reason"], count) == ("length", 24)
    choice, count = answer_of(web, TEXT, False, logit_bias=bias, stop=["no such text", "<bos>"])
    assert (choice["text"], choice["finish_reason"], count) == ("", "stop", 1)


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("k", [0, 4])
@pytest.mark.parametrize("stream", [False, True])
def test_b10_the_reason_is_right_for_every_end_on_every_path(
    engine: Engine, web: httpx.Client, path: str, k: int, stream: bool
) -> None:
    tokens = plain_tokens(engine, path)
    first = next(at for at in range(3, 24) if tokens[at] not in tokens[:at])
    before = engine.tokenizer.decode(tokens[:first], skip_special_tokens=True)
    with patch.object(engine.target, "eos_token_ids", frozenset({tokens[first]})):
        ended, count = answer_of(web, path, stream, k=k)
    assert (ended["text"], ended["finish_reason"], count) == (before, "stop", first + 1)
    ended, count = answer_of(web, path, stream, k=k, stop_token_ids=[tokens[first]], ignore_eos=True)
    assert (ended["finish_reason"], count) == ("stop", first + 1)
    whole = engine.tokenizer.decode(tokens, skip_special_tokens=True)
    at = next(at for at in range(2, len(whole)) if "�" not in whole[at : at + 2])
    stop = whole[at : at + 2]
    ended, _ = answer_of(web, path, stream, k=k, stop=stop, ignore_eos=True)
    assert (ended["text"], ended["finish_reason"]) == (whole[: whole.index(stop)], "stop")
    for limit in (1, 2, 7):
        ended, count = answer_of(web, path, stream, k=k, max_tokens=limit, ignore_eos=True)
        assert (ended["finish_reason"], count) == ("length", limit)


def test_a05_usage_metrics_and_statistics_tell_the_same_numbers_also_of_choices() -> None:
    answers = []
    with tiny_engine() as engine, live_server(engine) as url, httpx.Client(base_url=url, timeout=60) as web:
        for at in range(100):
            extra = {"n": 2, "max_tokens": 1 + at % 9, "stop": ["e", "a"], "temperature": at % 2}
            answers.append(ask(web, CHAT, prompt=f"{REPEATS} {at % 7}", **extra).json())
        page, stats = web.get("/metrics").text, web.get("/v1/stats").json()
    totals = {"prompt_tokens": 0, "completion_tokens": 0, "accepted": 0, "drafted": 0}
    for answer in answers:
        usage, details = answer["usage"], answer["usage"]["completion_tokens_details"]
        accepted, rejected = details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]
        assert 0 <= accepted <= usage["completion_tokens"]
        assert rejected >= 0
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        for name in ("prompt_tokens", "completion_tokens"):
            totals[name] += usage[name]
        totals["accepted"] += accepted
        totals["drafted"] += accepted + rejected

    def counted(name: str) -> float:
        lines = [line for line in page.splitlines() if line.startswith(f"polydraft:{name}_total{{")]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    assert totals["accepted"] > 0
    assert counted("prompt_tokens") == totals["prompt_tokens"]
    assert counted("generation_tokens") == totals["completion_tokens"] == stats["overall"]["tokens"]
    for ours, name in (("accepted", "accepted_tokens"), ("drafted", "draft_tokens")):
        engines = "accepted_tokens" if ours == "accepted" else "proposed_tokens"
        assert counted(f"spec_decode_num_{name}") == totals[ours] == stats["overall"][engines]
        assert sum(row[engines] for row in stats["domains"].values()) == totals[ours]
    assert counted("request_success") == stats["overall"]["requests"] == 200


def test_a15_choices_of_one_seed_differ_and_come_again_with_any_draft(web: httpx.Client) -> None:
    found = []
    for k in (0, 4, 4):
        answer = ask(web, CHAT, n=4, seed=42, temperature=1, k=k).json()
        found.append([text_of(choice) for choice in answer["choices"]])
    assert found.count(found[0]) == 3
    assert len(set(found[0])) == 4
    assert text_of(ask(web, CHAT, seed=42, temperature=1).json()["choices"][0]) == found[0][0]


def test_greedy_tokens_are_the_most_probable_of_their_alternatives(
    web: httpx.Client,
) -> None:
    answer = ask(web, CHAT, logprobs=True, top_logprobs=3, ignore_eos=True).json()
    content = answer["choices"][0]["logprobs"]["content"]
    assert len(content) == answer["usage"]["completion_tokens"] == 24
    for entry in content:
        top = entry["top_logprobs"]
        assert [item["logprob"] for item in top] == sorted((i["logprob"] for i in top), reverse=True)
        assert len(top) == 3
        assert entry["logprob"] == pytest.approx(top[0]["logprob"], abs=1e-6)
        assert entry["bytes"] == top[0]["bytes"]


def test_a_bias_forbids_and_a_prompt_may_be_its_token_ids(engine: Engine, web: httpx.Client) -> None:
    tokens = plain_tokens(engine, TEXT)
    bias = {str(token): -100 for token in set(tokens)}
    answer = ask(web, TEXT, logit_bias=bias, logprobs=0, ignore_eos=True).json()
    forbidden = {engine.token_bytes(token).decode("latin-1") for token in tokens}
    assert not forbidden & set(answer["choices"][0]["logprobs"]["tokens"])
    ids = list(engine.prompt_ids(REPEATS, template=False))
    texts = [text_of(ask(web, TEXT, prompt=prompt).json()["choices"][0]) for prompt in (REPEATS, ids, [ids])]
    assert texts.count(texts[0]) == 3
    refused = ask(web, TEXT, prompt=[5, 100_000])
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt[1]")


@pytest.mark.parametrize(
    ("extra", "status", "field"),
    [
        ({"logit_bias": {"100000": 1}}, 400, "logit_bias"),
        ({"stop_token_ids": [100_000]}, 400, "stop_token_ids[0]"),
        ({"stop_token_ids": [-1]}, 400, "stop_token_ids.0"),
        ({"sources": ["oracle"]}, 404, "sources"),
        ({"domain": "nowhere"}, 404, "domain"),
    ],
)
def test_what_this_target_cannot_do_is_refused_by_name(
    web: httpx.Client, extra: dict[str, Any], status: int, field: str
) -> None:
    for stream in (False, True):
        refused = ask(web, CHAT, stream=stream, n=2, **extra)
        assert (refused.status_code, refused.json()["error"]["param"]) == (status, field)
    assert ask(web, CHAT).status_code == 200


def test_structured_output_is_json_of_the_schema_through_the_official_client(url: str) -> None:
    schema = {
        "type": "object",
        "properties": {"kind": {"enum": ["boat", "tree"]}},
        "required": ["kind"],
        "additionalProperties": False,
    }
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "kind", "schema": schema, "strict": True}}
    messages: Any = [{"role": "user", "content": REPEATS}]
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        for k in (0, 4):
            answer = client.chat.completions.create(
                model="tiny",
                messages=messages,
                response_format=wanted,
                n=2,
                max_tokens=120,
                logit_bias={"65": 0},
                logprobs=True,
                extra_body={"k": k},
            )
            for choice in answer.choices:
                assert choice.finish_reason == "stop"
                assert json.loads(str(choice.message.content))["kind"] in ("boat", "tree")


def test_b05_hanging_up_ends_all_choices_and_leaves_the_engine_empty(
    engine: Engine, web: httpx.Client
) -> None:
    request = body(CHAT, model="tiny", n=6, stream=True, ignore_eos=True, max_tokens=200, temperature=1)
    for _ in range(5):
        with web.stream("POST", CHAT, json=request) as stream:
            next(stream.iter_lines())
        wait_until(lambda: not engine.core.rows and not len(engine.core.intake))
    engine.core.call(engine.core.check).result(30)
