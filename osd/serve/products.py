"""Matrix products chosen by timing: which kernel is fastest depends on machine, shape and row count."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import psutil
import torch
from torch import Tensor

from osd.serve.kernels import multiply
from osd.serve.target import timed

logger = logging.getLogger(__name__)

BUCKETS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64)
"""Row counts that are timed; a count between two of them uses the larger one's choice."""

_BY_IMPORTANCE = (1, 4, 8, 2, 6, 3, 5, 16, 12, 32, 24, 64, 48)
_SAMPLE_BYTES = 1 << 30
_PACKED_FOR_ROWS = 8
_PACKED_SHARE = 0.25
_LOST = 1.3


@dataclass(slots=True)
class Matrix:
    """A weight ``[out, in]`` as stored, and in the processor library's own blocked layout if that pays.

    The blocked copy costs as many bytes again; for 3 to 16 rows, where verification happens, it is
    1.3 to 2 times as fast as the plain one on the machines measured. A quantised weight has ``plain`` in
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

    def parts(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Plain, packed, scale and zeros, ``plain`` in place of what there is none of."""
        plain = self.plain
        return (
            plain,
            plain if self.packed is None else self.packed,
            plain if self.scale is None else self.scale,
            plain if self.zeros is None else self.zeros,
        )


@dataclass(frozen=True, slots=True)
class Product:
    """One way to multiply: a kernel of :func:`~osd.serve.kernels.multiply` and the rows it is padded to."""

    kernel: str
    rows: int = 0

    @property
    def name(self) -> str:
        """For example ``blocked`` or ``transposed2``."""
        return f"{self.kernel}{self.rows or ''}"

    def __call__(self, x: Tensor, weight: Matrix) -> Tensor:
        """``x [n, in], weight [out, in] -> x @ weight.T [n, out]``, contiguous."""
        return multiply(x, *weight.parts(), self.kernel, self.rows)


LINEAR = Product("linear")
INT8 = Product("int8")


def candidates(count: int, *, packed: bool) -> list[Product]:
    """The products worth timing for ``count`` rows, the library's own first."""
    kernels = ["linear", "transposed", "blocked"] if packed else ["linear", "transposed"]
    found = [Product(kernel) for kernel in kernels]
    for rows in (2, 4, 8):
        if count < rows <= 4 * count:
            found += [Product(kernel, rows) for kernel in kernels if not (packed and kernel == "linear")]
    return found


def untimed(count: int, *, packed: bool) -> Product:
    """The product to use where time for measuring ran out: what has won most often so far."""
    return Product("blocked") if packed and count > 2 else LINEAR


class ProductPlan:
    """The chosen product by weight and row count.

    Products are timed as a pass runs them: one after the other over every layer's weights, so that each is
    read from where a pass would read it. A few weights timed again and again stay in a large processor
    cache, where the fastest kernel is another one.

    Args:
        weights: The matrices of one role under one name, in the order of the layers. Roles for which a
            blocked copy wins get ``packed`` set on all their matrices.
        budget: Seconds for all timing together. Row counts are timed in order of importance; what is
            not reached takes :func:`untimed`.
        repeats: Timings of each candidate, interleaved; the fastest counts, as disturbance only adds.
        blocked: Whether blocked copies may be made.
    """

    def __init__(
        self,
        weights: Mapping[str, Sequence[Matrix]],
        *,
        budget: float = 4.0,
        repeats: int = 3,
        blocked: bool = True,
    ) -> None:
        begin = time.perf_counter()
        quantised = [name for name, group in weights.items() if group[0].quantised]
        weights = {name: group for name, group in weights.items() if name not in quantised}
        packing = blocked and can_pack([matrix for group in weights.values() for matrix in group])
        chosen: dict[str, dict[int, Product]] = {name: {} for name in weights}
        sample = sample_of(weights) if budget > 0 else []
        trial = [
            (name, Matrix(matrix.plain, pack(matrix.plain) if packing else None)) for name, matrix in sample
        ]
        packs = {id(matrix): copy.packed for (_, matrix), (_, copy) in zip(sample, trial, strict=True)}
        for count in _BY_IMPORTANCE:
            left = budget - (time.perf_counter() - begin)
            winners = fastest(trial, count, repeats, left) if left > 0 else {}
            for name in weights:
                chosen[name][count] = winners.get(name, untimed(count, packed=packing))
        for name, products in chosen.items():
            if any(product.kernel == "blocked" for product in products.values()):
                for matrix in weights[name]:
                    found = packs.get(id(matrix))
                    matrix.packed = pack(matrix.plain) if found is None else found
        self._tables = {name: _table(products) for name, products in chosen.items()}
        self._tables |= {name: [INT8] for name in quantised}
        self.names: dict[str, dict[int, str]] = {
            name: {count: self.product(name, count).name for count in BUCKETS} for name in self._tables
        }
        """Chosen product by weight name and row count, for inspection."""
        self.seconds = time.perf_counter() - begin
        """What timing and packing took."""
        logger.info("matrix products timed in %.1f s: %s", self.seconds, self.names)

    def product(self, name: str, count: int) -> Product:
        """The product to use for ``count`` rows over the weights called ``name``."""
        table = self._tables[name]
        return table[count] if count < len(table) else table[-1]


