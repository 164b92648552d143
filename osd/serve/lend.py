"""Reads from a loaded target what trains its draft head: dimensions, matrices, last layer, identity."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor

from drafts.trunk import HeadShape
from osd.lent import Lent
from osd.serve.quantize import int8_parts
from osd.serve.target import TargetModel
from osd.shards import ShardFacts

LAYER_TYPES = ("llama", "mistral")
"""Model types whose layer is the head's: RMSNorm, attention without biases, gated SiLU MLP."""

SAMPLED = 64
"""Values read of every weight for the fingerprint; training touches nearly all of them."""


def head_shape(target: TargetModel) -> HeadShape:
    """Dimensions, from the target's config, of a head that reads all layers that are kept."""
    config = target.reference.config.get_text_config()
    heads = int(config.num_attention_heads)
    rope = getattr(config, "rope_parameters", None) or {}
    return HeadShape(
        hidden_size=target.hidden_size,
        intermediate_size=int(config.intermediate_size),
        heads=heads,
        kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
        head_dim=int(getattr(config, "head_dim", None) or target.hidden_size // heads),
        norm_eps=float(getattr(config, "rms_norm_eps", 1e-5)),
        rope_theta=float(rope.get("rope_theta", 10000.0)),
        feature_layers=tuple(target.feature_layers),
        vocab_size=target.vocab_size,
    )


def lend(target: TargetModel) -> Lent:
    """Everything that training a head needs of ``target``, on the CPU; ``target`` may be freed then."""
    config = target.reference.config.get_text_config()
    obstacle = _obstacle(target.reference)
    return Lent(
        name=target.name,
        shape=head_shape(target),
        layers=int(config.num_hidden_layers),
        embedding=target.embedding.float().cpu(),
        output=target.output_weight.float().cpu(),
        end_tokens=tuple(sorted(target.eos_token_ids)),
        last_layer=None if obstacle else _last_layer(target.reference),
        obstacle=obstacle,
    )


def shard_facts(target: TargetModel) -> ShardFacts:
    """How shards of ``target`` are told from those of another."""
    return ShardFacts(
        target.name, fingerprint(target), target.vocab_size, target.hidden_size, target.feature_layers
    )


def fingerprint(target: TargetModel) -> str:
    """Hash of the architecture and of some values of every weight; no path or name enters it."""
    config = target.reference.config.get_text_config()
    digest = hashlib.sha256(f"{config.model_type} {target.dtype}".encode())
    for name, weight in sorted(target.reference.named_parameters()):
        parts = int8_parts(weight)
        first = (weight.detach() if parts is None else parts[0])[:1].flatten()[:SAMPLED]
        digest.update(f"{name} {tuple(weight.shape)}".encode())
        digest.update(first.float().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def _obstacle(model: Any) -> str | None:
    """Why the model's last layer is not one the head could begin as; ``None`` where it is."""
    config = model.config
    if config.model_type not in LAYER_TYPES:
        return f"model type {config.model_type!r} is not one of {', '.join(LAYER_TYPES)}"
    if config.hidden_act != "silu":
        return f"its activation is {config.hidden_act}"
    layer = model.model.layers[-1]
    for name, module in layer.named_modules():
        if isinstance(module, torch.nn.Linear):
            if int8_parts(module.weight) is not None:
                return "its weights are quantised"
            if module.bias is not None:
                return f"{name} has a bias"
    return None


def _last_layer(model: Any) -> dict[str, Tensor]:
    layer = model.model.layers[-1]
    attention, mlp = layer.self_attn, layer.mlp

    def joined(*modules: Any) -> Tensor:
        return torch.cat([module.weight.detach().float().cpu() for module in modules])

    return {
        "hidden_norm": joined(layer.input_layernorm),
        "qkv": joined(attention.q_proj, attention.k_proj, attention.v_proj),
        "attention_out": joined(attention.o_proj),
        "mlp_norm": joined(layer.post_attention_layernorm),
        "gate_up": joined(mlp.gate_proj, mlp.up_proj),
        "down": joined(mlp.down_proj),
        "final_norm": joined(model.model.norm),
    }
