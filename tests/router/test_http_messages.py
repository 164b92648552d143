from __future__ import annotations

from typing import Any

import pytest
from starlette.testclient import TestClient

from router.app.http import create_app
from tests.router.fake_engine import FakeEngine
from tests.router.http_rig import CHAT, body, error_of, whole


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
