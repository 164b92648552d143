"""The pool of recent requests that fit no domain, from which new domains are born."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from router.mind.embed import Vector


@dataclass(frozen=True)
class PoolItem:
    """One request that fitted no domain, with its answer.

    Attributes:
        text: What the router read.
        vector: Its embedding, unit length ``[d]``.
        request_id: The request.
        prompt_ids: Its prompt as token ids.
        output_ids: The answer, from which a new domain's memory can learn at once.
    """

    text: str
    vector: Vector
    request_id: str
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]

    def as_dict(self) -> dict[str, Any]:
        """Everything but the vector, which the text gives again."""
        return {
            "text": self.text,
            "request_id": self.request_id,
            "prompt_ids": list(self.prompt_ids),
            "output_ids": list(self.output_ids),
        }


class UnknownPool:
    """The latest unknown requests; the oldest gives way.

    Args:
        window: Most requests kept.
    """

    def __init__(self, window: int) -> None:
        self._items: deque[PoolItem] = deque(maxlen=window)

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[PoolItem]:
        return iter(self._items)

    @property
    def vectors(self) -> Vector:
        """Embeddings ``[n, d]``, oldest first."""
        if not self._items:
            return np.zeros((0, 0), dtype=np.float32)
        return np.stack([item.vector for item in self._items])

    def add(self, item: PoolItem) -> None:
        """Take in one request."""
        self._items.append(item)

    def remove(self, indices: Iterable[int]) -> list[PoolItem]:
        """Take out the requests at these places, oldest first."""
        gone = set(indices)
        items = list(self._items)
        self._items.clear()
        self._items.extend(item for index, item in enumerate(items) if index not in gone)
        return [item for index, item in enumerate(items) if index in gone]
