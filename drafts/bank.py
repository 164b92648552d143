"""The expert bank: every domain's low-rank deltas on the shared trunk, stacked in tensors ``[experts, …]``.

Deltas touch the MLP and the output only, never queries, keys or values. So one draft cache serves every
expert and every version: switching or swapping rebuilds nothing, and hidden states kept for learning stay
valid. B starts at zero (LoRA, Hu et al. 2106.09685), hence a new expert *is* the trunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F

from drafts.errors import CheckpointError, UnknownNameError
from drafts.transfer import sent
from drafts.trunk import Trunk

Expert = dict[str, torch.Tensor]
"""One expert's deltas by name: ``*_a [in, rank]``, ``*_b [rank, out]``, ``output_bias [V]``."""

NO_EXPERT = 0
"""Slot of the trunk itself; serves any domain the bank does not know."""

Rank = int | Literal["full"]
"""Rank of deltas; ``"full"`` is the hidden size, which is the rank of every matrix that experts change. So
an expert can then be any MLP and any output matrix: a full copy, kept as its difference from the trunk."""

TABLE = "token_ids"
"""Name of the draft vocabulary's id table, which travels with every expert (case A21)."""


def low_rank(x: torch.Tensor, expert: Expert, part: str) -> torch.Tensor:
    """``x [N, in] -> [N, out]`` through one part's delta of one expert."""
    return (x @ expert[f"{part}_a"]) @ expert[f"{part}_b"]


def expert_mlp(trunk: Trunk, hidden: torch.Tensor, expert: Expert | None) -> torch.Tensor:
    """The MLP with its residual and one expert's deltas, ``[N, H] -> [N, H]``."""
    normed = trunk.norm(hidden, "mlp_norm")
    both = trunk.product(normed, trunk.tensors["gate_up"])
    if expert is not None:
        both = both + low_rank(normed, expert, "gate_up")
    gate, up = both.chunk(2, dim=-1)
    inner = F.silu(gate) * up
    down = trunk.product(inner, trunk.tensors["down"])
    if expert is not None:
        down = down + low_rank(inner, expert, "down")
    return hidden + down


def expert_logits(
    trunk: Trunk, output: torch.Tensor, hidden: torch.Tensor, expert: Expert | None
) -> torch.Tensor:
    """Logits over the draft vocabulary ``[N, V]``; ``output [V, H]`` are the target's rows of it."""
    normed = trunk.norm(hidden, "final_norm")
    logits = trunk.product(normed, output) + trunk.tensors["output_bias"]
    if expert is None:
        return logits
    return logits + low_rank(normed, expert, "output") + expert["output_bias"]


