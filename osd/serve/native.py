"""The lean forward with its passes over few tokens in compiled code, see :mod:`osd.serve.native_pass`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from drafts.errors import IntegrityError
from drafts.native import steps
from drafts.native.product_tables import SPLIT_SHIFT, chunk_table, sizes_obstacle
from drafts.native.team import Team, team
from osd.serve import native_entries as entry
from osd.serve.cache import SlotCache
from osd.serve.crossover import crossover
from osd.serve.layout import PassLayout
from osd.serve.lean import LeanTarget
from osd.serve.native_buffers import PassBuffers, kept_table, row_table
from osd.serve.native_pass import run_pass
from osd.serve.native_weights import KINDS, Exact, NativeWeights
from osd.serve.quantize import is_quantised
from osd.serve.target import PassOutput, spread, timed

logger = logging.getLogger(__name__)

MOST_TOKENS = 64
"""Passes over more tokens are the library's: its products are made for many rows."""

MOST_TOKENS_MATRIX = 512
"""The same where products run in matrix registers, which are made for many rows too."""

MOST_TOKENS_STRICT = 4096
"""With strict numerics every pass is compiled, whatever its size."""

SPLIT_FROM = 12
"""Tokens from which products take inputs in parts, unless timing says otherwise."""

TURNS = 1024
"""Positions whose rotary factors are computed at once."""

