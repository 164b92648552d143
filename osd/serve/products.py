"""Matrix products chosen by timing: which kernel is fastest depends on machine, shape and row count."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from osd.serve.target import timed

logger = logging.getLogger(__name__)

Product = Callable[[Tensor, Tensor], Tensor]
"""``x [n, in], weight [out, in] -> x @ weight.T [n, out]``, contiguous."""

BUCKETS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64)
"""Row counts that are timed; a count between two of them uses the larger one's choice."""

_BY_IMPORTANCE = (1, 2, 4, 8, 3, 5, 16, 6, 32, 64, 12, 24, 48)
_SLICE_BYTES = 48 << 20
_WORKING_SET_BYTES = 64 << 20
_LOST = 1.3


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """The library's own product."""
    return F.linear(x, weight)


def transposed(x: Tensor, weight: Tensor) -> Tensor:
    """``(W x^T)^T``: another blocking of the same product, often twice as fast for few rows on a CPU."""
    return (weight @ x.t()).t().contiguous()


def padded(x: Tensor, weight: Tensor, *, rows: int, inner: Product) -> Tensor:
    """``inner`` over ``x`` padded with zero rows: some kernels for fewer rows are slower."""
    count = x.shape[0]
    return inner(F.pad(x, (0, 0, 0, rows - count)), weight)[:count]


def candidates(count: int) -> dict[str, Product]:
    """The products worth timing for ``count`` rows, by name."""
    found: dict[str, Product] = {"linear": linear, "transposed": transposed}
    for rows in (2, 4, 8):
        if count < rows <= 4 * count:
            found[f"linear{rows}"] = partial(padded, rows=rows, inner=linear)
            found[f"transposed{rows}"] = partial(padded, rows=rows, inner=transposed)
    return found


def untimed(count: int, device: torch.device, dtype: torch.dtype) -> str:
    """The candidate to use where time for measuring ran out: what has won most often so far."""
    if device.type != "cpu" or dtype != torch.float32:
        return "linear"
    return "transposed2" if count == 1 else "transposed"


class ProductPlan:
    """The chosen product by weight shape and row count.

    Args:
        weights: Some weights of each shape, for example one shape's matrices of several layers.
            Several are timed in turn, because a single one would be served from the cache.
        budget: Seconds for all timing together. Row counts are timed in order of importance; what is
            not reached takes :func:`untimed`.
        repeats: Timings of each candidate, interleaved; the fastest counts, as disturbance only adds.
    """

    def __init__(
        self, weights: Mapping[str, Sequence[Tensor]], *, budget: float = 3.0, repeats: int = 4
    ) -> None:
        self.names: dict[str, dict[int, str]] = {name: {} for name in weights}
        """Chosen candidate by weight name and row count, for inspection."""
        self.seconds = 0.0
        """What the timing took."""
        begin = time.perf_counter()
        samples = {name: working_set(group) for name, group in weights.items()}
        for count in _BY_IMPORTANCE:
            for name, sample in samples.items():
                left = budget - (time.perf_counter() - begin)
                self.names[name][count] = fastest(sample, count, repeats, left)
        self._tables = {name: _table(chosen) for name, chosen in self.names.items()}
        self.seconds = time.perf_counter() - begin
        logger.info("matrix products timed in %.1f s: %s", self.seconds, self.names)

    def product(self, name: str, count: int) -> Product:
        """The product to use for ``count`` rows over the weights called ``name``."""
        table = self._tables[name]
        return table[count] if count < len(table) else table[-1]


def fastest(sample: Sequence[Tensor], count: int, repeats: int, budget: float) -> str:
    """Name of the fastest candidate for ``count`` rows over ``sample``, by interleaved timing.

    A candidate that loses clearly in one round is not timed again, and one that disagrees with the
    library's product is not used. No round begins after ``budget`` seconds.
    """
    device, dtype = sample[0].device, sample[0].dtype
    deadline = time.perf_counter() + budget
    choice = untimed(count, device, dtype)
    if budget <= 0:
        return choice
    x = torch.randn(count, sample[0].shape[1], device=device).to(dtype)
    expected = linear(x, sample[0])
    tolerance = float(expected.abs().max()) * (1e-5 if dtype == torch.float32 else 2e-2)
    pool = {
        name: product
        for name, product in candidates(count).items()
        if float((product(x, sample[0]) - expected).abs().max()) <= tolerance
    }
    best = dict.fromkeys(pool, float("inf"))

    def run(product: Product) -> None:
        for weight in sample:
            product(x, weight)

    for _ in range(repeats):
        for name, product in pool.items():
            best[name] = min(best[name], timed(partial(run, product), device))
        limit = _LOST * min(best[name] for name in pool)
        pool = {name: product for name, product in pool.items() if best[name] <= limit}
        if len(pool) == 1 or time.perf_counter() > deadline:
            break
    winner = min(pool, key=lambda name: best[name])
    # The expected winner keeps its place unless it is beaten by more than noise.
    return choice if choice in pool and best[choice] <= 1.03 * best[winner] else winner


def _table(chosen: Mapping[int, str]) -> list[Product]:
    """Product by row count up to the last bucket; between buckets the larger one's choice."""
    table: list[Product] = [linear]
    for count in range(1, BUCKETS[-1] + 1):
        name = chosen[next(bucket for bucket in BUCKETS if bucket >= count)]
        options = candidates(count)
        table.append(options.get(name) or options[name.rstrip("0123456789")])
    return table


def working_set(weights: Sequence[Tensor]) -> list[Tensor]:
    """Enough of ``weights`` to defeat the processor's cache, and no more (large ones are sliced)."""
    chosen: list[Tensor] = []
    total = 0
    for weight in weights:
        row_bytes = weight.shape[1] * weight.element_size()
        chosen.append(weight[: max(1, _SLICE_BYTES // row_bytes)])
        total += chosen[-1].numel() * weight.element_size()
        if total >= _WORKING_SET_BYTES:
            break
    return chosen
