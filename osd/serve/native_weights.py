"""A model's weights as the compiled pass reads them: tiles, kernels and one table of addresses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from torch import Tensor

from drafts.native import steps
from drafts.native.attention import (
    emit_gate,
    emit_round,
    emit_scores,
    emit_softmax,
    emit_store,
    emit_values,
    queries_at_once,
)
from drafts.native.codes import Tiles, tiles_of
from drafts.native.machine import compiled, wide_registers
from drafts.native.matrix_attention import block_fits, emit_attend
from drafts.native.matrix_tiles import MATRIX_ROWS, emit_matrix_tile, has_matrix_registers
from drafts.native.product_tables import (
    ROWS_NARROW,
    ROWS_WIDE,
    describe_product,
    interleave,
    kernel_table,
    split_name,
    tile_name,
)
from drafts.native.split_tiles import SPLIT_ROWS, emit_split, emit_split_tile, splittable
from drafts.native.tiles import FORMATS, Format, emit_tile
from osd.serve import native_entries as entry

KINDS = {torch.float32: "f32", torch.bfloat16: "bf16"}
"""Types that a model may have, and what the kernels call them."""

DECODED = FORMATS["bf16"]
"""How matrix registers read weights."""

Exact = Callable[[str], Tensor]
"""float32 weight by parameter name."""


class NativeWeights:
    """Tiles of every product, in the order of :data:`ROLES`, and the kernels over them.

    Args:
        model: The Hugging Face model.
        exact: float32 weights that a bfloat16 model was rounded from, where they are at hand.
        strict: Every product sums in one order, whatever the number of rows.
    """

    def __init__(self, model: Any, exact: Exact | None, strict: bool = False) -> None:
        layers = model.model.layers
        first = layers[0].self_attn
        self.dtype: torch.dtype = model.lm_head.weight.dtype
        self.size = int(first.head_dim)
        self.share = int(model.config.num_attention_heads // model.config.num_key_value_heads)
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self.matrix = self.dtype == torch.bfloat16 and has_matrix_registers()
        """Whether products run in matrix registers."""
        source = _Source(names, exact, self.matrix)
        self.tiles: dict[str, Tiles] = {}
        for role, parts in _PARTS.items():
            modules = [[_at(layer, part) for part in parts] for layer in layers]
            self.tiles[role] = source.tiles(modules, interleaved=role == "gate_up")
        self.tiles["output"] = source.tiles([[model.lm_head]])
        vectors = ROWS_WIDE if wide_registers() else ROWS_NARROW
        matrix = MATRIX_ROWS[:1] if strict else MATRIX_ROWS
        self.rows = matrix if self.matrix else vectors
        """Rows that product kernels are made for."""
        formats = {tiles.format for tiles in self.tiles.values()}
        able = not strict and has_matrix_registers() and all(map(splittable, formats))
        self.split: tuple[int, ...] = SPLIT_ROWS if able else ()
        """Rows of the kernels that take inputs in parts, for many tokens of a float32 model."""
        self.together = queries_at_once(self.share, self.size)
        self.kernels = compiled_kernels(
            formats | ({DECODED} if self.matrix else set()),
            self.rows,
            self.split,
            self.together,
            self.size,
            self.dtype,
            self.matrix,
            blocks=self.matrix and not strict and block_fits(self.size),
        )
        self._alive: list[Any] = []
        self.table = self._table(model)
        """int64: see :data:`~osd.serve.native_entries.WEIGHTS`."""

    def _table(self, model: Any) -> np.ndarray:
        layers = model.model.layers
        table = np.zeros(len(layers) * entry.WIDTH + len(self.tiles) * steps.SHAPE, dtype=np.int64)
        for index, layer in enumerate(layers):
            line = table[index * entry.WIDTH : (index + 1) * entry.WIDTH]
            attn = layer.self_attn
            line[entry.INPUT_NORM] = self._floats([layer.input_layernorm.weight])
            line[entry.MLP_NORM] = self._floats([layer.post_attention_layernorm.weight])
            if hasattr(attn, "q_norm"):
                heads = model.config.num_attention_heads
                norms = [attn.q_norm.weight] * heads + [attn.k_norm.weight] * (heads // self.share)
                line[entry.HEAD_NORM] = self._floats(norms)
            for role, place, bias in _PLACES:
                tiles = self.tiles[role]
                line[place] = tiles.data[index].data_ptr()
                biases = [_at(layer, part).bias for part in _PARTS[role]]
                if biases[0] is not None:
                    parts = interleave(biases) if role == "gate_up" else biases
                    line[bias] = self._floats(parts, tiles.padded)
        for index, tiles in enumerate(self.tiles.values()):
            line = table[len(layers) * entry.WIDTH + index * steps.SHAPE :]
            decoded = (
                self._kernel_table(DECODED) if self.matrix and tiles.format.name != DECODED.name else None
            )
            describe_product(line, tiles, self._kernel_table(tiles.format), decoded)
        return table

    def _kernel_table(self, fmt: Format) -> np.ndarray:
        table = kernel_table(self.kernels, fmt, self.rows, self.split)
        self._alive.append(table)
        return table

    def _floats(self, parts: Sequence[Tensor], length: int = 0) -> int:
        """Address of a float32 copy of ``parts`` one after the other, filled up with zeros."""
        whole = torch.cat([part.detach().float().reshape(-1) for part in parts])
        whole = torch.cat((whole, whole.new_zeros(max(0, length - len(whole)))))
        self._alive.append(whole)
        return whole.data_ptr()

    def norm_address(self, weight: Tensor) -> int:
        """Address of a float32 copy of a norm's weight."""
        return self._floats([weight])


