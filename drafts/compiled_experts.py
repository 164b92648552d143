"""Experts in the form that the compiled head reads: float16, in the tiles of the products they change.

A copy is made when an expert is first used after it changed. It never moves, so rows may name it by address.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from drafts.bank import Expert, ExpertBank
from drafts.native import steps
from drafts.native.low_rank import padded_rank
from drafts.native.tiles import OUTPUTS
from drafts.native.vectors import LANES

PARTS = ("gate_up", "down", "output")
"""Products that experts change, in the order of the tables."""


@dataclass(frozen=True)
class _Packed:
    """One expert by part: A ``[in, rank]`` and B ``[tiles, rank, 32]``, both float16."""

    stamp: int
    a: list[Tensor]
    b: list[Tensor]


class CompiledExperts:
    """The bank's experts, packed.

    Args:
        bank: The experts.
        rows: Most rows of a pass.
    """

    def __init__(self, bank: ExpertBank, rows: int) -> None:
        self.bank = bank
        self.rank = padded_rank(bank.rank)
        self._packed: dict[int, _Packed] = {}
        self._inputs = torch.zeros(len(PARTS), rows, self.rank + LANES, dtype=torch.float32)
        self._inputs[-1, :, self.rank] = 1.0

    def tables(self, slots: list[int]) -> tuple[np.ndarray, np.ndarray] | None:
        """Tables of deltas ``[parts, R, DELTA_WIDTH]`` and of A matrices ``[parts, R]``, both int64.

        Returns:
            ``None`` where no row's expert differs from the trunk.
        """
        found = {slot: self._expert(slot) for slot in set(slots)}
        if all(packed is None for packed in found.values()):
            return None
        deltas = np.zeros((len(PARTS), len(slots), steps.DELTA_WIDTH), dtype=np.int64)
        matrices = np.zeros((len(PARTS), len(slots)), dtype=np.int64)
        for row, slot in enumerate(slots):
            packed = found[slot]
            if packed is None:
                continue
            for part in range(len(PARTS)):
                inputs = self._inputs[part, row].data_ptr()
                deltas[part, row] = packed.b[part].data_ptr(), inputs, packed.b[part].shape[1]
                matrices[part, row] = packed.a[part].data_ptr()
        return deltas, matrices

    def bytes(self, slot: int) -> int:
        """Memory of a slot's packed copy; 0 where there is none."""
        packed = self._packed.get(slot)
        if packed is None or packed.stamp != self.bank.stamp(slot):
            return 0
        return sum(tensor.numel() * tensor.element_size() for tensor in (*packed.a, *packed.b))

    def _expert(self, slot: int) -> _Packed | None:
        view = self.bank.view(slot)
        if view is None:
            self._packed.pop(slot, None)
            return None
        stamp = self.bank.stamp(slot)
        packed = self._packed.get(slot)
        if packed is None or packed.stamp != stamp:
            self._forget_old()
            packed = self._packed[slot] = self._pack(view, stamp)
        return packed

    def _forget_old(self) -> None:
        """Let go of copies that no longer hold, as of experts that were dropped."""
        for slot in [s for s, packed in self._packed.items() if packed.stamp != self.bank.stamp(s)]:
            del self._packed[slot]

    def _pack(self, expert: Expert, stamp: int) -> _Packed:
        halves = {name: tensor.float().clamp(-65504.0, 65504.0).half() for name, tensor in expert.items()}
        missing = self.rank - self.bank.rank
        a = [torch.nn.functional.pad(halves[f"{part}_a"], (0, missing)).contiguous() for part in PARTS]
        gate, up = halves["gate_up_b"].chunk(2, dim=1)
        output = torch.cat(
            (torch.nn.functional.pad(halves["output_b"], (0, 0, 0, missing)), halves["output_bias"][None])
        )
        b = [
            torch.stack((_tiled(gate), _tiled(up)), 1).flatten(0, 1),
            _tiled(halves["down_b"]),
            _tiled(output),
        ]
        return _Packed(stamp, a, [tensor.contiguous() for tensor in b])


def _tiled(b: Tensor) -> Tensor:
    """``[rank, out] -> [tiles, rank, 32]``, filled up with zeros."""
    filled = torch.nn.functional.pad(b, (0, -b.shape[1] % OUTPUTS))
    return filled.view(len(b), -1, OUTPUTS).transpose(0, 1)
