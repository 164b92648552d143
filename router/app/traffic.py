"""Traffic files: one request a line, as ``polydraft replay`` reads them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drafts.errors import InvalidValueError
from router.bodies.chat import normalise_messages


@dataclass(frozen=True)
class TrafficItem:
    """One line of traffic.

    Attributes:
        index: Place among the requests of the file, from 0.
        line: Line number in the file, from 1.
        messages: The conversation; a plain prompt is one user message.
        label: The line's ``domain``: for evaluation only, it never reaches the router.
        source: Where the request comes from, for the reader.
    """

    index: int
    line: int
    messages: tuple[dict[str, Any], ...]
    label: str | None = None
    source: str | None = None

    @property
    def text(self) -> str:
        """The last user message, for display."""
        texts = [str(m["content"]) for m in self.messages if m["role"] == "user"]
        return texts[-1] if texts else str(self.messages[-1]["content"])


def read_traffic(path: str | Path, limit: int | None = None) -> list[TrafficItem]:
    """The requests of a file in order, at most ``limit`` of them.

    Blank lines and unknown keys are ignored.

    Raises:
        InvalidValueError: no such file, nothing in it, or a bad line (named by its number).
    """
    if limit is not None and limit < 1:
        raise InvalidValueError("--limit", limit, "a positive number of requests")
    try:
        with open(path, encoding="utf-8-sig") as file:
            items = parse_traffic(file, name=str(path), limit=limit)
    except OSError as error:
        raise InvalidValueError(
            "traffic", str(path), f"a readable JSON Lines file ({error.strerror})"
        ) from None
    except UnicodeDecodeError as error:
        raise InvalidValueError("traffic", str(path), f"text in UTF-8 ({error.reason})") from None
    if not items:
        raise InvalidValueError("traffic", str(path), "at least one request")
    return items


def parse_traffic(
    lines: Iterable[str], *, name: str = "traffic", limit: int | None = None
) -> list[TrafficItem]:
    """Like :func:`read_traffic` for lines already at hand."""
    items: list[TrafficItem] = []
    for number, line in enumerate(lines, start=1):
        if limit is not None and len(items) >= limit:
            break
        if line.strip():
            items.append(_item(line, len(items), number, f"{name}, line {number}"))
    return items


def _item(line: str, index: int, number: int, where: str) -> TrafficItem:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        shown = line.strip()
        raise InvalidValueError(
            where, shown, f"one JSON object ({error.msg} at column {error.colno})"
        ) from None
    if not isinstance(record, dict):
        raise InvalidValueError(where, record, "one JSON object")
    prompt, messages = record.get("prompt"), record.get("messages")
    if (prompt is None) == (messages is None):
        raise InvalidValueError(where, sorted(record), 'either "prompt" or "messages"')
    if prompt is not None:
        if not isinstance(prompt, str) or not prompt.strip():
            raise InvalidValueError(f"{where}: prompt", prompt, "a string that is not blank")
        messages = [{"role": "user", "content": prompt}]
    return TrafficItem(
        index=index,
        line=number,
        messages=tuple(normalise_messages(messages, f"{where}: messages")),
        label=_text(record, "domain", where),
        source=_text(record, "source", where),
    )


def _text(record: dict[str, Any], key: str, where: str) -> str | None:
    value = record.get(key)
    if value is not None and not isinstance(value, str):
        raise InvalidValueError(f"{where}: {key}", value, "a string")
    return value
