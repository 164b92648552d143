"""``numerics: strict``: a token's logits are the same to the last bit whatever else a pass computes.

The lean forward picks the fastest kernel for the rows at hand, so a product over one row and over five
rounds differently, and at a near tie the text changes (case A14). Here every product and every
elementwise step runs over blocks of one fixed number of rows, filled up where rows are missing, by one
fixed kernel. A kernel whose rows do not depend on their place or neighbours (checked at load, bit by
bit) then gives a token one result alone, in a batch, in a chain, in a tree, and in any prefill chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from osd.serve.cache import SlotCache
from osd.serve.layout import PassLayout
from osd.serve.lean import LeanLayer, LeanTarget
from osd.serve.products import Matrix
from osd.serve.strict_attention import StrictAttention, units
from osd.serve.target import PassOutput, PassRow


@dataclass(frozen=True, slots=True)
class Kernel:
    """A product over blocks of a fixed number of rows.

    Attributes:
        name: For messages.
        rows: Rows of a block.
        product: ``x [rows, in], weight [out, in] -> x @ weight.T``.
    """

    name: str
    rows: int
    product: Callable[[Tensor, Tensor], Tensor]


def _transposed(x: Tensor, weight: Tensor) -> Tensor:
    return (weight @ x.t()).t().contiguous()


KERNELS = (
    Kernel("linear over 8 rows", 8, F.linear),
    Kernel("linear over 16 rows", 16, F.linear),
    Kernel("transposed over 8 rows", 8, _transposed),
    Kernel("linear over 1 row", 1, F.linear),
)
"""In the order tried; never by timing, so that every start on one machine takes the same."""


class StrictTarget(LeanTarget):
    """A lean target whose results depend on a token's own text alone.

    Args:
        model: As for :class:`LeanTarget`.
        name: What it was loaded from.
        feature_layers: See :class:`~osd.serve.target.TargetModel`.
        kernel: The product and its block of rows.
    """

    def __init__(
        self, model: Any, *, name: str, feature_layers: Sequence[int] | None, kernel: Kernel = KERNELS[0]
    ) -> None:
        super().__init__(model, name=name, feature_layers=feature_layers, budget=0.0, blocked=False)
        self.kernel = kernel

    @torch.inference_mode()
    def forward(self, cache: SlotCache, rows: Sequence[PassRow]) -> PassOutput:
        """See :meth:`TargetModel.forward`."""
        layout = PassLayout(cache, rows, self.device)
        found = units(layout.rows, layout.starts, cache.max_length)
        attention = StrictAttention(cache, found, layout.count, self._heads, self._kv_heads, self._scaling)
        rotations = [self._rotation(block) for block in self._blocks(layout.positions)]
        hidden = [self._embed(block) for block in self._blocks(layout.tokens)]
        kept: list[Tensor] = []
        for index, layer in enumerate(self._layers):
            qkv = torch.cat([self._project(layer, *pair) for pair in zip(hidden, rotations, strict=True)])
            qkv = qkv[: layout.count]
            new = qkv[:, self._heads :].view(layout.count, 2, self._kv_heads, self._head_dim)
            cache.pairs[index][:, layout.slots, :, layout.places] = new
            attended = self._blocks(attention.attend(index, qkv[:, : self._heads]))
            hidden = [self._rest(layer, *pair) for pair in zip(hidden, attended, strict=True)]
            if cache.features is not None and index + 1 in self.feature_layers:
                kept.append(torch.cat(hidden)[: layout.count])
        if cache.features is not None:
            cache.features[layout.slots, layout.places] = torch.cat(kept, -1)
        return PassOutput(self._logits(torch.cat(hidden)[: layout.count], layout), layout.offsets)

    def _blocks(self, x: Tensor) -> list[Tensor]:
        """``x`` in blocks of the kernel's rows, each in memory of its own, the last filled up with zeros."""
        rows = self.kernel.rows
        missing = -x.shape[0] % rows
        whole = torch.cat((x, x.new_zeros(missing, *x.shape[1:]))).view(-1, rows, *x.shape[1:])
        return [block.clone() for block in whole.unbind()]

    def _product(self, x: Tensor, weight: Matrix, bias: Tensor | None = None) -> Tensor:
        found = self.kernel.product(x, weight.plain)
        return found if bias is None else found + bias

    def _embed(self, tokens: Tensor) -> Tensor:
        h = F.embedding(tokens, self.embedding)
        return h if self._embed_scale is None else h * self._embed_scale

    def _project(self, layer: LeanLayer, h: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """Rotated queries and keys, and values, of one block: ``[rows, heads + 2 kv_heads, head_dim]``."""
        qkv = self._product(self._norm(h, layer.input_norm), layer.qkv, layer.qkv_bias)
        qkv = qkv.view(h.shape[0], -1, self._head_dim)
        qk = qkv[:, : self._heads + self._kv_heads]
        if layer.head_norm is not None:
            qk.copy_(self._norm(qk, layer.head_norm))
        cos, sin = rotation
        turned = qk.roll(self._head_dim // 2, -1)
        qk.mul_(cos).addcmul_(turned, sin)
        return qkv

    def _rest(self, layer: LeanLayer, h: Tensor, attended: Tensor) -> Tensor:
        """One block behind the attention: its output matrix, and the MLP."""
        h = h + self._product(attended, layer.attn_out, layer.attn_out_bias)
        both = self._product(self._norm(h, layer.mlp_norm), layer.gate_up, layer.gate_up_bias)
        gate, up = both.chunk(2, -1)
        return h + self._product(self._activation(gate).mul_(up), layer.down, layer.down_bias)

    def _logits(self, h: Tensor, layout: PassLayout) -> Tensor:
        if not layout.logit_count:
            return h.new_empty(0, self.vocab_size, dtype=torch.float32)
        if layout.logit_tokens is not None:
            h = h[layout.logit_tokens]
        blocks = [
            self._product(self._norm(block, self._final_norm), self._output) for block in self._blocks(h)
        ]
        return torch.cat(blocks)[: layout.logit_count].float()
