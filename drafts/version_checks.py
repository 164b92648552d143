"""What a version must satisfy before it is published."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import torch

from drafts.errors import InvalidValueError

_DOMAIN = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}(\.[a-z]{1,32})?")


def is_domain_name(domain: str) -> bool:
    """Whether the name, or the key of one of its experts, is safe as a folder and as a metric label."""
    return _DOMAIN.fullmatch(domain) is not None


def check_domain_name(domain: str) -> None:
    """Raise :class:`InvalidValueError` unless :func:`is_domain_name`."""
    if not is_domain_name(domain):
        allowed = "1 to 64 of a-z, 0-9, '_' and '-', beginning with a letter or digit"
        raise InvalidValueError("domain", domain, allowed)


def check_same_form(
    field: str, tensors: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]
) -> None:
    """Raise unless names and shapes are those of ``wanted``: a partial update ruins a draft (case A27)."""
    missing, extra = sorted(set(wanted) - set(tensors)), sorted(set(tensors) - set(wanted))
    if missing or extra:
        allowed = f"the parent's names (missing: {missing}, extra: {extra})"
        raise InvalidValueError(field, sorted(tensors), allowed)
    for name, tensor in tensors.items():
        if tensor.shape != wanted[name].shape:
            allowed = f"the parent's shape {tuple(wanted[name].shape)}"
            raise InvalidValueError(f"{field}.{name}", tuple(tensor.shape), allowed)


def check_same_tables(
    field: str, tensors: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]
) -> None:
    """Raise unless whole numbers are those of ``wanted``: they are what one deployment has one of (case A21).

    That is a draft vocabulary's ids, or the fingerprint of an adapter's model. Forms are equal already.
    """
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() and not torch.equal(tensor.long(), wanted[name].long()):
            raise InvalidValueError(f"{field}.{name}", "another table", "the table in use")


def check_finite(field: str, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise if any value is NaN or infinite (case A29)."""
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise InvalidValueError(f"{field}.{name}", "NaN or infinite values", "finite values only")


def check_share(field: str, value: object) -> None:
    """Raise unless ``value`` is a number from 0 to 1."""
    if not isinstance(value, int | float) or not math.isfinite(value) or not 0.0 <= value <= 1.0:
        raise InvalidValueError(field, value, "a share, 0 to 1")
