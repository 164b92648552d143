"""One record of the distillation buffer: positions of a finished answer, ready to train on.

Deltas sit behind the attention, so the head's hidden state after it depends on the trunk alone. It is
computed once, when the record is scored, and kept in half precision instead of the three times wider
features; a record is valid for one trunk (its fingerprint is saved with the buffer).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property

import torch


@dataclass(frozen=True)
class BufferRecord:
    """P positions of one answer.

    Attributes:
        number: Order of arrival within the domain, from 0.
        created: Unix time, seconds.
        version: Version of the domain's expert it was scored with.
        greedy: Whether the request was decoded greedily.
        positions: int32 ``[P]``, output position of each row (0 = first output token).
        hidden: ``[P, W]``, what the head reads at the base that predicts the position: float16 after
            attention, or int32 ids of the context (a draft model).
        emitted: int32 ``[P]``, the token the target emitted there.
        top_ids: int32 ``[P, K]``, most probable ids of the target's raw distribution.
        top_logprobs: float16 ``[P, K]``.
        right: bool ``[P]``, whether the scored version's argmax was the emitted token.
        boundaries: int32 ``[rounds]``, output tokens committed after each round.
    """

    number: int
    created: float
    version: int
    greedy: bool
    positions: torch.Tensor
    hidden: torch.Tensor
    emitted: torch.Tensor
    top_ids: torch.Tensor
    top_logprobs: torch.Tensor
    right: torch.Tensor
    boundaries: torch.Tensor

    @property
    def size(self) -> int:
        """Number of positions."""
        return len(self.positions)

    @cached_property
    def nbytes(self) -> int:
        """Memory of its tensors."""
        return sum(t.numel() * t.element_size() for t in self.tensors().values())

    @cached_property
    def ends(self) -> torch.Tensor:
        """bool ``[P]``: whether a position is the last of its round, where a draft was corrected or ran out.

        These are the one position a round that OSD (arXiv 2310.07177, Algorithm 1) calls wrong.
        """
        return torch.isin(self.positions.long(), self.boundaries.long() - 1)

    @property
    def agreement(self) -> float:
        """Share of positions the scored version had right; 0 for an empty record."""
        return float(self.right.float().mean()) if self.size else 0.0

    def tensors(self) -> dict[str, torch.Tensor]:
        """Its tensors by name."""
        found = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}
