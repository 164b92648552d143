"""The JSON schema of a config, and which keys are valid where in it."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

from router.config.models import PolydraftConfig
from router.config.read import KeyPath


@cache
def _schema() -> dict[str, Any]:
    return PolydraftConfig.model_json_schema()


def config_schema() -> dict[str, Any]:
    """The JSON schema of config files, for editors and ``polydraft config schema``."""
    return PolydraftConfig.model_json_schema()


def keys_at(path: KeyPath) -> list[str]:
    """The valid keys of the mapping at ``path``; none if there is no mapping."""
    nodes = [_schema()]
    for part in path:
        nodes = [child for node in nodes for variant in _variants(node) for child in _children(variant, part)]
    return sorted(
        {key for node in nodes for variant in _variants(node) for key in variant.get("properties", {})}
    )


def nearest(key: str, known: Sequence[str]) -> str | None:
    """The valid key that a misspelt one probably meant."""
    found = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    return found[0] if found else None


def _children(node: dict[str, Any], part: str | int) -> Iterator[dict[str, Any]]:
    if isinstance(part, int):
        if "items" in node:
            yield node["items"]
    elif part in node.get("properties", {}):
        yield node["properties"][part]


def _variants(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The node itself with references followed, or the alternatives it stands for."""
    if "$ref" in node:
        yield from _variants(_schema()["$defs"][node["$ref"].rsplit("/", 1)[1]])
    elif "anyOf" in node:
        for option in node["anyOf"]:
            yield from _variants(option)
    else:
        yield node
