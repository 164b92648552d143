from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.router.fake_engine import FakeEngine, default_answer
from tests.router.serving import live_server, wait_until


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def client(engine: FakeEngine) -> Iterator[openai.OpenAI]:
    with live_server(engine) as url:
        yield openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=30)


def ask(client: openai.OpenAI, text: str, **extra):
    messages = [{"role": "user", "content": text}]
    return client.chat.completions.create(
        model="fake-model", messages=messages, temperature=0, max_tokens=400, **extra
    )


def test_the_official_client_lists_the_model(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["fake-model"]


def test_the_official_client_gets_the_same_answer_streamed_and_whole(client: openai.OpenAI) -> None:
    answer = ask(client, "a math question")
    chunks = list(ask(client, "a math question", stream=True, stream_options={"include_usage": True}))
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert answer.choices[0].message.content == "".join(pieces) == default_answer("a math question")
    assert answer.choices[0].finish_reason == chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage == answer.usage
    assert answer.usage.completion_tokens_details.accepted_prediction_tokens > 0
    assert answer.model_extra["polydraft"]["domain"] == "math"


def test_the_official_client_completes_text_and_names_a_domain(
    client: openai.OpenAI, engine: FakeEngine
) -> None:
    done = client.completions.create(
        model="fake-model", prompt="go", temperature=0, max_tokens=400, extra_body={"domain": "code"}
    )
    assert done.choices[0].text == default_answer("go")
    assert done.model_extra["polydraft"]["domain"] == "code"
    stream = client.completions.create(
        model="fake-model", prompt="go", temperature=0, max_tokens=400, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in stream) == default_answer("go")


def test_the_official_client_raises_its_typed_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, "x", n=17)
    assert refused.value.param == "n"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=[{"role": "user", "content": "x"}])


def test_b05_closing_the_official_clients_stream_ends_the_request() -> None:
    engine = FakeEngine(delay=0.01, slots=1)
    with live_server(engine) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=30)
        stream = ask(client, "long", stream=True, extra_body={"ignore_eos": True, "max_tokens": 100_000})
        next(iter(stream))
        stream.close()
        wait_until(lambda: engine.running == 0)
