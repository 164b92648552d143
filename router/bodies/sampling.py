"""Decoding parameters from what a caller passes, with errors that name field, value and what is allowed."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from drafts.errors import InvalidValueError
from osd.types import SamplingParams
from router.bodies.allowed import allowed_at


def sampling_params(values: dict[str, Any]) -> SamplingParams:
    """Decoding parameters from keyword arguments.

    Raises:
        InvalidValueError: An unknown or impossible one, named with its value and what is allowed.
    """
    if isinstance(values.get("stop"), str):
        values = {**values, "stop": (values["stop"],)}
    try:
        return SamplingParams(**{key: value for key, value in values.items() if value is not None})
    except ValidationError as error:
        raise _named(error) from error


def _named(error: ValidationError) -> InvalidValueError:
    first = error.errors()[0]
    place = first["loc"]
    if not place or first["type"] == "value_error":
        field, _, allowed = str(first["ctx"]["error"]).partition(": ")
        return InvalidValueError(".".join(str(part) for part in (*place, field)), first["input"], allowed)
    allowed = (len(place) == 1 and allowed_at(SamplingParams, place)) or first["msg"]
    return InvalidValueError(".".join(str(part) for part in place), first["input"], allowed)
