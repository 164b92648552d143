from __future__ import annotations

from typing import Any

import pytest
from starlette.testclient import TestClient

from tests.router.fake_engine import default_answer, encode
from tests.router.http_rig import CHAT, TEXT, streamed, whole


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


ENDS = [
    ({}, "stop"),
    ({"stop": "is"}, "stop"),
    ({"stop_token_ids": encode("w")}, "stop"),
    ({"max_tokens": 2}, "length"),
    ({"max_tokens": 1}, "length"),
]


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("k", [0, 4])
@pytest.mark.parametrize(("extra", "reason"), ENDS, ids=lambda value: str(value))
def test_b10_finish_reason_is_the_generators_on_every_path(
    client: TestClient, path: str, k: int, extra: dict[str, Any], reason: str
) -> None:
    text, found, _ = whole(client, path, k=k, **extra)
    pieces, last, chunks = streamed(client, path, k=k, **extra)
    assert found == last == reason
    assert text == pieces
    assert "<eos>" not in text
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)


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
