"""The lean forward: Llama-like models in plain tensor code over the slot cache.

A Hugging Face forward over a few tokens spends most of its time outside the matrix products that a
pass needs. This one keeps what the model computes and drops the rest: fused projections, packed
rows, no key expansion, keys written once into preallocated rows, products chosen by timing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from osd.serve.attention import attention_parts
from osd.serve.cache import SlotCache
from osd.serve.decoder import Choice, Decoder, Projection, compiled_layers, norm, run_layers
from osd.serve.facts import adopt_facts, checked_length
from osd.serve.layout import PassLayout
from osd.serve.products import Matrix, ProductPlan
from osd.serve.quantize import has_int8_product, int8_parts, is_quantised, pack_int8
from osd.serve.target import PassOutput, PassRow, TargetModel

LEAN_TYPES = ("llama", "mistral", "qwen2", "qwen3", "gemma")
"""Model types with this layer: norm, fused attention, residual, norm, gated MLP, residual."""


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "gelu_pytorch_tanh": _gelu_tanh}
ROLES = ("qkv", "attn_out", "gate_up", "down")
"""The matrices of a layer, in the order in which a pass reads them."""

_STATIC_ROPE = ("default", "linear", "llama3", "yarn")


def lean_obstacle(model: Any) -> str | None:
    """Why ``model`` cannot run through the lean forward; ``None`` if it can."""
    config = model.config
    if is_quantised(model) and not (model.device.type == "cpu" and has_int8_product()):
        return "int8 weights, and no integer product for this device"
    if config.model_type not in LEAN_TYPES:
        return f"model type {config.model_type!r} is not one of {', '.join(LEAN_TYPES)}"
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        return f"layer types {sorted(kinds)}"
    if config.model_type == "mistral" and config.sliding_window is not None:
        return f"sliding window {config.sliding_window}"
    rope = getattr(model.model.rotary_emb, "rope_type", None)
    if rope not in _STATIC_ROPE:
        return f"rope type {rope!r} (its frequencies depend on the length)"
    if _activation_name(config) not in _ACTIVATIONS:
        return f"activation {_activation_name(config)!r}"
    return None


@dataclass(frozen=True, slots=True)
class LeanLayer:
    """Weights of one decoder layer, projections that share an input fused into one matrix."""

    input_norm: Tensor
    qkv: Matrix
    qkv_bias: Tensor | None
    head_norm: Tensor | None
    attn_out: Matrix
    attn_out_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Matrix
    gate_up_bias: Tensor | None
    down: Matrix
    down_bias: Tensor | None


class LeanTarget(TargetModel):
    """A Llama, Mistral, Qwen2, Qwen3 or Gemma model.

    Args:
        model: The Hugging Face model. Its projections become views into the fused matrices, so that
            both share storage.
        name: What it was loaded from.
        feature_layers: See :class:`~osd.serve.target.TargetModel`.
        budget: Seconds to spend on choosing matrix products by timing.
        blocked: Whether weights may be copied into a second layout.
    """

    forward_kind: Literal["native", "lean", "generic"] = "lean"

    def __init__(
        self,
        model: Any,
        *,
        name: str,
        feature_layers: Sequence[int] | None,
        budget: float = 4.0,
        blocked: bool = True,
    ) -> None:
        adopt_facts(self, model, name, feature_layers)
        config = model.config
        self._offset = 1.0 if config.model_type == "gemma" else 0.0  # Gemma stores norm weights minus 1
        first = model.model.layers[0].self_attn
        self._head_dim = int(first.head_dim)
        self._heads = int(config.num_attention_heads)
        self._kv_heads = int(config.num_key_value_heads)
        self._scaling = float(first.scaling)
        self._eps = float(config.rms_norm_eps)
        self._activation = _ACTIVATIONS[_activation_name(config)]
        self._embed_scale: Tensor | None = None
        if config.model_type == "gemma":
            self._embed_scale = torch.tensor(self.hidden_size**0.5, dtype=self.dtype, device=self.device)
        rotary = model.model.rotary_emb
        self._inv_freq: Tensor = rotary.inv_freq.detach().float().to(self.device)
        self._rope_scaling = float(rotary.attention_scaling)
        with torch.no_grad():
            self._layers = [self._fuse(layer) for layer in model.model.layers]
            self._final_norm = self._norm_weight(model.model.norm)
        self._output = Matrix(self.output_weight)
        self.plan = ProductPlan(self.weights(), budget=budget, blocked=blocked)
        self._run = compiled_layers() if self.device.type == "cpu" else run_layers
        self._decoder = self._collect()

    def weights(self) -> dict[str, list[Matrix]]:
        """The matrices of a pass by role, for timing."""
        return {
            "qkv": [layer.qkv for layer in self._layers],
            "attn_out": [layer.attn_out for layer in self._layers],
            "gate_up": [layer.gate_up for layer in self._layers],
            "down": [layer.down for layer in self._layers],
            "output": [self._output],
        }

    def make_cache(self, slots: int, max_length: int, keep_features: bool) -> SlotCache:
        """See :meth:`TargetModel.make_cache`."""
        return SlotCache(
            layers=len(self._layers),
            slots=slots,
            kv_heads=self._kv_heads,
            max_length=checked_length(max_length, self.max_positions),
            head_dim=self._head_dim,
            feature_width=self.feature_width if keep_features else 0,
            dtype=self.dtype,
            device=self.device,
        )

    @torch.inference_mode()
    def forward(self, cache: SlotCache, rows: Sequence[PassRow]) -> PassOutput:
        """See :meth:`TargetModel.forward`."""
        return self.packed_pass(cache, PassLayout(cache, rows, self.device))

    def packed_pass(self, cache: SlotCache, layout: PassLayout) -> PassOutput:
        """The pass over rows that are laid out one after the other."""
        cos, sin = self._rotation(layout.positions)
        h = F.embedding(layout.tokens, self.embedding)
        if self._embed_scale is not None:
            h = h * self._embed_scale
        products = [self.plan.product(role, layout.count) for role in ROLES]
        h, kept = self._run(
            h,
            cos,
            sin,
            cache.pairs,
            self._decoder,
            attention_parts(layout, self._heads // self._kv_heads, self.dtype),
            layout.span,
            layout.slots,
            layout.places,
            Choice([product.kernel for product in products], [product.rows for product in products]),
            list(self.feature_layers) if cache.features is not None else [],
        )
        if cache.features is not None:
            cache.features[layout.slots, layout.places] = torch.cat(kept, -1)
        if not layout.logit_count:
            return PassOutput(h.new_empty(0, self.vocab_size, dtype=torch.float32), layout.offsets)
        if layout.logit_tokens is not None:
            h = h[layout.logit_tokens]
        product = self.plan.product("output", layout.logit_count)
        logits = product(self._norm(h, self._final_norm), self._output)
        return PassOutput(logits.float(), layout.offsets)

    def _collect(self) -> Decoder:
        """The layers as :func:`~osd.serve.decoder.run_layers` takes them."""
        layers = self._layers
        roles: dict[str, Projection] = {}
        for role in ROLES:
            parts = [getattr(layer, role).parts() for layer in layers]
            biases = [getattr(layer, f"{role}_bias") for layer in layers]
            plain, packed, scale, zeros = (list(column) for column in zip(*parts, strict=True))
            bias = [bias for bias in biases if bias is not None]
            roles[role] = Projection(plain, packed, scale, zeros, bias)
        head_norms = [layer.head_norm for layer in layers if layer.head_norm is not None]
        return Decoder(
            input_norm=[layer.input_norm for layer in layers],
            head_norm=head_norms,
            mlp_norm=[layer.mlp_norm for layer in layers],
            **roles,
            heads=self._heads,
            kv_heads=self._kv_heads,
            head_dim=self._head_dim,
            scaling=self._scaling,
            eps=self._eps,
            float_norm=bool(self._offset),
            gelu=self._activation is not F.silu,
        )

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return norm(x, weight, self._eps, bool(self._offset))

    def _rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Rotary factors ``[N, 1, head_dim]``, the sine signed so that a half swap replaces negation."""
        angles = positions[:, None].float() * self._inv_freq
        cos, sin = angles.cos() * self._rope_scaling, angles.sin() * self._rope_scaling
        cos, sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
        return cos[:, None].to(self.dtype), sin[:, None].to(self.dtype)

    def _norm_weight(self, norm: Any) -> Tensor:
        weight: Tensor = norm.weight.detach()
        return weight.float() + self._offset if self._offset else weight

    def _fuse(self, layer: Any) -> LeanLayer:
        attn, mlp = layer.self_attn, layer.mlp
        head_norm = None
        if hasattr(attn, "q_norm"):
            q, k = attn.q_norm.weight.detach(), attn.k_norm.weight.detach()
            head_norm = torch.cat((q.expand(self._heads, -1), k.expand(self._kv_heads, -1)))
        qkv, qkv_bias = _join([attn.q_proj, attn.k_proj, attn.v_proj])
        gate_up, gate_up_bias = _join([mlp.gate_proj, mlp.up_proj])
        return LeanLayer(
            input_norm=self._norm_weight(layer.input_layernorm),
            qkv=qkv,
            qkv_bias=qkv_bias,
            head_norm=head_norm,
            attn_out=_join([attn.o_proj])[0],
            attn_out_bias=_bias(attn.o_proj),
            mlp_norm=self._norm_weight(layer.post_attention_layernorm),
            gate_up=gate_up,
            gate_up_bias=gate_up_bias,
            down=_join([mlp.down_proj])[0],
            down_bias=_bias(mlp.down_proj),
        )


