"""A domain's head as an EAGLE-3 draft that vLLM loads: one folder of ``config.json`` and safetensors.

vLLM (``models/llama_eagle3.py``, 0.32) runs the same layer as :mod:`drafts.trunk`: a norm for each chunk of
features (``fc_norm``), ``fc``, norms of embedding and hidden before one decoder layer over both, the raw
hidden as residual, the output before the final norm fed back, and auxiliary states counted as layers passed.
So folding an expert's deltas into the matrices is exact. Its output matrix has no bias, which is why
:func:`obstacle` may refuse. The id table is written twice, as in every EAGLE-3 checkpoint: ``d2t[i]`` is
the target's id of draft id ``i`` less ``i``, ``t2d`` marks the target's ids that have a draft id. vLLM reads
a missing table as zeros, so :func:`read_eagle3` refuses what vLLM would not (case A21).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from drafts.bank import Expert
from drafts.errors import CheckpointError
from drafts.trunk import HeadShape, Trunk, check_token_ids

FORMATS = ("vllm", "speculators")
CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"
SPECULATIVE_TOKENS = 3
"""Draft tokens a pass that the speculators format names as default: as deep as trunks are unrolled."""

_LAYER = "layers.0."
_NORMS = {
    "embed_norm": f"{_LAYER}input_layernorm.weight",
    "hidden_norm": f"{_LAYER}hidden_norm.weight",
    "mlp_norm": f"{_LAYER}post_attention_layernorm.weight",
    "final_norm": "norm.weight",
}
_MATRICES = {
    "fc": "fc.weight",
    "attention_out": f"{_LAYER}self_attn.o_proj.weight",
    "down": f"{_LAYER}mlp.down_proj.weight",
}
_QKV = tuple(f"{_LAYER}self_attn.{part}_proj.weight" for part in "qkv")
_GATE_UP = tuple(f"{_LAYER}mlp.{part}_proj.weight" for part in ("gate", "up"))
_OUTPUT = "lm_head.weight"


@dataclass(frozen=True)
class Eagle3Head:
    """A head that needs no expert.

    Attributes:
        trunk: The layer, with an expert's deltas folded in.
        output: Output matrix over the draft vocabulary, float32 ``[V, H]``.
    """

    trunk: Trunk
    output: torch.Tensor


@dataclass(frozen=True)
class Eagle3Target:
    """What a draft's config says about its target.

    Attributes:
        path: Folder or hub name that the other engine loads it by.
        architectures: Class names from its config.
        max_positions: Longest text in tokens.
    """

    path: str
    architectures: tuple[str, ...]
    max_positions: int


def fold_expert(trunk: Trunk, expert: Expert | None, output: torch.Tensor) -> Eagle3Head:
    """Trunk and deltas as one head that computes the same: ``x W^T + x A B = x (W + (A B)^T)^T``.

    Args:
        trunk: The shared trunk.
        expert: A domain's deltas, ``None`` for the trunk itself.
        output: The target's output rows of the draft vocabulary ``[V, H]``.
    """
    tensors = {name: tensor.detach().float().cpu() for name, tensor in trunk.tensors.items()}
    output = output.detach().float().cpu()
    if expert is not None:
        deltas = {name: tensor.detach().float().cpu() for name, tensor in expert.items()}
        for part in ("gate_up", "down"):
            tensors[part] = tensors[part] + _delta(deltas, part)
        output = output + _delta(deltas, "output")
        tensors["output_bias"] = tensors["output_bias"] + deltas["output_bias"]
    return Eagle3Head(Trunk(trunk.shape, trunk.token_ids.cpu(), tensors), output)


def obstacle(head: Eagle3Head) -> str | None:
    """What the format cannot say exactly, as a sentence; ``None`` where nothing is lost.

    A bias that is the same for all ids changes no distribution and is no obstacle.
    """
    bias = head.trunk.tensors["output_bias"]
    spread = float(bias.max() - bias.min())
    if spread == 0.0:
        return None
    return (
        f"output_bias: EAGLE-3 has no bias in its output matrix, and that of this head differs by up to "
        f"{spread:.3g} between draft ids; a trunk and experts trained without it would fit exactly"
    )


def write_eagle3(folder: Path, head: Eagle3Head, target: Eagle3Target, form: str) -> None:
    """Write a head without its output bias into ``folder``; float32, the embedding is the target's own."""
    trunk = head.trunk
    table = trunk.token_ids
    marks = torch.zeros(trunk.shape.vocab_size, dtype=torch.bool)
    marks[table] = True
    weights = {**_tensors(trunk), _OUTPUT: head.output, "d2t": table - torch.arange(len(table)), "t2d": marks}
    layer = _layer_config(trunk.shape, len(table), target.max_positions)
    config = _vllm_config(layer) if form == "vllm" else _speculators_config(layer, target)
    save_file({n: t.contiguous() for n, t in weights.items()}, folder / WEIGHTS_FILE, {"format": "pt"})
    (folder / WEIGHTS_FILE).chmod(0o644)
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def read_eagle3(folder: Path) -> Eagle3Head:
    """The head that :func:`write_eagle3` wrote, in either format.

    Raises:
        CheckpointError: A file cannot be read, or a tensor or the id table (``d2t``, ``t2d``) is missing,
            of another shape or permuted; the message names it.
    """
    try:
        config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
        config = {**config, **config.get("transformer_layer_config", {})}
        weights = load_file(folder / WEIGHTS_FILE)
        shape = _shape(config)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise CheckpointError(f"{folder.name}: cannot be read: {error!r}") from error
    names = [*_NORMS.values(), *_MATRICES.values(), *_QKV, *_GATE_UP, _OUTPUT, "d2t", "t2d"]
    norms = [f"fc_norm.{i}.weight" for i in range(len(shape.feature_layers))]
    for name in (*names, *norms):
        if name not in weights:
            raise CheckpointError(f"{folder.name}: {WEIGHTS_FILE} lacks {name}")
    table = weights["d2t"].long() + torch.arange(len(weights["d2t"]))
    check_token_ids(table, shape.vocab_size, name="d2t")
    if not torch.equal(weights["t2d"].nonzero().flatten(), table):
        raise CheckpointError(f"{folder.name}: t2d marks other ids than d2t names")
    if weights[_OUTPUT].shape != (len(table), shape.hidden_size):
        raise CheckpointError(
            f"{folder.name}: {_OUTPUT} has shape {tuple(weights[_OUTPUT].shape)}, d2t names {len(table)} ids"
        )
    tensors = {ours: weights[theirs] for ours, theirs in {**_NORMS, **_MATRICES}.items()}
    tensors["feature_norm"] = torch.stack([weights[name] for name in norms])
    tensors["qkv"] = torch.cat([weights[name] for name in _QKV])
    tensors["gate_up"] = torch.cat([weights[name] for name in _GATE_UP])
    tensors["output_bias"] = torch.zeros(len(table))
    return Eagle3Head(Trunk(shape, table, tensors), weights[_OUTPUT])


