"""Matrix products chosen by timing: which kernel is fastest depends on machine, shape and row count."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import psutil
import torch
import torch.nn.functional as F
from torch import Tensor

from osd.serve.quantize import int8_product
from osd.serve.target import timed

logger = logging.getLogger(__name__)

BUCKETS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64)
"""Row counts that are timed; a count between two of them uses the larger one's choice."""

_BY_IMPORTANCE = (1, 2, 4, 5, 8, 3, 16, 6, 32, 64, 12, 24, 48)
_SAMPLE_BYTES = 32 << 20
_PACKED_FOR_ROWS = 8
_PACKED_SHARE = 0.25
_LOST = 1.3
_NOISE = 1.08


@dataclass(slots=True)
class Matrix:
    """A weight ``[out, in]`` as stored, and in the processor library's own blocked layout if that pays.

    The blocked copy costs as many bytes again; for 3 to 16 rows, where verification happens, it is
    1.5 to 2 times as fast as the plain one on the machines measured. A quantised weight has ``plain`` in
    int8, a ``scale`` an output, and always the packed copy.
    """

    plain: Tensor
    packed: Tensor | None = None
    scale: Tensor | None = None
    zeros: Tensor | None = None

    @property
    def quantised(self) -> bool:
        """Whether ``plain`` is int8 with one ``scale`` an output."""
        return self.scale is not None


Product = Callable[[Tensor, Matrix], Tensor]
"""``x [n, in], weight [out, in] -> x @ weight.T [n, out]``, contiguous."""


def linear(x: Tensor, weight: Matrix) -> Tensor:
    """The library's own product."""
    return F.linear(x, weight.plain)


def transposed(x: Tensor, weight: Matrix) -> Tensor:
    """``(W x^T)^T``: another blocking of the same product, often the fastest for two rows on a CPU."""
    return (weight.plain @ x.t()).t().contiguous()


def blocked(x: Tensor, weight: Matrix) -> Tensor:
    """The product over the blocked copy."""
    found: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight.packed, None, "none", [], "")
    return found


def int8(x: Tensor, weight: Matrix) -> Tensor:
    """The integer product of a quantised weight."""
    assert weight.packed is not None
    assert weight.scale is not None
    assert weight.zeros is not None
    return int8_product(x, weight.packed, weight.scale, weight.zeros)


def padded(x: Tensor, weight: Matrix, *, rows: int, inner: Product) -> Tensor:
    """``inner`` over ``x`` padded with zero rows: some kernels are slower for fewer rows."""
    count = x.shape[0]
    return inner(F.pad(x, (0, 0, 0, rows - count)), weight)[:count]


def candidates(count: int, *, packed: bool) -> dict[str, Product]:
    """The products worth timing for ``count`` rows, by name."""
    bases: dict[str, Product] = {"linear": linear, "transposed": transposed}
    if packed:
        bases["blocked"] = blocked
    found = dict(bases)
    for rows in (2, 4, 8):
        for name, inner in bases.items():
            if count < rows <= 4 * count and not (packed and name == "linear"):
                found[f"{name}{rows}"] = partial(padded, rows=rows, inner=inner)
    return found


def untimed(count: int, *, packed: bool) -> str:
    """The candidate to use where time for measuring ran out: what has won most often so far."""
    if not packed:
        return "linear"
    return {1: "transposed2", 2: "transposed"}.get(count, "blocked")


class ProductPlan:
    """The chosen product by weight and row count.

    Args:
        weights: The matrices of one role under one name, for example every layer's. Several are
            timed in turn, because a single one would be served from the cache. Roles for which a
            blocked copy wins get ``packed`` set on all their matrices.
        budget: Seconds for all timing together. Row counts are timed in order of importance; what is
            not reached takes :func:`untimed`.
        repeats: Timings of each candidate, interleaved; the fastest counts, as disturbance only adds.
    """

    def __init__(
        self, weights: Mapping[str, Sequence[Matrix]], *, budget: float = 3.0, repeats: int = 3
    ) -> None:
        self.names: dict[str, dict[int, str]] = {name: {} for name in weights}
        """Chosen candidate by weight name and row count, for inspection."""
        begin = time.perf_counter()
        quantised = {name for name, group in weights.items() if group[0].quantised}
        weights = {name: group for name, group in weights.items() if name not in quantised}
        packing = can_pack([matrix for group in weights.values() for matrix in group])
        samples = {name: sample_of(group, packing) for name, group in weights.items()}
        for count in _BY_IMPORTANCE:
            for name, sample in samples.items():
                left = budget - (time.perf_counter() - begin)
                self.names[name][count] = fastest(sample, count, repeats, left)
        for name, chosen in self.names.items():
            if any(choice.startswith("blocked") for choice in chosen.values()):
                for matrix in weights[name]:
                    matrix.packed = pack(matrix.plain)
        self._tables = {name: _table(chosen, packing) for name, chosen in self.names.items() if chosen}
        for name in quantised:
            self.names[name] = dict.fromkeys(BUCKETS, "int8")
            self._tables[name] = [int8]
        self.seconds = time.perf_counter() - begin
        """What timing and packing took."""
        logger.info("matrix products timed in %.1f s: %s", self.seconds, self.names)

    def product(self, name: str, count: int) -> Product:
        """The product to use for ``count`` rows over the weights called ``name``."""
        table = self._tables[name]
        return table[count] if count < len(table) else table[-1]


