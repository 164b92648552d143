from __future__ import annotations

from pathlib import Path

import pytest

from drafts.errors import InvalidValueError
from router.app.traffic import parse_traffic, read_traffic


def test_prompts_and_messages_become_the_same_conversation() -> None:
    lines = [
        '{"prompt": "hello", "domain": "greeting", "source": "me", "extra": [1]}\n',
        "\n",
        '{"messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]}\n',
    ]
    first, second = parse_traffic(lines)
    assert first.messages == second.messages == ({"role": "user", "content": "hello"},)
    assert (first.label, first.source, first.index, first.line) == ("greeting", "me", 0, 1)
    assert (second.label, second.index, second.line) == (None, 1, 3)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{oops", "one JSON object"),
        ("[1]", "one JSON object"),
        ("{}", '"prompt" or "messages"'),
        ('{"prompt": "a", "messages": []}', '"prompt" or "messages"'),
        ('{"prompt": 3}', "a string"),
        ('{"prompt": "  "}', "not blank"),
        ('{"messages": []}', "at least one message"),
        ('{"messages": [{"role": "user"}]}', "messages[0].content"),
        ('{"prompt": "a", "domain": 3}', "domain"),
    ],
)
def test_a_bad_line_is_named_by_its_number(line: str, said: str) -> None:
    with pytest.raises(InvalidValueError) as error:
        parse_traffic(['{"prompt": "fine"}', "", line], name="t.jsonl")
    assert "t.jsonl, line 3" in str(error.value)
    assert said in str(error.value)


def test_limit_reads_no_further_and_files_are_checked(tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    file.write_text('\ufeff{"prompt": "a"}\n{"prompt": "b"}\nnot json', encoding="utf-8")
    assert [item.text for item in read_traffic(file, limit=2)] == ["a", "b"]
    for bad in (tmp_path / "none.jsonl", tmp_path):
        with pytest.raises(InvalidValueError, match="readable"):
            read_traffic(bad)
    file.write_text("\n")
    with pytest.raises(InvalidValueError, match="at least one request"):
        read_traffic(file)
    with pytest.raises(InvalidValueError, match="--limit"):
        read_traffic(file, limit=0)