_PARTS: Mapping[str, tuple[str, ...]] = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attn_out": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
_PLACES = (
    ("qkv", entry.QKV, entry.QKV_BIAS),
    ("attn_out", entry.ATTN_OUT, entry.ATTN_OUT_BIAS),
    ("gate_up", entry.GATE_UP, entry.GATE_UP_BIAS),
    ("down", entry.DOWN, entry.DOWN_BIAS),
)


class _Source:
    """Weights of modules, and the float32 ones they were rounded from."""

    def __init__(self, names: Mapping[int, str], exact: Exact | None, paired: bool) -> None:
        self.names, self.exact, self.paired = names, exact, paired

    def tiles(self, modules: Sequence[Sequence[Any]], interleaved: bool = False) -> Tiles:
        join = interleave if interleaved else list
        weights = [torch.cat(join([m.weight.detach() for m in parts])) for parts in modules]
        exact = None
        if self.exact is not None and weights[0].dtype == torch.bfloat16:
            read = self.exact
            exact = [torch.cat(join([read(self.names[id(m.weight)]) for m in parts])) for parts in modules]
        found = tiles_of(weights, exact, paired=self.paired)
        assert found is not None
        return found


def _at(module: Any, path: str) -> Any:
    for name in path.split("."):
        module = getattr(module, name)
    return module


def compiled_kernels(
    formats: set[Format],
    rows: Sequence[int],
    split: Sequence[int],
    together: int,
    size: int,
    dtype: torch.dtype,
    matrix: bool,
    blocks: bool = False,
) -> dict[str, int]:
    """Addresses of all kernels that a model of these sizes needs, by name.

    ``blocks`` adds the one that attends tokens by blocks, whose results depend on how tokens fall into them.
    """
    kind, rounded = KINDS[dtype], dtype == torch.bfloat16

    def emit(module: ir.Module) -> None:
        for fmt in sorted(formats, key=lambda fmt: fmt.key):
            for count in rows:
                if matrix:
                    emit_matrix_tile(module, tile_name(fmt, count), fmt, count)
                else:
                    emit_tile(module, tile_name(fmt, count), fmt, count, wide_registers())
            for count in split:
                emit_split_tile(module, split_name(fmt, count), fmt, count)
        if split:
            emit_split(module, "split")
        emit_scores(module, "scores", size, kind)
        emit_values(module, "values", together, size, kind)
        emit_values(module, "values_more", together, size, kind, more=True)
        emit_softmax(module, "softmax")
        if blocks:
            emit_attend(module, "attend", size)
        emit_gate(module, "gate", rounded)
        emit_round(module, "round")
        emit_store(module, "store", kind)

    return compiled(emit)