def fastest(sample: Sequence[Matrix], count: int, repeats: int, budget: float) -> str:
    """Name of the fastest candidate for ``count`` rows over ``sample``.

    Every weight's time is its least over the repeats, so that a disturbance spoils one short
    reading and not a candidate. A candidate that loses clearly in one round is not timed again, and
    one that disagrees with the library's product is not used. Timing ends after ``budget`` seconds;
    if not even one round is complete by then, :func:`untimed` decides.
    """
    first = sample[0]
    packed = first.packed is not None
    deadline = time.perf_counter() + budget
    expected_winner = untimed(count, packed=packed)
    if budget <= 0:
        return expected_winner
    x = torch.randn(count, first.plain.shape[1], device=first.plain.device).to(first.plain.dtype)
    reference = linear(x, first)
    tolerance = float(reference.abs().max()) * (1e-5 if x.dtype == torch.float32 else 2e-2)
    pool = {
        name: product
        for name, product in candidates(count, packed=packed).items()
        if float((product(x, first) - reference).abs().max()) <= tolerance
    }
    least = {name: [float("inf")] * len(sample) for name in pool}
    total: dict[str, float] = {}
    for turn in range(repeats):
        for name, product in pool.items():
            if turn == 0 and time.perf_counter() > deadline:
                return expected_winner
            for index, weight in enumerate(sample):
                seconds = timed(partial(product, x, weight), x.device)
                least[name][index] = min(least[name][index], seconds)
        total = {name: sum(least[name]) for name in pool}
        limit = _LOST * min(total.values())
        pool = {name: product for name, product in pool.items() if total[name] <= limit}
        if len(pool) == 1 or time.perf_counter() > deadline:
            break
    winner = min(pool, key=lambda name: total[name])
    if expected_winner in pool and total[expected_winner] <= _NOISE * total[winner]:
        return expected_winner
    return winner


def can_pack(weights: Sequence[Matrix]) -> bool:
    """Whether blocked copies are possible here and would take only a modest share of free memory."""
    if any(weight.plain.device.type != "cpu" for weight in weights):
        return False
    size = sum(weight.plain.numel() * weight.plain.element_size() for weight in weights)
    if size > _PACKED_SHARE * psutil.virtual_memory().available:
        logger.info("no blocked weights: %d MB more would be a large share of free memory", size >> 20)
        return False
    try:
        x = torch.ones(2, 16, dtype=weights[0].plain.dtype)
        blocked(x, Matrix(x, pack(x)))
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
    return True


def pack(weight: Tensor) -> Tensor:
    """``weight`` in the blocked layout of oneDNN, which torch's own compiler uses the same way."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR_ROWS)
    return packed


def sample_of(weights: Sequence[Matrix], packing: bool) -> list[Matrix]:
    """Enough of ``weights`` to defeat the processor's cache, and no more (large ones are sliced)."""
    chosen: list[Matrix] = []
    total = 0
    for weight in weights:
        row_bytes = weight.plain.shape[1] * weight.plain.element_size()
        part = weight.plain[: max(1, _SAMPLE_BYTES // row_bytes)]
        chosen.append(Matrix(part, pack(part) if packing else None))
        total += part.numel() * part.element_size()
        if total >= _SAMPLE_BYTES:
            break
    return chosen


def _table(chosen: Mapping[int, str], packing: bool) -> list[Product]:
    """Product by row count up to the last bucket; between buckets the larger one's choice."""
    table: list[Product] = [linear]
    for count in range(1, BUCKETS[-1] + 1):
        name = chosen[next(bucket for bucket in BUCKETS if bucket >= count)]
        options = candidates(count, packed=packing)
        table.append(options.get(name) or options[name.rstrip("0123456789")])
    return table
