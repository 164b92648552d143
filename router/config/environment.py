"""Overrides from the environment: ``POLYDRAFT__ENGINE__SLOTS=4`` is ``engine.slots: 4``."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from router.config.error import ConfigError
from router.config.read import KeyPath, parse
from router.config.schema import keys_at, nearest

PREFIX = "POLYDRAFT__"

log = logging.getLogger(__name__)


def apply_environment(data: dict[str, Any], environment: Mapping[str, str]) -> dict[KeyPath, str]:
    """Set what the environment overrides, in place; returns which variable set which key path.

    Values are read as YAML scalars, so ``null``, ``true`` and numbers are what they look like. A
    variable that begins like ours but names nothing is reported: it would otherwise do nothing and
    look as if it did.

    Raises:
        ConfigError: a variable names no key; says the nearest one.
    """
    origins: dict[KeyPath, str] = {}
    for variable, text in sorted(environment.items()):
        if not variable.startswith(PREFIX):
            if variable.startswith("POLYDRAFT_"):
                log.warning("%s sets nothing; an override is written %sSECTION__KEY", variable, PREFIX)
            continue
        path = tuple(part.lower() for part in variable[len(PREFIX) :].split("__"))
        _check(variable, path)
        section = data
        for part in path[:-1]:
            inner = section.setdefault(part, {})
            if not isinstance(inner, dict):
                inner = section[part] = {}
            section = inner
        section[path[-1]] = _value(variable, text)
        origins[path] = variable
    return origins


def _check(variable: str, path: tuple[str, ...]) -> None:
    for depth, part in enumerate(path):
        known = keys_at(path[:depth])
        if part not in known:
            right = nearest(part, known)
            meant = f"; did you mean {PREFIX}{'__'.join((*path[:depth], right)).upper()}?" if right else ""
            raise ConfigError("environment", variable, part, f"one of {', '.join(known) or 'no keys'}{meant}")


def _value(variable: str, text: str) -> Any:
    value = parse(text, variable)
    if isinstance(value, bool) or value is None or isinstance(value, (int, float)):
        return value
    if isinstance(value, list):
        return [str(item) if isinstance(item, str) else item for item in value]
    return text
