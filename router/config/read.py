"""A YAML file as plain data, with the line of every key; nothing is guessed, nothing wins silently."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.constructor import DuplicateKeyError
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from router.config.error import ConfigError

KeyPath = tuple[str | int, ...]


@dataclass(frozen=True)
class Document:
    """A config file's content.

    Attributes:
        file: Its path, as text for messages.
        data: Mappings, lists and scalars.
        lines: Line of every key or list entry, from 1, by key path.
    """

    file: str
    data: dict[str, Any]
    lines: dict[KeyPath, int] = field(default_factory=dict)

    def line(self, path: KeyPath) -> int | None:
        """The line of ``path``, or of the nearest of its parents that stands in the file."""
        while path:
            if path in self.lines:
                return self.lines[path]
            path = path[:-1]
        return None


def read_document(path: Path) -> Document:
    """Read a YAML 1.2 file: ``no`` and ``on`` are text, a repeated key is an error.

    Raises:
        ConfigError: not readable, not UTF-8, empty, tabs, a repeated key, or no mapping.
    """
    name = str(path)
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(name, "", name, f"a readable file ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise ConfigError(name, "", f"byte {error.start}", "text in UTF-8") from None
    loaded = parse(text, name)
    if loaded is None:
        raise ConfigError(
            name, "", "nothing but comments or blanks", "at least one key, for example 'target:'"
        )
    if not isinstance(loaded, CommentedMap):
        raise ConfigError(
            name, "", type(loaded).__name__, "a mapping of sections such as 'target:' and 'domains:'"
        )
    lines: dict[KeyPath, int] = {}
    return Document(name, _plain(loaded, (), name, lines), lines)


def parse(text: str, name: str) -> Any:
    """YAML text as ruamel's commented containers; ``name`` is for messages."""
    yaml = YAML(typ="rt", pure=True)
    yaml.allow_duplicate_keys = False
    try:
        return yaml.load(text)
    except DuplicateKeyError as error:
        mark = error.problem_mark
        raise ConfigError(
            name, "", _first_line(error.problem), "each key once in its mapping", line=mark and mark.line + 1
        ) from None
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else None
        raise ConfigError(name, "", _first_line(error.problem), _hint(text, line), line=line) from None
    except YAMLError as error:
        raise ConfigError(name, "", _first_line(str(error)), "YAML text") from None


def _hint(text: str, line: int | None) -> str:
    shown = text.splitlines()[line - 1] if line and line <= len(text.splitlines()) else ""
    if "\t" in shown[: len(shown) - len(shown.lstrip())] or "\t" in shown:
        return "YAML 1.2 with spaces: indent by spaces, not by tabs"
    return "YAML 1.2; put text with special characters in quotes"


def _first_line(text: object) -> str:
    lines = str(text or "").strip().splitlines()
    return lines[0] if lines else "unreadable YAML"


def _plain(node: Any, path: KeyPath, file: str, lines: dict[KeyPath, int]) -> Any:
    """Containers as ``dict`` and ``list``, lines noted on the way; dates and odd keys refused."""
    for key, child_line in _places(node):
        lines[(*path, key)] = child_line
    if isinstance(node, CommentedMap):
        result: dict[str, Any] = {}
        for key, value in node.items():
            if not isinstance(key, str):
                at = node.lc.data[key][0] + 1 if key in node.lc.data else None
                raise ConfigError(file, shown(path), key, f"a key that is text; quote it: '{key}'", line=at)
            result[key] = _plain(value, (*path, key), file, lines)
        return result
    if isinstance(node, CommentedSeq):
        return [_plain(value, (*path, index), file, lines) for index, value in enumerate(node)]
    if isinstance(node, (datetime.date, datetime.time)):
        raise ConfigError(file, shown(path), str(node), f"text in quotes: '{node}'", line=lines.get(path))
    if isinstance(node, bool) or node is None:
        return node
    for kind in (int, float, str):
        if isinstance(node, kind):
            return kind(node)
    raise ConfigError(
        file, shown(path), str(node), "text, a number, true, false or null", line=lines.get(path)
    )


def _places(node: Any) -> Iterator[tuple[str | int, int]]:
    if isinstance(node, (CommentedMap, CommentedSeq)):
        for key, place in (node.lc.data or {}).items():
            if isinstance(key, (str, int)):
                yield key, place[0] + 1


def shown(path: KeyPath) -> str:
    """A key path as people write it: ``domains[2].name``."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text
