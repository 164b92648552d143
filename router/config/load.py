"""Loading a config: file, environment, checks; every error says where and what is allowed."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from drafts.errors import InvalidValueError
from router.config.environment import apply_environment
from router.config.error import ConfigError
from router.config.examples import read_examples
from router.config.models import PolydraftConfig
from router.config.packaged import find_config
from router.config.read import Document, KeyPath, read_document, shown
from router.config.schema import config_schema, keys_at, nearest

__all__ = ["config_schema", "load_config"]

_PATHS: tuple[KeyPath, ...] = (
    ("target", "model"),
    ("target", "cache_dir"),
    ("drafts", "eagle", "trunk"),
    ("drafts", "model", "path"),
    ("router", "embedder"),
    ("state", "dir"),
)
"""Values that may be paths; relative to the config file."""


def load_config(path: str | Path, environment: Mapping[str, str] | None = None) -> PolydraftConfig:
    """The config in the file at ``path``, or the packaged one of that name (``demo``).

    Relative paths are resolved against the file, examples are read in, and what a domain does not
    say of its learner and buffer is taken from ``learn``.

    Args:
        path: File, or name of a packaged config.
        environment: Overrides (see :mod:`router.config.environment`); the process's own by default.

    Raises:
        ConfigError: anything wrong in the file or in an override.
        UnknownNameError: no such file or packaged config.
    """
    file = find_config(path)
    document = read_document(file)
    data = document.data
    origins = apply_environment(data, os.environ if environment is None else environment)
    _inherit(data)
    _resolve(data, file.resolve().parent)
    read_examples(document, file.resolve().parent)
    try:
        return PolydraftConfig.model_validate_json(json.dumps(data), strict=True)
    except ValidationError as error:
        raise _config_error(document, origins, error) from None


def _inherit(data: dict[str, Any]) -> None:
    """Complete each domain's learner and buffer from the general ones."""
    general = data.get("learn")
    general = general if isinstance(general, dict) else {}
    domains = data.get("domains")
    for domain in domains if isinstance(domains, list) else ():
        if not isinstance(domain, dict):
            continue
        if isinstance(domain.get("learner"), dict):
            domain["learner"] = _merged(general, domain["learner"])
        if isinstance(domain.get("buffer"), dict):
            shared = general.get("buffer")
            domain["buffer"] = _merged(shared if isinstance(shared, dict) else {}, domain["buffer"])


def _merged(general: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    result = dict(general)
    for key, value in own.items():
        below = result.get(key)
        result[key] = _merged(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return result


def _resolve(data: dict[str, Any], folder: Path) -> None:
    """Make paths absolute. A model's name is a path only where such a folder exists."""
    for *sections, key in _PATHS:
        node: Any = data
        for section in sections:
            node = node.get(section) if isinstance(node, dict) else None
        _resolve_key(node, str(key), folder)
    domains = data.get("domains")
    for domain in domains if isinstance(domains, list) else ():
        if isinstance(domain, dict):
            _resolve_key(domain.get("draft"), "path", folder)


def _resolve_key(node: Any, key: str, folder: Path) -> None:
    value = node.get(key) if isinstance(node, dict) else None
    if not isinstance(value, str) or not value:
        return
    path = Path(value).expanduser()
    if key in ("dir", "cache_dir") or (folder / path).exists() or value.startswith(("./", "../", "~")):
        node[key] = str(folder / path)


def _config_error(document: Document, origins: dict[KeyPath, str], error: ValidationError) -> ConfigError:
    """The first error as a :class:`ConfigError`, the others as its further lines."""
    found: dict[KeyPath, ConfigError] = {}
    for detail in error.errors(include_url=False):
        path = _real_path(document.data, detail["loc"])
        item = _one_error(document, origins, path, detail)
        before = found.get(path)
        if before is not None:
            allowed = f"{before.allowed} or {item.allowed}"
            item = ConfigError(item.file, item.field, item.value, allowed, line=item.line)
        found[path] = item
    first, *rest = found.values()
    others = [str(item) for item in rest]
    return ConfigError(first.file, first.field, first.value, first.allowed, line=first.line, others=others)


def _one_error(
    document: Document, origins: dict[KeyPath, str], path: KeyPath, detail: ErrorDetails
) -> ConfigError:
    value, allowed = detail["input"], detail["msg"]
    cause = detail.get("ctx", {}).get("error")
    if isinstance(cause, InvalidValueError):
        path = (*path, *_inner_path(path, cause.field))
        value, allowed = cause.value, cause.allowed
    elif detail["type"] == "extra_forbidden":
        known = keys_at(path[:-1])
        right = nearest(str(path[-1]), known)
        allowed = f"did you mean {right!r}?" if right else f"no such key here; known: {', '.join(known)}"
    elif detail["type"] == "missing":
        value, allowed = None, "this key is required"
    elif detail["type"] == "string_type":
        allowed = f"text; put it in quotes: '{_as_written(value)}'"
    elif detail["type"] == "string_pattern_mismatch":
        allowed = f"text of the form {detail['ctx']['pattern']}"
    variable = origins.get(path)
    if variable is not None:
        return ConfigError("environment", variable, value, allowed)
    return ConfigError(document.file, shown(path), value, allowed, line=document.line(path))


def _inner_path(path: KeyPath, field: str) -> KeyPath:
    """What the error of a validator adds to the place that pydantic reports."""
    parts: list[str | int] = []
    for part in field.replace("[", ".[").split("."):
        parts.append(int(part[1:-1]) if part.startswith("[") else part)
    while parts and path and parts[0] == path[-1]:
        parts.pop(0)
    return tuple(parts)


def _real_path(data: Any, loc: tuple[str | int, ...]) -> KeyPath:
    """The location without the names of union branches, which pydantic puts into it."""
    path: list[str | int] = []
    for index, part in enumerate(loc):
        inside = (isinstance(data, dict) and part in data) or (
            isinstance(data, list) and isinstance(part, int) and part < len(data)
        )
        if inside:
            data = data[part]
            path.append(part)
        elif isinstance(data, dict) and index == len(loc) - 1:
            path.append(part)
    return tuple(path)


def _as_written(value: object) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
