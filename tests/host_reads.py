"""Counts what the host reads of tensors, so that waits for a device show on a processor."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

READS = (
    "item",
    "tolist",
    "numpy",
    "cpu",
    "nonzero",
    "masked_select",
    "unique",
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
    "__array__",
    "__contains__",
)
"""Methods of a tensor that cannot return before the device has."""

counts: Counter[str] = Counter()
_counting = threading.local()


class Watched(torch.Tensor):
    """A tensor, and whatever is computed from it, whose reads are counted in :data:`counts`."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = getattr(func, "__name__", "")
        to_host = name in READS or (name == "to" and "cpu" in map(str, (*args[1:], *(kwargs or {}).values())))
        by_mask = name == "__getitem__" and _has_mask(args[1])
        outermost = not getattr(_counting, "inside", False)
        if outermost and (to_host or by_mask):
            counts[name] += 1
        _counting.inside = True
        try:
            return super().__torch_function__(func, types, args, kwargs or {})
        finally:
            if outermost:
                _counting.inside = False


def _has_mask(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, torch.Tensor) and part.dtype == torch.bool for part in parts)


def watched(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, watched; forgets what was counted so far."""
    counts.clear()
    return tensor.as_subclass(Watched)
