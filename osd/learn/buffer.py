"""The distillation buffer: per domain, bounded in bytes and age, with a held-back slice never trained on."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import torch

from drafts.errors import CheckpointError, IntegrityError
from osd.learn.config import BufferConfig
from osd.learn.record import BufferRecord

_SCALARS = ("number", "created", "version", "greedy")


class DomainBuffer:
    """Records of one domain.

    Args:
        config: Bounds and policy.
        seed: Seed of draws and of the reservoir.
        trunk: Fingerprint (hexadecimal) of the weights that records' hidden states come from; ``None`` where
            they come from none.
    """

    def __init__(self, config: BufferConfig, seed: int = 0, trunk: str | None = None) -> None:
        self.config = config
        self.trunk = trunk
        self.training: list[BufferRecord] = []
        self.held: list[BufferRecord] = []
        self.arrived = 0
        self._random = random.Random(seed)

    @property
    def nbytes(self) -> int:
        """Memory of all records."""
        return sum(r.nbytes for r in self.training) + sum(r.nbytes for r in self.held)

    @property
    def positions(self) -> int:
        """Positions that may be trained on."""
        return sum(r.size for r in self.training)

    def holds_back_next(self) -> bool:
        """Whether the next record will be held back: one in every ``hold_back``, the first one early."""
        return self.arrived % self.config.hold_back == self.config.hold_back // 2

    def add(self, record: BufferRecord) -> bool:
        """Take a record numbered ``arrived``; returns whether it was held back."""
        held = self.holds_back_next()
        self.arrived += 1
        if held:
            self.held.append(record)
            del self.held[: -self.config.held_records]
        elif record.size:
            self.training.append(record)
        self.expire(record.created)
        return held

    def expire(self, now: float) -> None:
        """Drop what is too old, then what does not fit; the newest record always stays."""
        oldest = now - self.config.max_age_seconds
        self.training = [r for r in self.training if r.created >= oldest]
        self.held = [r for r in self.held if r.created >= oldest]
        over = self.nbytes - self.config.max_bytes
        while over > 0 and len(self.training) + len(self.held) > 1:
            if len(self.training) > 1 or not self.held:
                last = len(self.training) - 1
                reservoir = self.config.policy == "reservoir"
                gone = self.training.pop(self._random.randrange(last) if reservoir and last else 0)
            else:
                gone = self.held.pop(0)
            over -= gone.nbytes

    def draw(self, count: int, together: int = 1) -> list[tuple[BufferRecord, int]]:
        """``count`` (record, row) pairs to train on, drawn with replacement by the policy; [] if empty.

        ``together`` rows are drawn of each chosen record.
        """
        if not self.training:
            return []
        newest = self.training[-1].number
        weights = [float(record.size) for record in self.training]
        if self.config.policy == "recency":
            half = self.config.recency_half_life
            weights = [
                w * 0.5 ** ((newest - r.number) / half) for w, r in zip(weights, self.training, strict=True)
            ]
        chosen = self._random.choices(self.training, weights, k=-(-count // together))
        return [(record, self._random.randrange(record.size)) for record in chosen for _ in range(together)][
            :count
        ]

    def absorb(self, other: DomainBuffer) -> None:
        """Take another domain's records too, by age; what was held back stays held back."""
        held = {id(record) for record in (*self.held, *other.held)}
        records = [*self.training, *self.held, *other.training, *other.held]
        records.sort(key=lambda record: record.created)
        self.arrived += other.arrived
        self.training, self.held = [], []
        for number, record in enumerate(records, start=self.arrived - len(records)):
            side = self.held if id(record) in held else self.training
            side.append(replace(record, number=number))
        del self.held[: -self.config.held_records]
        if records:
            self.expire(records[-1].created)

    def purge(self) -> None:
        """Forget every record."""
        self.training, self.held = [], []

    def copy(self) -> DomainBuffer:
        """A buffer with the same records, for a child domain; records themselves are immutable."""
        child = DomainBuffer(self.config, self._random.randrange(2**31), self.trunk)
        child.training, child.held, child.arrived = list(self.training), list(self.held), self.arrived
        return child

    def check(self) -> None:
        """Audit: no record in both slices, bounds kept, rows of one record agree.

        Raises:
            IntegrityError: With both sides of the broken equation.
        """
        both = {r.number for r in self.training} & {r.number for r in self.held}
        if both:
            raise IntegrityError(f"records {sorted(both)} are trained on and held back")
        if self.nbytes > self.config.max_bytes and len(self.training) + len(self.held) > 1:
            raise IntegrityError(f"buffer holds {self.nbytes} bytes, allowed {self.config.max_bytes}")
        if len(self.held) > self.config.held_records:
            raise IntegrityError(f"{len(self.held)} held-back records, allowed {self.config.held_records}")
        for record in [*self.training, *self.held]:
            sizes = {name: len(t) for name, t in record.tensors().items() if name != "boundaries"}
            if len(set(sizes.values())) > 1:
                raise IntegrityError(f"record {record.number}: rows differ {sizes}")

    def state(self) -> dict[str, torch.Tensor]:
        """Everything as tensors, for safetensors."""
        out: dict[str, torch.Tensor] = {"arrived": torch.tensor([self.arrived])}
        if self.trunk is not None:
            out["trunk"] = torch.tensor(list(bytes.fromhex(self.trunk)), dtype=torch.uint8)
        for slice_name, records in (("training", self.training), ("held", self.held)):
            if not records:
                continue
            for name in records[0].tensors():
                out[f"{slice_name}.{name}"] = torch.cat([r.tensors()[name] for r in records])
            out[f"{slice_name}.sizes"] = torch.tensor([[r.size, len(r.boundaries)] for r in records])
            scalars = [[float(getattr(r, name)) for name in _SCALARS] for r in records]
            out[f"{slice_name}.scalars"] = torch.tensor(scalars, dtype=torch.float64)
        return out

    def load_state(self, state: dict[str, torch.Tensor], width: int | None = None) -> None:
        """Restore what :meth:`state` returned; a state that names no trunk is taken for this buffer's.

        Args:
            state: The tensors.
            width: Width that hidden states must have; ``None`` for any.

        Raises:
            CheckpointError: Something lacks, or the records are another trunk's; nothing has changed.
        """
        trunk = bytes(state["trunk"].tolist()).hex() if "trunk" in state else self.trunk
        if None not in (trunk, self.trunk) and trunk != self.trunk:
            raise CheckpointError(f"records made with trunk {trunk}, this deployment has {self.trunk}")
        try:
            arrived = int(state["arrived"][0])
            training, held = _records(state, "training"), _records(state, "held")
        except (KeyError, IndexError, RuntimeError) as error:
            raise CheckpointError(f"buffer state cannot be used: {error}") from error
        widths = {record.hidden.shape[1] for record in (*training, *held)}
        if width is not None and widths - {width}:
            raise CheckpointError(f"records hold hidden states of width {sorted(widths)}, expected {width}")
        self.trunk, self.arrived, self.training, self.held = trunk, arrived, training, held


def _records(state: dict[str, torch.Tensor], slice_name: str) -> list[BufferRecord]:
    """Records of one slice of a saved state."""
    if f"{slice_name}.sizes" not in state:
        return []
    sizes: list[list[int]] = state[f"{slice_name}.sizes"].tolist()
    rows, rounds = [s[0] for s in sizes], [s[1] for s in sizes]
    names = ("positions", "hidden", "emitted", "top_ids", "top_logprobs", "right", "boundaries")
    parts: dict[str, Sequence[torch.Tensor]] = {
        name: torch.split(state[f"{slice_name}.{name}"], rounds if name == "boundaries" else rows)
        for name in names
    }
    records: list[BufferRecord] = []
    for i, scalars in enumerate(state[f"{slice_name}.scalars"].tolist()):
        tensors = {name: parts[name][i].clone() for name in names}
        number, created, version, greedy = scalars
        records.append(BufferRecord(int(number), created, int(version), bool(greedy), **tensors))
    return records
