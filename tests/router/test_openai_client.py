from __future__ import annotations

from collections.abc import Iterator

import openai
import pydantic
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


def test_the_official_client_gets_choices_whole_and_streamed(client: openai.OpenAI) -> None:
    answer = ask(client, "a math question", n=3, seed=4, extra_body={"temperature": 1})
    texts = [choice.message.content for choice in answer.choices]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len(set(texts)) == 3
    stream = ask(client, "a math question", n=3, seed=4, stream=True, extra_body={"temperature": 1})
    found = ["", "", ""]
    for chunk in stream:
        for choice in chunk.choices:
            found[choice.index] += choice.delta.content or ""
    assert found == texts


def test_a03_the_official_client_reads_logprobs_of_both_endpoints(client: openai.OpenAI) -> None:
    for limit in (400, 5):
        answer = ask(client, "hello", logprobs=True, top_logprobs=3, extra_body={"max_tokens": limit})
        content = answer.choices[0].logprobs.content
        assert len(content) == answer.usage.completion_tokens
        text = b"".join(bytes(entry.bytes) for entry in content).decode().removesuffix("<eos>")
        assert text == answer.choices[0].message.content
        assert {len(entry.top_logprobs) for entry in content} == {3}
        done = client.completions.create(
            model="fake-model", prompt="hello", max_tokens=limit, temperature=0, logprobs=3
        )
        found = done.choices[0].logprobs
        lengths = {len(found.tokens), len(found.token_logprobs), len(found.text_offset)}
        assert lengths == {done.usage.completion_tokens, len(found.top_logprobs)}
        assert found.token_logprobs == [entry.logprob for entry in content]


def test_the_official_client_sends_biases_penalties_and_schemas(
    client: openai.OpenAI, engine: FakeEngine
) -> None:
    class Result(pydantic.BaseModel):
        answer: int

    ask(client, "x", logit_bias={"5": -100}, presence_penalty=0.5, frequency_penalty=1.5)
    seen = engine.submitted[-1]
    assert seen["logit_bias"] == {5: -100}
    assert (seen["presence_penalty"], seen["frequency_penalty"]) == (0.5, 1.5)
    parsed = client.chat.completions.parse(
        model="fake-model",
        messages=[{"role": "user", "content": "x"}],
        response_format=Result,
        extra_body={"min_p": 0.1, "min_tokens": 2, "timeout": 20.0},
    )
    assert parsed.choices[0].message.parsed == Result(answer=42)
    seen = engine.submitted[-1]
    assert seen["response_format"].json_schema["properties"]["answer"]["type"] == "integer"
    assert (seen["min_p"], seen["min_tokens"], seen["timeout"]) == (0.1, 2, 20.0)


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