class ExpertBank:
    """Stacked experts with free capacity; adding, cloning or dropping one moves no other.

    Args:
        trunk: The trunk the experts belong to.
        rank: Rank of every delta.
        capacity: Slots allocated at first; doubled when none is free.
    """

    def __init__(self, trunk: Trunk, rank: Rank = 16, capacity: int = 8) -> None:
        shape = trunk.shape
        self.trunk = trunk
        self.rank = rank = shape.hidden_size if rank == "full" else rank
        sizes = {
            "gate_up": (shape.hidden_size, 2 * shape.intermediate_size),
            "down": (shape.intermediate_size, shape.hidden_size),
            "output": (shape.hidden_size, len(trunk.token_ids)),
        }
        generator = torch.Generator().manual_seed(0)
        self._blank: Expert = {}
        for part, (size_in, size_out) in sizes.items():
            draw = torch.randn(size_in, rank, generator=generator) * size_in**-0.5
            self._blank[f"{part}_a"] = draw.to(trunk.token_ids.device)
            self._blank[f"{part}_b"] = torch.zeros(rank, size_out, device=trunk.token_ids.device)
        self._blank["output_bias"] = torch.zeros_like(trunk.tensors["output_bias"])
        self._slots: dict[str, int] = {}
        self._asked: tuple[tuple[int, ...], torch.Tensor] = ((), torch.empty(0, dtype=torch.int64))
        self._trained: list[bool] = [False] * (capacity + 1)
        self._stamps: list[int] = [0] * (capacity + 1)
        self._stacked = {n: t.expand(capacity + 1, *t.shape).clone() for n, t in self._blank.items()}

    @property
    def domains(self) -> list[str]:
        """Domains that have an expert of their own."""
        return list(self._slots)

    @property
    def bytes_per_expert(self) -> int:
        """Memory of one expert's deltas."""
        return sum(t.numel() * t.element_size() for t in self._blank.values())

    def __contains__(self, domain: str) -> bool:
        return domain in self._slots

    def index(self, domain: str) -> int:
        """Slot of a domain's expert; the trunk's own for a domain without one."""
        return self._slots.get(domain, NO_EXPERT)

    def add(self, domain: str, parent: str | None = None) -> None:
        """Give ``domain`` an expert: a copy of ``parent``'s, or the trunk unchanged.

        A domain that already has one keeps it.
        """
        if domain in self._slots:
            return
        used = set(self._slots.values())
        free = next((i for i in range(1, len(self._trained)) if i not in used), None)
        if free is None:
            free = len(self._trained)
            self._grow()
        source = self.index(parent) if parent is not None else NO_EXPERT
        for stacked in self._stacked.values():
            stacked[free] = stacked[source]
        self._trained[free] = self._trained[source]
        self._stamps[free] += 1
        self._slots[domain] = free

    def drop(self, domain: str) -> None:
        """Forget a domain's expert; its slot is free again."""
        slot = self._slots.pop(domain, None)
        if slot is not None:
            self._trained[slot] = False
            self._stamps[slot] += 1

    def load(self, domain: str, tensors: Expert) -> None:
        """Serve ``tensors`` as the domain's expert from now on.

        Raises:
            UnknownNameError: The domain has no expert.
            CheckpointError: A tensor is missing, unknown, of another shape, or not finite, or the id
                table is not this trunk's; the bank is unchanged.
        """
        if domain not in self._slots:
            raise UnknownNameError("domain", domain, self.domains)
        self.check(tensors)
        slot = self._slots[domain]
        for name, stacked in self._stacked.items():
            stacked[slot] = tensors[name].to(stacked)
        self._trained[slot] = True
        self._stamps[slot] += 1

    def check(self, tensors: Expert) -> None:
        """Raise :class:`CheckpointError` unless ``tensors`` could be loaded (cases A21, A27, A29)."""
        expected = {**{n: tuple(t.shape) for n, t in self._blank.items()}, TABLE: self.trunk.token_ids.shape}
        for name in sorted({*expected, *tensors}):
            if name not in tensors:
                raise CheckpointError(f"expert lacks the tensor {name!r}")
            if name not in expected:
                raise CheckpointError(f"expert has an unknown tensor {name!r}")
            if tuple(tensors[name].shape) != tuple(expected[name]):
                raise CheckpointError(
                    f"expert tensor {name!r}: shape {tuple(tensors[name].shape)}, "
                    f"expected {tuple(expected[name])}"
                )
            if not bool(torch.isfinite(tensors[name].float()).all()):
                raise CheckpointError(f"expert tensor {name!r} holds NaN or infinity")
        if not torch.equal(tensors[TABLE].long().to(self.trunk.token_ids.device), self.trunk.token_ids):
            raise CheckpointError(f"expert tensor {TABLE!r} differs from the trunk's table")

    def fits(self, tensors: Expert) -> bool:
        """Whether ``tensors`` could be loaded."""
        try:
            self.check(tensors)
        except CheckpointError:
            return False
        return True

    def tensors(self, domain: str) -> Expert:
        """A copy of a domain's deltas with the id table, as :meth:`load` takes them."""
        slot = self.index(domain)
        copied = {name: stacked[slot].clone() for name, stacked in self._stacked.items()}
        return {**copied, TABLE: self.trunk.token_ids.to(torch.int32)}

    def stamp(self, slot: int) -> int:
        """Changes whenever what :meth:`view` gives for the slot does; for copies in another form."""
        return self._stamps[slot]

    def view(self, slot: int) -> Expert | None:
        """The deltas of one slot without a copy; ``None`` while they are zero."""
        if not self._trained[slot]:
            return None
        return {name: stacked[slot] for name, stacked in self._stacked.items()}

    def mlp(self, hidden: torch.Tensor, slots: Sequence[int]) -> torch.Tensor:
        """The MLP of each row's expert, ``[N, H] -> [N, H]``; the trunk runs once for all."""
        if len(set(slots)) == 1:
            return expert_mlp(self.trunk, hidden, self.view(slots[0]))
        trunk = self.trunk
        normed = trunk.norm(hidden, "mlp_norm")
        both = trunk.product(normed, trunk.tensors["gate_up"]) + self._grouped(normed, slots, "gate_up")
        gate, up = both.chunk(2, dim=-1)
        inner = F.silu(gate) * up
        down = trunk.product(inner, trunk.tensors["down"]) + self._grouped(inner, slots, "down")
        return hidden + down

    def logits(self, output: torch.Tensor, hidden: torch.Tensor, slots: Sequence[int]) -> torch.Tensor:
        """Logits ``[N, V]`` of each row's expert."""
        if len(set(slots)) == 1:
            return expert_logits(self.trunk, output, hidden, self.view(slots[0]))
        normed = self.trunk.norm(hidden, "final_norm")
        logits = self.trunk.product(normed, output) + self.trunk.tensors["output_bias"]
        bias = self._stacked["output_bias"][self._chosen(slots)]
        return logits + self._grouped(normed, slots, "output") + bias

    def _grouped(self, x: torch.Tensor, slots: Sequence[int], part: str) -> torch.Tensor:
        """Deltas of rows with different experts: the cost follows the rows, not the registered domains.

        One batched product over gathered deltas; on CPUs, where gathering costs more than it saves, one
        small product per expert present.
        """
        if x.device.type == "cpu":
            out = x.new_zeros(x.shape[0], self._blank[f"{part}_b"].shape[1])
            for slot in set(slots):
                expert = self.view(slot)
                if expert is not None:
                    rows = [i for i, other in enumerate(slots) if other == slot]
                    out[rows] = low_rank(x[rows], expert, part)
            return out
        chosen = self._chosen(slots)
        a, b = self._stacked[f"{part}_a"][chosen], self._stacked[f"{part}_b"][chosen]
        return torch.bmm(torch.bmm(x[:, None], a), b)[:, 0]

    def _chosen(self, slots: Sequence[int]) -> torch.Tensor:
        """``slots`` as an index on the device, copied there once while the rows stay the same."""
        key = tuple(slots)
        if key != self._asked[0]:
            self._asked = key, sent(torch.tensor(key), self.trunk.token_ids.device)
        return self._asked[1]

    def _grow(self) -> None:
        """Double the capacity; existing experts keep their slots."""
        extra = len(self._trained) - 1
        for name, stacked in self._stacked.items():
            blank = self._blank[name]
            self._stacked[name] = torch.cat((stacked, blank.expand(extra, *blank.shape)))
        self._trained += [False] * extra
        self._stamps += [0] * extra
