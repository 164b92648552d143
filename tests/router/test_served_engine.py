"""The service and the replay over the real engine with a tiny target."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from drafts.errors import InvalidValueError
from router.app.replay import ReplaySettings, replay
from router.app.traffic import parse_traffic
from router.bodies.embedded import Engine
from tests.router.serving import live_server, wait_until
from tests.router.tiny_engine import tiny_engine

PROMPTS = ["boat sail harbour now", "tree leaf forest now", "naïve café 🙂", "aaaa aaaa aaaa aaaa"]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with tiny_engine() as built:
        yield built


@pytest.fixture(scope="module")
def url(engine: Engine) -> Iterator[str]:
    with live_server(engine) as address:
        yield address


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


def both(client: openai.OpenAI, prompt: str, **extra: Any) -> tuple[Any, str, str]:
    """The whole answer, and text and finish reason of the same request streamed."""
    options: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 40, **extra}
    messages: Any = [{"role": "user", "content": prompt}]
    whole = client.chat.completions.create(messages=messages, **options)
    chunks = [
        c for c in client.chat.completions.create(messages=messages, stream=True, **options) if c.choices
    ]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    return whole, text, str(chunks[-1].choices[0].finish_reason)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_b01_b10_streamed_and_whole_answers_agree_greedy_and_sampled(
    client: openai.OpenAI, prompt: str
) -> None:
    for extra in ({}, {"temperature": 0.8, "seed": 7}, *({"max_tokens": limit} for limit in range(1, 9))):
        whole, text, reason = both(client, prompt, **extra)
        assert text == whole.choices[0].message.content
        assert reason == whole.choices[0].finish_reason
        assert whole.usage.completion_tokens <= extra.get("max_tokens", 40)
        if reason == "length":
            assert whole.usage.completion_tokens == extra.get("max_tokens", 40)


def test_b10_speculation_changes_neither_text_nor_reason(client: openai.OpenAI) -> None:
    for prompt in PROMPTS:
        for temperature in (0.0, 1.0):
            answers = [
                both(client, prompt, temperature=temperature, seed=3, extra_body={"k": k})[0]
                for k in (0, 1, 4)
            ]
            texts = {(a.choices[0].message.content, a.choices[0].finish_reason) for a in answers}
            assert len(texts) == 1
            assert answers[0].usage.completion_tokens_details.accepted_prediction_tokens == 0


@pytest.mark.parametrize("path", ["chat", "text"])
def test_b04_stop_strings_across_tokens_end_both_endpoints_alike(client: openai.OpenAI, path: str) -> None:
    options: dict[str, Any] = {
        "model": "tiny",
        "temperature": 0,
        "max_tokens": 40,
        "extra_body": {"ignore_eos": True},
    }

    def answer(**extra: Any) -> tuple[str, str]:
        if path == "chat":
            messages: Any = [{"role": "user", "content": PROMPTS[0]}]
            done = client.chat.completions.create(messages=messages, **options, **extra)
            choices = [c.choices[0] for c in done if c.choices] if extra.get("stream") else [done.choices[0]]
            parts = [c.delta.content if extra.get("stream") else c.message.content for c in choices]
        else:
            done = client.completions.create(prompt=PROMPTS[0], **options, **extra)
            choices = [c.choices[0] for c in done if c.choices] if extra.get("stream") else [done.choices[0]]
            parts = [c.text for c in choices]
        return "".join(part or "" for part in parts), str(choices[-1].finish_reason)

    text, _ = answer()
    for at in (3, 8, 15):
        stop = text[at : at + 3]
        if "�" in stop or len(stop) < 3:
            continue
        expected = (text[: text.index(stop)], "stop")
        assert answer(stop=stop) == answer(stop=stop, stream=True) == expected


def test_b07_b08_messages_reach_the_template_as_text(engine: Engine, url: str) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "boat "}, {"type": "text", "text": "sail"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "4"},
        {"role": "user", "content": "boat sail harbour"},
    ]
    seen: list[Any] = []
    build = engine._prompts.build
    engine._prompts.build = lambda *arguments: seen.append(build(*arguments)) or seen[-1]  # type: ignore[method-assign]
    try:
        answer = httpx.post(
            f"{url}/v1/chat/completions", json={"messages": messages, "max_tokens": 4}, timeout=60
        )
    finally:
        del engine._prompts.build
    assert answer.status_code == 200
    rendered = engine.tokenizer.decode(seen[0][0])
    assert rendered == "user: boat sail\nassistant: \ntool: 4\nuser: boat sail harbour\nassistant: "
    assert answer.json()["polydraft"]["domain"] == "boats"


def test_b08_python_callers_get_the_same_messages_as_clients(engine: Engine) -> None:
    parts = [{"type": "text", "text": "a boat "}, {"type": "text", "text": "at sea"}]
    expected = engine.prompt_ids("a boat at sea")
    assert engine.prompt_ids(messages=[{"role": "user", "content": parts}]) == expected
    with pytest.raises(InvalidValueError, match="pirate"):
        engine.submit(messages=[{"role": "pirate", "content": "arr"}])


def test_b11_prompts_at_the_limit_are_refused_or_cut_and_serving_goes_on(engine: Engine, url: str) -> None:
    def post(length: int) -> httpx.Response:
        body = {"prompt": "x" * length, "max_tokens": 100, "temperature": 0}
        return httpx.post(f"{url}/v1/completions", json=body, timeout=60)

    for length in (256, 300):
        refused = post(length)
        assert refused.status_code == 400
        assert refused.json()["error"]["code"] == "context_length_exceeded"
        assert str(length) in refused.json()["error"]["message"]
        assert "256" in refused.json()["error"]["message"]
    cut = post(255).json()
    assert cut["usage"]["completion_tokens"] == 1
    assert post(10).status_code == 200
    engine.core.call(engine.core.check).result(30)


def test_b05_a_hung_up_stream_leaves_the_engine_empty(engine: Engine, url: str) -> None:
    body = {
        "messages": [{"role": "user", "content": "go"}],
        "stream": True,
        "ignore_eos": True,
        "max_tokens": 200,
    }
    for _ in range(5):
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=60) as stream:
            next(stream.iter_lines())
        wait_until(lambda: not engine.core.rows)
    engine.core.call(engine.core.check).result(30)


def test_a_registered_domain_serves_at_once(url: str) -> None:
    new = {"name": "coins", "description": "coins", "examples": ["coin mint silver", "coin gold mint"]}
    assert httpx.post(f"{url}/v1/domains", json=new, timeout=60).status_code == 201
    for extra in ({}, {"domain": "coins"}):
        body = {"messages": [{"role": "user", "content": "coin mint silver gold"}], "max_tokens": 8, **extra}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()
        assert answer["polydraft"]["domain"] == "coins"
    rows = httpx.get(f"{url}/v1/domains", timeout=60).json()["data"]
    coins = next(row for row in rows if row["name"] == "coins")
    assert coins["requests"] == 2
    assert httpx.delete(f"{url}/v1/domains/coins", timeout=60).status_code == 200


def test_a05_usage_metrics_and_statistics_tell_the_same_numbers() -> None:
    with tiny_engine() as engine, live_server(engine) as url:
        answers = []
        for at in range(200):
            body = {
                "messages": [{"role": "user", "content": PROMPTS[at % 4]}],
                "max_tokens": 1 + at % 17,
                "stop": ["e"],
            }
            answers.append(httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).json())
        page = httpx.get(f"{url}/metrics", timeout=60).text
        stats = httpx.get(f"{url}/v1/stats", timeout=60).json()
    accepted = rejected = tokens = 0
    for answer in answers:
        usage = answer["usage"]
        details = usage["completion_tokens_details"]
        assert 0 <= details["accepted_prediction_tokens"] <= usage["completion_tokens"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        accepted += details["accepted_prediction_tokens"]
        rejected += details["rejected_prediction_tokens"]
        tokens += usage["completion_tokens"]

    def counted(name: str) -> float:
        lines = [line for line in page.splitlines() if line.startswith(f"polydraft:{name}_total{{")]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    assert counted("spec_decode_num_accepted_tokens") == accepted == stats["overall"]["accepted_tokens"]
    assert (
        counted("spec_decode_num_draft_tokens") == accepted + rejected == stats["overall"]["proposed_tokens"]
    )
    assert counted("generation_tokens") == tokens == stats["overall"]["tokens"]


@pytest.mark.parametrize("concurrency", [1, 4])
def test_a_replay_is_lossless_and_its_baselines_agree(concurrency: int) -> None:
    lines = [json.dumps({"prompt": f"{PROMPTS[i % 4]} {i}", "domain": "xy"[i % 2]}) for i in range(12)]
    settings = ReplaySettings(
        concurrency=concurrency, max_tokens=24, compare=("plain", "generate"), verify=12, seed=4
    )
    with tiny_engine(slots=concurrency) as engine:
        result = replay(engine, parse_traffic(lines), settings)
        learned = engine.stats()["overall"]["requests"]
    assert (result["verify"]["checked"], result["verify"]["mismatched"]) == (12, 0)
    assert result["overall"]["requests"] == learned == 12
    assert result["compare"]["plain"]["same_answers"] == 12
    assert result["compare"]["generate"]["same_answers"] == 12
    assert result["overall"]["accepted_tokens"] > 0
    assert 0 <= result["learning"]["share_of_busy_time"] <= 1


def test_forced_trees_are_verified_under_load_where_they_would_not_pay() -> None:
    items = parse_traffic([json.dumps({"prompt": f"{PROMPTS[i % 4]} {i}"}) for i in range(12)])
    settings = ReplaySettings(concurrency=4, max_tokens=24, verify=12, seed=4, nodes=6)
    with tiny_engine(slots=4, nodes=settings.nodes) as engine:
        result = replay(engine, items, settings)
        stats = engine.stats()["domains"]
    assert (result["verify"]["checked"], result["verify"]["mismatched"]) == (12, 0)
    assert result["verify"]["branch_nodes"] > 0
    counted = sum(row["speculation"]["counters"]["branch_nodes"] for row in stats.values())
    assert result["verify"]["branch_nodes"] == counted
    with tiny_engine(slots=4) as engine:
        engine.core.costs.price = lambda rows, prompts: lambda tokens: 1e3 * tokens
        priced = replay(engine, items, ReplaySettings(concurrency=4, max_tokens=24, seed=4))
    assert priced["verify"]["branch_nodes"] < counted


def test_sampled_answers_pass_the_check_against_the_plain_model() -> None:
    items = parse_traffic([json.dumps({"prompt": f"{PROMPTS[i % 4]} {i}"}) for i in range(8)])
    settings = ReplaySettings(concurrency=3, max_tokens=16, temperature=0.9, verify=8, seed=2)
    with tiny_engine(slots=3) as engine:
        checked = replay(engine, items, settings)["verify"]
    assert (checked["checked"], checked["mismatched"]) == (8, 0)
    assert checked["tokens"] >= 8


def test_frozen_plain_and_fixed_k_replays_give_the_same_tokens() -> None:
    items = parse_traffic([json.dumps({"prompt": f"{PROMPTS[i % 4]} {i}"}) for i in range(8)])
    texts = []
    for changes in ({"sources": ()}, {"freeze": True}, {"k": 3}, {"sources": ("lookup",)}):
        settings = ReplaySettings(concurrency=2, max_tokens=16, temperature=0.9, seed=1, **changes)
        options = {"learn": not settings.freeze, "k": settings.k, "sources": settings.sources}
        with tiny_engine(**options) as engine:
            listener = Recorder()
            result = replay(engine, items, settings, listener=listener)
        assert result["overall"]["requests"] == 8
        texts.append(sorted(listener.answers))
    assert texts.count(texts[0]) == 4


class Recorder:
    def __init__(self) -> None:
        self.answers: list[tuple[int, tuple[int, ...]]] = []

    def served(self, item: Any) -> None:
        self.answers.append((item.item.index, item.completion.token_ids))

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None
