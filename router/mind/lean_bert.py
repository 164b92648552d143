"""A BERT encoder in few operations, for one text at a time on one core.

Of a short text's 7 ms in the library's module, more than half is spent between the products: forty small
operations a layer, masks that mask nothing, types converted there and back.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.modeling_outputs import BaseModelOutput

from router.mind.packed_linear import PackedLinear


def bert_obstacle(model: nn.Module) -> str | None:
    """Why :class:`LeanBert` cannot stand in for ``model``; ``None`` if it can."""
    config: Any = getattr(model, "config", None)
    if getattr(config, "model_type", None) != "bert":
        return f"it is a {getattr(config, 'model_type', type(model).__name__)} model"
    if config.hidden_act != "gelu":
        return f"its activation is {config.hidden_act}"
    if getattr(config, "position_embedding_type", None) not in (None, "absolute"):
        return f"its positions are {config.position_embedding_type}"
    if config.is_decoder or getattr(config, "add_cross_attention", False):
        return "it is a decoder"
    return None


class LeanBert(nn.Module):
    """Computes the token vectors of a ``BertModel`` for one text without padding.

    Other input (several texts, padding, token types) goes to the model it was made from.

    Args:
        model: Without an obstacle by :func:`bert_obstacle`.
        dtype: Of the products; sums and norms stay in single precision.

    Raises:
        RuntimeError, NotImplementedError, AttributeError: This build of torch has no blocked weights.
    """

    def __init__(self, model: Any, dtype: torch.dtype) -> None:
        super().__init__()
        self.library = model
        self.config = model.config
        self.heads = int(model.config.num_attention_heads)
        table = model.embeddings
        positions = table.position_embeddings.weight + table.token_type_embeddings.weight[0]
        self.positions = positions.detach()
        self.layers = nn.ModuleList(_Layer(layer, self.heads, dtype) for layer in model.encoder.layer)

    def forward(self, input_ids: torch.Tensor, **inputs: Any) -> Any:
        """Token vectors ``[1, n, d]`` as ``last_hidden_state``.

        Args:
            input_ids: ``[1, n]``.
            inputs: What the library's module takes beside.
        """
        if len(input_ids) != 1 or not _is_plain(inputs):
            return self.library(input_ids=input_ids, **inputs)
        table = self.library.embeddings
        words = table.word_embeddings(input_ids[0])
        x = table.LayerNorm(words + self.positions[: len(words)])
        for layer in self.layers:
            x = layer(x)
        return BaseModelOutput(last_hidden_state=x[None])


class _Layer(nn.Module):
    """One layer over ``x [n, d]``."""

    def __init__(self, layer: Any, heads: int, dtype: torch.dtype) -> None:
        super().__init__()
        own, out = layer.attention.self, layer.attention.output
        parts = (own.query, own.key, own.value)
        joined = nn.Linear(own.query.in_features, sum(part.out_features for part in parts))
        joined.weight = nn.Parameter(torch.cat([part.weight.detach() for part in parts]), False)
        joined.bias = nn.Parameter(torch.cat([part.bias.detach() for part in parts]), False)
        self.heads = heads
        self.project = PackedLinear(joined, dtype)
        self.attended = PackedLinear(out.dense, dtype)
        self.up = PackedLinear(layer.intermediate.dense, dtype, activation="gelu")
        self.down = PackedLinear(layer.output.dense, dtype)
        self.norms = nn.ModuleList([out.LayerNorm, layer.output.LayerNorm])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, size = x.shape
        q, k, v = self.project.product(x).view(n, 3, 1, self.heads, size // self.heads).permute(1, 2, 3, 0, 4)
        mixed = F.scaled_dot_product_attention(q, k, v)[0].transpose(0, 1).reshape(n, size)
        x = self.norms[0](self.attended.product(mixed).to(x.dtype) + x)
        found: torch.Tensor = self.norms[1](self.down.product(self.up.product(x)).to(x.dtype) + x)
        return found


def _is_plain(inputs: dict[str, Any]) -> bool:
    """Whether nothing but an attention mask of ones and token types of zero came along."""
    for name, value in inputs.items():
        if name == "attention_mask" and torch.is_tensor(value):
            if not bool(value.all()):
                return False
        elif name == "token_type_ids" and torch.is_tensor(value):
            if bool(value.any()):
                return False
        elif name != "return_dict" and value is not None:
            return False
    return True
