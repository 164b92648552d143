from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from osd.types import TokenLogprob
from router.app.logprobs import ChoiceLogprobs
from tests.router.fake_engine import EOS, FIRST_BYTE, FakeEngine, default_answer, encode
from tests.router.http_rig import CHAT, TEXT, streamed, whole

ANSWER = default_answer("a math question")
ENDS: list[tuple[dict[str, Any], str]] = [
    ({}, ANSWER + "<eos>"),
    ({"stop": "ünï"}, ANSWER[: ANSWER.index("ünï") + 3]),
    ({"stop": ["question'", "zz"]}, ANSWER[: ANSWER.index("question'") + 9]),
    ({"max_tokens": 9}, ANSWER[:9]),
    ({"max_tokens": 1}, ANSWER[:1]),
]


def logprobs_of(choice: dict[str, Any]) -> Iterator[tuple[bytes, float, Any]]:
    """Bytes, log-probability and alternatives of every token of a choice or of a chunk's."""
    found = choice["logprobs"]
    if found is None:
        return
    if "content" in found:
        assert found["refusal"] is None
        for entry in found["content"]:
            yield bytes(entry["bytes"]), entry["logprob"], entry["top_logprobs"]
        return
    lengths = {len(found[name]) for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs")}
    assert len(lengths) == 1
    for at, token in enumerate(found["tokens"]):
        escaped = re.fullmatch(r"bytes:((\\x[0-9a-f]{2})+)", token)
        content = bytes.fromhex(escaped[1].replace("\\x", "")) if escaped else token.encode()
        yield content, found["token_logprobs"][at], found["top_logprobs"][at]


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(("end", "expected"), ENDS)
def test_a03_tokens_are_listed_up_to_the_one_that_ends_the_answer_streamed_or_not_drafted_or_not(
    client: TestClient, path: str, end: dict[str, Any], expected: str
) -> None:
    wanted = {"logprobs": True, "top_logprobs": 2} if path == CHAT else {"logprobs": 2}
    found = []
    for k in (0, 4):
        _, _, answer = whole(client, path, k=k, **wanted, **end)
        options = {"k": k, "stream_options": {"include_usage": True}, **wanted, **end}
        _, _, chunks = streamed(client, path, **options)
        pieces = [choice for chunk in chunks for choice in chunk["choices"]]
        found.append(list(logprobs_of(answer["choices"][0])))
        found.append([entry for piece in pieces for entry in logprobs_of(piece)])
        for usage in (answer["usage"], chunks[-1]["usage"]):
            assert usage["completion_tokens"] == len(found[-1])
    assert found.count(found[0]) == 4
    assert b"".join(content for content, _, _ in found[0]).decode() == expected
    assert {logprob for _, logprob, _ in found[0]} == {-0.25}


def test_a03_offsets_are_characters_of_the_text_in_pieces_as_in_the_whole(client: TestClient) -> None:
    text, _, answer = whole(client, TEXT, logprobs=0)
    found = answer["choices"][0]["logprobs"]
    assert found["top_logprobs"] is None
    for token, offset in zip(found["tokens"][:-1], found["text_offset"][:-1], strict=True):
        assert token.startswith("bytes:") or text[offset : offset + len(token)] == token
    assert found["text_offset"] == sorted(found["text_offset"])
    assert (found["tokens"][-1], found["text_offset"][-1]) == ("<eos>", len(text))
    chunks = streamed(client, TEXT, logprobs=0)[2]
    parts = [logprobs for chunk in chunks if (logprobs := chunk["choices"][0]["logprobs"]) is not None]
    assert [offset for part in parts for offset in part["text_offset"]] == found["text_offset"]


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_pieces_carry_the_tokens_they_show_and_the_last_one_the_rest(client: TestClient, path: str) -> None:
    wanted = {"logprobs": True} if path == CHAT else {"logprobs": 1}
    chunks = streamed(client, path, stop="漢字.x", **wanted)[2]
    pieces = [chunk["choices"][0] for chunk in chunks]
    if path == CHAT:
        assert pieces.pop(0)["logprobs"] is None
    counts = [len(list(logprobs_of(piece))) for piece in pieces]
    assert all(counts[:-2])
    assert sum(counts) == len(encode(ANSWER)) + 1
    assert pieces[-1]["finish_reason"] == "stop"


def test_alternatives_have_the_shape_of_their_endpoint(client: TestClient) -> None:
    entry = whole(client, CHAT, logprobs=True, top_logprobs=2)[2]["choices"][0]["logprobs"]["content"][0]
    top = [{"token": "T", "logprob": -0.25, "bytes": [84]}, {"token": "U", "logprob": -0.5, "bytes": [85]}]
    assert entry == {**top[0], "top_logprobs": top}
    older = whole(client, TEXT, logprobs=2)[2]["choices"][0]["logprobs"]
    assert older["top_logprobs"][0] == {"T": -0.25, "U": -0.5}
    for path in (CHAT, TEXT):
        assert whole(client, path)[2]["choices"][0]["logprobs"] is None
        chunks = streamed(client, path)[2]
        assert all(chunk["choices"][0]["logprobs"] is None for chunk in chunks)


def test_an_emitted_token_outside_the_most_probable_is_listed_beside_them_and_infinity_is_a_number() -> None:
    entry = TokenLogprob(FIRST_BYTE + ord("z"), float("-inf"), ((FIRST_BYTE + ord("a"), -0.1), (EOS, -3.0)))
    older = ChoiceLogprobs(FakeEngine(), chat=False).take([entry])
    assert older is not None
    assert older["top_logprobs"] == [{"a": -0.1, "<eos>": -3.0, "z": -9999.0}]
    newer = ChoiceLogprobs(FakeEngine(), chat=True).take([entry])
    assert newer is not None
    assert newer["content"][0]["logprob"] == -9999.0
    assert [top["token"] for top in newer["content"][0]["top_logprobs"]] == ["a", "<eos>"]


def test_a_part_of_a_character_is_shown_by_its_bytes() -> None:
    entries = [TokenLogprob(token, -1.0) for token in encode("é!")]
    older = ChoiceLogprobs(FakeEngine(), chat=False).take(entries)
    assert older is not None
    assert older["tokens"] == ["bytes:\\xc3", "bytes:\\xa9", "!"]
    assert older["text_offset"] == [0, 0, 1]
    newer = ChoiceLogprobs(FakeEngine(), chat=True).take(entries)
    assert newer is not None
    assert [(entry["token"], entry["bytes"]) for entry in newer["content"][:2]] == [
        ("\\xc3", [0xC3]),
        ("\\xa9", [0xA9]),
    ]