def _activation_name(config: Any) -> str:
    if config.model_type == "gemma":
        return getattr(config, "hidden_activation", None) or str(config.hidden_act)
    return str(config.hidden_act)


def _bias(module: Any) -> Tensor | None:
    return None if module.bias is None else module.bias.detach()


def _join(modules: Sequence[Any]) -> tuple[Matrix, Tensor | None]:
    """One matrix of the modules' rows, and one bias.

    The modules' own weights become views of it, quantised ones excepted (they keep theirs).
    """
    biases = [_bias(module) for module in modules]
    present = [bias for bias in biases if bias is not None]
    bias = torch.cat(present) if len(present) == len(modules) else None
    parts = [int8_parts(module.weight) for module in modules]
    found = [part for part in parts if part is not None]
    if len(found) == len(modules):
        values, scale = (torch.cat(side) for side in zip(*found, strict=True))
        return Matrix(values, pack_int8(values), scale, torch.zeros_like(scale, dtype=torch.long)), bias
    if len(modules) == 1:
        return Matrix(modules[0].weight.detach()), bias
    joined = torch.cat([module.weight.detach() for module in modules])
    begin = 0
    for module in modules:
        end = begin + module.weight.shape[0]
        module.weight.data = joined[begin:end]
        begin = end
    return Matrix(joined), bias
