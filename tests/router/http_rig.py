"""Requests to the service over the fake engine, and what comes back."""

from __future__ import annotations

import json
from typing import Any

from starlette.testclient import TestClient

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"


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
