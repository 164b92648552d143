"""``response_format`` of the OpenAI API, as the engine's own :class:`osd.types.ResponseFormat`."""

from __future__ import annotations

from typing import Any

from drafts.errors import InvalidValueError
from osd.types import ResponseFormat

KINDS = ("text", "json_object", "json_schema")
_SCHEMA_FIELDS = ("name", "description", "schema", "strict")


def response_format(value: dict[str, Any] | None) -> ResponseFormat | None:
    """The constraint that ``value`` asks for, ``None`` for free text.

    A schema always binds: ``strict: false``, which lets OpenAI's models stray from it, asks for less than
    it gets here.

    Raises:
        InvalidValueError: Not one of the three kinds, or a ``json_schema`` without a name or a schema.
    """
    if value is None:
        return None
    kind = value.get("type")
    if kind not in KINDS:
        raise InvalidValueError("response_format.type", kind, f"one of {', '.join(KINDS)}")
    known = ("type", "json_schema") if kind == "json_schema" else ("type",)
    _refuse_unknown("response_format", value, known)
    if kind == "text":
        return None
    if kind == "json_object":
        return ResponseFormat(kind="json_object", json_schema=None)
    return ResponseFormat(kind="json_schema", json_schema=_schema(value.get("json_schema")))


def _schema(wrapper: object) -> dict[str, Any]:
    field = "response_format.json_schema"
    if not isinstance(wrapper, dict):
        raise InvalidValueError(field, wrapper, f"an object with {', '.join(_SCHEMA_FIELDS)}")
    _refuse_unknown(field, wrapper, _SCHEMA_FIELDS)
    name, schema, strict = wrapper.get("name"), wrapper.get("schema"), wrapper.get("strict")
    if not isinstance(name, str) or not 1 <= len(name) <= 64:
        raise InvalidValueError(f"{field}.name", name, "a string of 1..64 characters")
    if not isinstance(schema, dict):
        raise InvalidValueError(f"{field}.schema", schema, "a JSON schema, which is an object")
    if strict is not None and not isinstance(strict, bool):
        raise InvalidValueError(f"{field}.strict", strict, "true or false")
    return schema


def _refuse_unknown(field: str, value: dict[str, Any], known: tuple[str, ...]) -> None:
    for name in value:
        if name not in known:
            raise InvalidValueError(f"{field}.{name}", value[name], f"only {', '.join(known)}")
