"""Draft kinds, one file each: a new kind is one file and one name registered here."""

from __future__ import annotations

from importlib import import_module

from drafts.errors import InvalidValueError, UnknownNameError
from drafts.kinds.base import Source

_KINDS: dict[str, str] = {}


def register(name: str, target: str) -> None:
    """Make ``target`` (``module:Class``, imported on first use) known as draft kind ``name``."""
    if name in _KINDS:
        raise InvalidValueError("draft kind", name, f"a name not yet taken; it means {_KINDS[name]}")
    _KINDS[name] = target


def names() -> list[str]:
    """Registered kinds, sorted."""
    return sorted(_KINDS)


def source_class(name: str, field: str = "draft kind") -> type[Source]:
    """The class of a kind; an unknown ``name`` raises an error that names ``field`` and the known kinds."""
    if name not in _KINDS:
        raise UnknownNameError(field, name, names())
    module, _, attribute = _KINDS[name].partition(":")
    found: type[Source] = getattr(import_module(module), attribute)
    return found


for _kind in ("lookup", "ngram", "eagle", "model"):
    register(_kind, f"drafts.kinds.{_kind}:{_kind.capitalize()}Source")