def _delta(deltas: Expert, part: str) -> torch.Tensor:
    return (deltas[f"{part}_a"] @ deltas[f"{part}_b"]).T


def _tensors(trunk: Trunk) -> dict[str, torch.Tensor]:
    """The layer's tensors by the names of a Llama checkpoint."""
    shape, tensors = trunk.shape, trunk.tensors
    parts = [heads * shape.head_dim for heads in (shape.heads, shape.kv_heads, shape.kv_heads)]
    return {
        **{theirs: tensors[ours] for ours, theirs in {**_NORMS, **_MATRICES}.items()},
        **{f"fc_norm.{i}.weight": norm for i, norm in enumerate(tensors["feature_norm"])},
        **dict(zip(_QKV, torch.split(tensors["qkv"], parts), strict=True)),
        **dict(zip(_GATE_UP, tensors["gate_up"].chunk(2), strict=True)),
    }


def _layer_config(shape: HeadShape, draft_vocab: int, max_positions: int) -> dict[str, Any]:
    """The layer as a one-layer Llama, with what EAGLE-3 adds to it."""
    return {
        "model_type": "llama",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "max_position_embeddings": max_positions,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "vocab_size": shape.vocab_size,
        "draft_vocab_size": draft_vocab,
        "dtype": "float32",
        "norm_before_residual": False,
        "norm_before_fc": False,
        "norm_output": False,
        "fc_norm": True,
        "num_aux_hidden_states": len(shape.feature_layers),
        "eagle_aux_hidden_state_layer_ids": list(shape.feature_layers),
    }


def _vllm_config(layer: dict[str, Any]) -> dict[str, Any]:
    return {"architectures": ["LlamaForCausalLMEagle3"], **layer}


def _speculators_config(layer: dict[str, Any], target: Eagle3Target) -> dict[str, Any]:
    """The config of the speculators library: the layer apart, EAGLE-3's switches at the top."""
    names = ("draft_vocab_size", "norm_before_residual", "norm_before_fc", "norm_output", "fc_norm", "dtype")
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": SPECULATIVE_TOKENS}],
            "verifier": {"name_or_path": target.path, "architectures": list(target.architectures)},
        },
        "transformer_layer_config": {
            "architectures": ["LlamaForCausalLM"],
            **{name: value for name, value in layer.items() if not name.startswith("eagle_aux")},
        },
        **{name: layer[name] for name in names},
        "eagle_aux_hidden_state_layer_ids": layer["eagle_aux_hidden_state_layer_ids"],
    }


def _shape(config: dict[str, Any]) -> HeadShape:
    return HeadShape(
        hidden_size=int(config["hidden_size"]),
        intermediate_size=int(config["intermediate_size"]),
        heads=int(config["num_attention_heads"]),
        kv_heads=int(config["num_key_value_heads"]),
        head_dim=int(config["head_dim"]),
        norm_eps=float(config["rms_norm_eps"]),
        rope_theta=float(config["rope_theta"]),
        feature_layers=tuple(int(layer) for layer in config["eagle_aux_hidden_state_layer_ids"]),
        vocab_size=int(config["vocab_size"]),
    )
