"""Decode passes recorded once per bucket and replayed: no kernel of them is launched from Python."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from osd.serve.cache import SlotCache
from osd.serve.static import (
    GRAIN,
    MOST_TOKENS,
    PLANES,
    Bucket,
    StaticLean,
    StaticTable,
    bucket_for,
    lengths,
    padding,
    row_counts,
)
from osd.serve.target import PassOutput, PassRow

logger = logging.getLogger(__name__)

MOST_GRAPHS = 128
"""Graphs kept per cache; each holds its kernels' parameters, some megabytes for a large model."""

PREPARED_WIDTHS = (1, 4, 8, 2, 6, 12, 3)
"""Widths recorded at load, likeliest first: no draft, chains and trees as the controller sizes them."""

Work = Callable[[Sequence[Tensor]], Tensor]
"""Reads and writes the given buffers, and returns its result."""

Replay = Callable[[], Tensor]
"""Does the recorded work again on the buffers as they are now; the result is overwritten every time."""


class Recorder(Protocol):
    """Records work over fixed buffers so that it can be repeated."""

    def record(self, work: Work, buffers: Sequence[Tensor]) -> Replay:
        """Record ``work``, which may run any number of times meanwhile.

        Raises:
            RuntimeError: It cannot be recorded.
        """


class CudaRecorder:
    """CUDA graphs that share one memory pool.

    A graph's result stays in place, but its intermediates lie where other graphs have theirs, so a
    result must be read before another graph runs.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = torch.cuda.graph_pool_handle()

    def record(self, work: Work, buffers: Sequence[Tensor]) -> Replay:
        """See :class:`Recorder`. Warms up on a stream of its own, as libraries allocate at first use."""
        with torch.cuda.device(self._device):
            current, side = torch.cuda.current_stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
            side.wait_stream(current)
            with torch.cuda.stream(side):
                for _ in range(2):
                    work(buffers)
            current.wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            # Other threads use the device too (learning, embedding); only this one's calls are recorded.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                result = work(buffers)

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay


@dataclass(frozen=True)
class _Recorded:
    """One bucket's buffers and its recorded pass."""

    table: Tensor
    replay: Replay


class GraphedTarget(StaticLean):
    """A lean target whose decode passes are replayed; all others run packed as in :class:`LeanTarget`.

    A bucket is recorded when it first occurs, the common ones by :meth:`prepare`. Where a recording
    fails or the limit is reached, a larger recorded bucket serves, or the packed pass.

    Args:
        model: See :class:`LeanTarget`, as ``name``, ``feature_layers`` and ``budget``.
        recorder: Records passes; ``None`` leaves every pass packed.
        most_graphs: Graphs kept per cache.
    """

    def __init__(
        self,
        model: Any,
        *,
        name: str,
        feature_layers: Sequence[int] | None,
        recorder: Recorder | None,
        budget: float = 3.0,
        most_graphs: int = MOST_GRAPHS,
    ) -> None:
        super().__init__(model, name=name, feature_layers=feature_layers, budget=budget)
        self.recorder = recorder
        self.most_graphs = most_graphs
        self.replays = 0
        """Passes replayed so far."""
        self._recorded: WeakKeyDictionary[SlotCache, dict[Bucket, _Recorded]] = WeakKeyDictionary()

    def graphs(self, cache: SlotCache) -> list[Bucket]:
        """The buckets recorded over ``cache``."""
        return list(self._recorded.get(cache, ()))

    def stop_recording(self) -> None:
        """Run every pass packed from now on and free what was recorded."""
        self.recorder = None
        self._recorded.clear()

    @torch.inference_mode()
    def forward(self, cache: SlotCache, rows: Sequence[PassRow]) -> PassOutput:
        """See :meth:`TargetModel.forward`."""
        wanted = bucket_for(cache, rows) if self.recorder is not None else None
        found = None if wanted is None else self._find(cache, wanted)
        if found is None:
            return super().forward(cache, rows)
        bucket, recorded = found
        table = StaticTable(cache, rows, bucket)
        self._load(recorded, torch.from_numpy(table.values))
        hidden = recorded.replay()
        self.replays += 1
        return PassOutput(self.wanted_logits(recorded.table, hidden, table.wanted), table.offsets)

    @torch.inference_mode()
    def prepare(self, cache: SlotCache, budget: float = 10.0) -> None:
        """Record the common buckets over ``cache``: every number of rows, short texts first.

        Args:
            cache: The cache that will serve.
            budget: Seconds after which no further recording begins.
        """
        if self.recorder is None or not cache.spare:
            return
        begin = time.perf_counter()
        for length in [count for count in lengths(cache) if count <= 4 * GRAIN]:
            for width in PREPARED_WIDTHS:
                for count in row_counts(cache.slots):
                    bucket = Bucket(count, width, length)
                    if time.perf_counter() - begin > budget:
                        break
                    if bucket.tokens <= MOST_TOKENS:
                        self._find(cache, bucket)
        logger.info(
            "%d decode passes recorded in %.1f s", len(self.graphs(cache)), time.perf_counter() - begin
        )

    def _find(self, cache: SlotCache, wanted: Bucket) -> tuple[Bucket, _Recorded] | None:
        """The bucket's recording, made if need be; else the smallest that covers it."""
        known = self._recorded.setdefault(cache, {})
        if wanted not in known and self.recorder is not None and len(known) < self.most_graphs:
            try:
                known[wanted] = self._record(self.recorder, cache, wanted)
            except RuntimeError as error:
                logger.warning("%s: no further pass is recorded, %s failed: %s", self.name, wanted, error)
                self.most_graphs = 0
        if wanted in known:
            return wanted, known[wanted]
        covering = [bucket for bucket in known if bucket.covers(wanted)]
        if not covering:
            return None
        chosen = min(covering, key=lambda bucket: (bucket.tokens, bucket.rows * bucket.length))
        return chosen, known[chosen]

    def _record(self, recorder: Recorder, cache: SlotCache, bucket: Bucket) -> _Recorded:
        """Record one bucket, over padding, so that whatever runs meanwhile leaves no trace."""
        table = torch.from_numpy(padding(cache, bucket)).to(self.device)
        assert table.shape == (PLANES, bucket.tokens)
        kept = [] if cache.features is None else [cache.features]
        replay = recorder.record(partial(self._work, bucket, len(cache.pairs)), [table, *cache.pairs, *kept])
        return _Recorded(table, replay)

    def _work(self, bucket: Bucket, layers: int, buffers: Sequence[Tensor]) -> Tensor:
        table, pairs, kept = buffers[0], buffers[1 : 1 + layers], buffers[1 + layers :]
        return self.static_pass(bucket, table, pairs, kept[0] if kept else None)

    def _load(self, recorded: _Recorded, values: Tensor) -> None:
        """Copy a table to its buffer; pinned memory, so that the host does not wait."""
        pinned = values.pin_memory() if self.device.type == "cuda" else values
        recorded.table.copy_(pinned, non_blocking=True)