ROWS_TIMED = 16
SPLITS_TIMED = (3, 4, 6, 8, 12, 16, 32)
COUNTS_TIMED = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Tokens of the passes that :meth:`NativeTarget.fit` times, over at most 16 rows."""


def native_obstacle(model: Any) -> str | None:
    """Why a model that the lean forward runs cannot have its passes in compiled code."""
    config = model.config
    weight = model.get_input_embeddings().weight
    if weight.device.type != "cpu":
        return "not on a processor"
    if team() is None:
        return "torch does not lend its threads here"
    if is_quantised(model):
        return "int8 weights"
    if weight.dtype not in KINDS:
        return f"type {weight.dtype}"
    if config.model_type == "gemma":
        return "model type 'gemma'"
    activation = getattr(config, "hidden_act", "silu")
    if activation != "silu":
        return f"activation {activation!r}"
    size = int(model.model.layers[0].self_attn.head_dim)
    widths = (config.hidden_size, config.intermediate_size, config.num_attention_heads * size)
    return sizes_obstacle(size, widths)


class NativeTarget(LeanTarget):
    """A lean target on a processor whose passes over few tokens are one call of compiled code.

    Args:
        model: As for :class:`LeanTarget`; :func:`native_obstacle` finds none.
        name: What it was loaded from.
        feature_layers: See :class:`~osd.serve.target.TargetModel`.
        exact: float32 weights that a bfloat16 model was rounded from, where they are at hand.
        strict: All passes are compiled ones, whose tokens compute the same bits whatever else a pass does.
        options: As for :class:`LeanTarget`.
    """

    forward_kind = "native"

    def __init__(
        self,
        model: Any,
        *,
        name: str,
        feature_layers: Sequence[int] | None,
        exact: Exact | None = None,
        strict: bool = False,
        **options: Any,
    ) -> None:
        if strict:
            options |= {"budget": 0.0, "blocked": False}
        super().__init__(model, name=name, feature_layers=feature_layers, **options)
        lent = team()
        assert lent is not None
        self._team: Team = lent
        with torch.no_grad():
            self.native = NativeWeights(model, exact, strict)
        self.strict = strict
        most = MOST_TOKENS_MATRIX if self.native.matrix or self.native.split else MOST_TOKENS
        self.most = MOST_TOKENS_STRICT if strict else most
        """Most tokens of a pass that the buffers hold."""
        self.limit = self.most
        """Passes over more tokens than this are the library's."""
        self.split_from = SPLIT_FROM
        """Passes over this many tokens or more hand inputs to products in parts, where that is possible."""
        self._turns = [torch.empty(0, self._head_dim), torch.empty(0, self._head_dim)]
        self._threads = torch.get_num_threads()
        self._kept = kept_table(len(self._layers), self.feature_layers)
        self._numbers = np.array([self._eps, self._scaling], dtype=np.float32)
        self._shared = PassBuffers(self, self._threads)
        self._table = self._make_table()

    def fit(self, context: int = 256, rounds: int = 3) -> None:
        """Set :attr:`limit` and :attr:`split_from` by timing.

        The limit is the most tokens for which this is the faster forward, see :func:`crossover`.

        Args:
            context: Committed tokens of a row while measuring.
            rounds: Readings of each, in turns; the least counts.
        """
        widest = min(self.most // ROWS_TIMED, self.max_positions)
        context = max(0, min(context, self.max_positions - widest))
        cache = self.make_cache(ROWS_TIMED, context + widest, keep_features=False)
        for _ in range(cache.slots):
            row = cache.acquire()
            cache.reserve(row, 0, context)
            cache.commit(row, context)
        counts = [count for count in COUNTS_TIMED if count <= widest * ROWS_TIMED]

        def ways(counts: Sequence[int], field: str, first: int, second: int) -> int | None:
            times: dict[int, tuple[float, float]] = {}
            for count in counts:
                rows = spread(count, context, self.vocab_size, ROWS_TIMED)
                least = {first: float("inf"), second: float("inf")}
                for _ in range(rounds):
                    for value in least:
                        setattr(self, field, value)
                        least[value] = min(
                            least[value], timed(partial(self.forward, cache, rows), self.device)
                        )
                times[count] = (least[first], least[second])
            return crossover(times)

        if self.native.split:
            never = self.most + 1
            self.split_from = ways(SPLITS_TIMED, "split_from", never, 1) or never
        beyond = ways(counts, "limit", self.most, 0)
        earlier = [0, *(count for count in counts if beyond is not None and count < beyond)]
        self.limit = self.most if beyond is None else max(earlier)
        logger.info(
            "%s: passes of up to %d tokens run in compiled code, inputs in parts from %d on",
            self.name,
            self.limit,
            self.split_from,
        )

    def packed_pass(self, cache: SlotCache, layout: PassLayout) -> PassOutput:
        """See :meth:`LeanTarget.packed_pass`."""
        if layout.count > self.limit:
            if self.strict:
                raise IntegrityError(f"a pass of {layout.count} tokens; strict ones hold {self.limit}")
            return super().packed_pass(cache, layout)
        count, wanted = layout.count, layout.logit_count
        cos, sin = self._turns_at(layout)
        h = F.embedding(layout.tokens, self.embedding).float()
        keeps = cache.features is not None
        kept = h.new_empty(len(self.feature_layers) if keeps else 0, count, self.hidden_size)
        split = bool(self.native.split) and count >= self.split_from
        kinds = self.native.split if split else self.native.rows
        chunks, _ = chunk_table(count, kinds)
        logit_chunks, logit_rows = chunk_table(max(1, wanted), kinds)
        tokens = layout.logit_tokens if layout.logit_tokens is not None else torch.arange(count)
        logits = h.new_empty(logit_rows if wanted else 0, self._shared.vocab_stride)
        masks: list[np.ndarray] = []
        rows = row_table(layout, masks)
        pair = cache.pairs[0]
        pairs = np.array([pair.data_ptr() for pair in cache.pairs], dtype=np.int64)
        table = self._table
        entries = pair.element_size()
        for place, value in (
            (steps.MATRIX, steps.IN_PARTS if split else int(self.native.matrix)),
            (steps.KERNEL_SHIFT, SPLIT_SHIFT if split else 0),
            (entry.TOKENS, count),
            (entry.PAIRS, pairs.ctypes.data),
            (entry.SLOT_BYTES, pair.stride(1) * entries),
            (entry.HEAD_BYTES, pair.stride(2) * entries),
            (entry.SIDE_BYTES, pair.stride(0) * entries),
            (entry.INPUT, h.data_ptr()),
            (entry.COS, cos.data_ptr()),
            (entry.SIN, sin.data_ptr()),
            (entry.CHUNK_TABLE, chunks.ctypes.data),
            (entry.ROWS, len(rows)),
            (entry.ROW_TABLE, rows.ctypes.data),
            (entry.LOGITS, wanted),
            (entry.LOGIT_TOKENS, tokens.data_ptr()),
            (entry.LOGIT_TABLE, logit_chunks.ctypes.data),
            (entry.OUT, logits.data_ptr()),
            (entry.KEPT, kept.data_ptr()),
            (entry.KEPT_TABLE, self._kept[1 if keeps else 0].ctypes.data),
        ):
            table[place] = value
        self._team.run(run_pass.address, table.ctypes.data, self._threads)
        if cache.features is not None:
            states = kept.transpose(0, 1).flatten(1)
            cache.features[layout.slots, layout.places] = states.to(cache.features.dtype)
        return PassOutput(logits[:wanted, : self.vocab_size], layout.offsets)

    def _turns_at(self, layout: PassLayout) -> tuple[Tensor, Tensor]:
        """Rotary factors ``[N, D]`` from a table, which holds as many positions as were met so far.

        It grows by blocks of one size, so that a position's factors are the same bits always.
        """
        while int(layout.positions.max()) >= len(self._turns[0]):
            positions = torch.arange(TURNS) + len(self._turns[0])
            more = [side.float().flatten(1) for side in self._rotation(positions)]
            self._turns = [torch.cat(sides) for sides in zip(self._turns, more, strict=True)]
        cos, sin = (side[layout.positions] for side in self._turns)
        return cos, sin

    def _make_table(self) -> np.ndarray:
        """The entries that stay."""
        weights, shared = self.native, self._shared
        address = weights.kernels
        found = np.zeros(entry.ENTRIES + 1, dtype=np.int64)
        values = {
            steps.TEAM: self._team.size,
            steps.BARRIER: self._team.barrier,
            steps.THREAD: self._team.thread,
            entry.LAYERS: len(self._layers),
            steps.HIDDEN: self.hidden_size,
            steps.INNER: shared.inner,
            entry.HEADS: self._heads,
            entry.KV_HEADS: self._kv_heads,
            steps.SIZE: self._head_dim,
            entry.QKV_STRIDE: shared.qkv_stride,
            entry.OUT_STRIDE: shared.out_stride,
            steps.ROUND: address["round"] if self.dtype == torch.bfloat16 else 0,
            steps.SPLIT: address.get("split", 0),
            steps.NUMBERS: self._numbers.ctypes.data,
            entry.WEIGHTS: weights.table.ctypes.data,
            entry.ENTRY_BYTES: torch.empty(0, dtype=self.dtype).element_size(),
            entry.VOCAB_STRIDE: shared.vocab_stride,
            entry.HEAD_WEIGHTS: weights.tiles["output"].data.data_ptr(),
            entry.FINAL_NORM: weights.norm_address(self._final_norm),
            entry.SCORES: address["scores"],
            entry.VALUES: address["values"],
            entry.VALUES_MORE: address["values_more"],
            entry.SOFTMAX: address["softmax"],
            entry.ATTEND: address.get("attend", 0),
            entry.SCALING: int(self._numbers.view(np.int32)[1]),
            steps.GATE: address["gate"],
            steps.STORE: address["store"],
            entry.TOGETHER: weights.together,
        }
        for place, value in {**values, **shared.entries()}.items():
            found[place] = value
        return found
