"""Decoding parameters from what a caller passes, with errors that name field, value and what is allowed."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from drafts.errors import InvalidValueError
from osd.types import SamplingParams


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
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        allowed = first["msg"]
        if not first["loc"]:  # two fields that contradict each other: the message names one
            field, _, allowed = str(first["ctx"]["error"]).partition(": ")
            raise InvalidValueError(field, values.get(field), allowed) from error
        if first["type"] == "extra_forbidden":
            allowed = f"one of {', '.join(SamplingParams.model_fields)}"
        raise InvalidValueError(field, first["input"], allowed) from error