def fastest(
    sample: Sequence[tuple[str, Matrix]], count: int, repeats: int, budget: float
) -> dict[str, Product]:
    """The fastest product for ``count`` rows, by name of the weights.

    Every weight's time is its least over the repeats, so that a disturbance spoils one short
    reading and not a candidate. A candidate that loses clearly in one round is not timed again, and
    one that disagrees with the library's product is not used.

    Args:
        sample: Weights with their names, in the order in which a pass reads them.
        count: Rows.
        repeats: Rounds.
        budget: Seconds after which timing ends.

    Returns:
        Empty if not even one round was complete by then.
    """
    deadline = time.perf_counter() + budget
    inputs = {matrix.plain.shape[1]: torch.empty(0) for _, matrix in sample}
    for width in inputs:
        first = next(matrix.plain for _, matrix in sample if matrix.plain.shape[1] == width)
        inputs[width] = torch.randn(count, width, device=first.device).to(first.dtype)
    pools: dict[str, list[Product]] = {}
    for name, matrix in sample:
        if name not in pools:
            pools[name] = _agreeing(inputs[matrix.plain.shape[1]], matrix)
    least: dict[tuple[int, Product], float] = {}
    total: dict[tuple[str, Product], float] = {}
    for turn in range(repeats):
        for place in range(max(map(len, pools.values()))):
            if turn == 0 and time.perf_counter() > deadline:
                return {}
            for index, (name, matrix) in enumerate(sample):
                product = pools[name][place % len(pools[name])]
                x = inputs[matrix.plain.shape[1]]
                seconds = timed(partial(product, x, matrix), x.device)
                least[index, product] = min(seconds, least.get((index, product), seconds))
        total = {}
        for (index, product), seconds in least.items():
            key = (sample[index][0], product)
            total[key] = total.get(key, 0.0) + seconds
        for name, pool in pools.items():
            limit = _LOST * min(total[name, product] for product in pool)
            pools[name] = [product for product in pool if total[name, product] <= limit]
        if all(len(pool) == 1 for pool in pools.values()) or time.perf_counter() > deadline:
            break
    return {name: min(pool, key=lambda product: total[name, product]) for name, pool in pools.items()}


def _agreeing(x: Tensor, matrix: Matrix) -> list[Product]:
    """The candidates that give what the library's own product gives."""
    reference = LINEAR(x, matrix)
    tolerance = float(reference.abs().max()) * (1e-5 if x.dtype == torch.float32 else 2e-2)
    return [
        product
        for product in candidates(len(x), packed=matrix.packed is not None)
        if float((product(x, matrix) - reference).abs().max()) <= tolerance
    ]


def can_pack(weights: Sequence[Matrix]) -> bool:
    """Whether blocked copies are possible here and would take only a modest share of free memory."""
    if not weights or any(weight.plain.device.type != "cpu" for weight in weights):
        return False
    size = sum(weight.plain.numel() * weight.plain.element_size() for weight in weights)
    if size > _PACKED_SHARE * psutil.virtual_memory().available:
        logger.info("no blocked weights: %d MB more would be a large share of free memory", size >> 20)
        return False
    try:
        x = torch.ones(2, 16, dtype=weights[0].plain.dtype)
        Product("blocked")(x, Matrix(x, pack(x)))
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
    return True


def pack(weight: Tensor) -> Tensor:
    """``weight`` in the blocked layout of oneDNN, which torch's own compiler uses the same way."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR_ROWS)
    return packed


def sample_of(weights: Mapping[str, Sequence[Matrix]]) -> list[tuple[str, Matrix]]:
    """Layers to time with, in a pass's order: all of them, of a large model the first ones (at least one)."""
    chosen: list[tuple[str, Matrix]] = []
    size = 0
    for layer in range(max(map(len, weights.values()), default=0)):
        for name, group in weights.items():
            if layer < len(group):
                chosen.append((name, group[layer]))
                size += group[layer].plain.numel() * group[layer].plain.element_size()
        if size >= _SAMPLE_BYTES:
            break
    return chosen


def _table(chosen: Mapping[int, Product]) -> list[Product]:
    """Product by row count up to the last bucket; between buckets the larger one's choice.

    A choice that pads to fewer rows than there are pads nothing.
    """
    table: list[Product] = [LINEAR]
    for count in range(1, BUCKETS[-1] + 1):
        product = chosen[next(bucket for bucket in BUCKETS if bucket >= count)]
        table.append(product if product.rows > count else Product(product.kernel))
    return table
