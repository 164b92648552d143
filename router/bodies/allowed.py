"""What a field of a model takes, in words: types and the whole range, not only the bound that was passed."""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen
from pydantic import BaseModel
from pydantic.fields import FieldInfo

_WORDS: dict[Any, tuple[str, str]] = {
    bool: ("true or false", "booleans"),
    int: ("a whole number", "whole numbers"),
    float: ("a number", "numbers"),
    str: ("a string", "strings"),
}


def allowed(field: FieldInfo) -> str:
    """What ``field`` takes, for example ``a number in 0..2`` or ``a list of strings of length at most 4``."""
    return " ".join(filter(None, (_words(field.annotation), _range(field))))


def allowed_at(model: type[BaseModel], path: Sequence[str | int]) -> str | None:
    """What the field of ``model`` at ``path`` takes; ``None`` where the model has no such field."""
    field: FieldInfo | None = None
    for part in path:
        if isinstance(part, str) and part in model.model_fields:
            field = model.model_fields[part]
        elif field is None or _model_of(field.annotation) is model:
            return f"one of {', '.join(model.model_fields)}"
        nested = _model_of(field.annotation)
        model = model if nested is None else nested
    return None if field is None else allowed(field)


def _members(annotation: Any) -> list[Any]:
    """The members of a union but null, or the type itself."""
    if get_origin(annotation) in (Union, types.UnionType):
        return [member for member in get_args(annotation) if member is not type(None)]
    return [annotation]


def _model_of(annotation: Any) -> type[BaseModel] | None:
    for member in _members(annotation):
        if isinstance(member, type) and issubclass(member, BaseModel):
            return member
    return None


def _words(annotation: Any, plural: bool = False) -> str:
    return " or ".join(_word(member, plural) for member in _members(annotation))


def _word(kind: Any, plural: bool) -> str:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _word(arguments[0], plural)
    if origin is Literal:
        return " or ".join(repr(value) for value in arguments)
    if kind in _WORDS:
        return _WORDS[kind][plural]
    shape = origin or kind
    if isinstance(shape, type) and issubclass(shape, (list, tuple)):
        items = f" of {_words(arguments[0], plural=True)}" if arguments else ""
        return f"{'lists' if plural else 'a list'}{items}"
    if isinstance(shape, type) and issubclass(shape, (Mapping, BaseModel)):
        return "objects" if plural else "an object"
    return "values" if plural else "a value"


def _range(field: FieldInfo) -> str:
    low = high = ""
    above = below = False
    length: dict[str, int] = {}
    for item in field.metadata:
        if isinstance(item, (Ge, Gt)):
            above = isinstance(item, Gt)
            low = _number(item.gt if isinstance(item, Gt) else item.ge)
        elif isinstance(item, Lt) and int in _members(field.annotation):
            high = str(int(str(item.lt)) - 1)
        elif isinstance(item, (Le, Lt)):
            below = isinstance(item, Lt)
            high = _number(item.lt if isinstance(item, Lt) else item.le)
        elif isinstance(item, MinLen):
            length["at least"] = item.min_length
        elif isinstance(item, MaxLen):
            length["at most"] = item.max_length
    if length:
        return f"of length {' and '.join(f'{word} {size}' for word, size in length.items())}"
    if low and high and not above and not below:
        return f"in {low}..{high}"
    parts = [f"{'above' if above else 'at least'} {low}" if low else ""]
    parts.append(f"{'below' if below else 'at most'} {high}" if high else "")
    return " and ".join(filter(None, parts))


def _number(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
