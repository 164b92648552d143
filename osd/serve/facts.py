"""Facts about a target that every forward shares, read from the Hugging Face model once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from drafts.errors import InvalidValueError
from osd.serve.target import TargetModel


def adopt_facts(target: TargetModel, model: Any, name: str, feature_layers: Sequence[int] | None) -> None:
    """Fill in the attributes of ``target`` that do not depend on its forward.

    Raises:
        InvalidValueError: A feature layer outside the model.
    """
    config = model.config.get_text_config()
    layers = int(config.num_hidden_layers)
    chosen = default_feature_layers(layers) if feature_layers is None else tuple(feature_layers)
    if list(chosen) != sorted(set(chosen)) or not all(1 <= layer <= layers for layer in chosen):
        raise InvalidValueError("feature_layers", list(chosen), f"ascending numbers in 1..{layers}")
    embedding = model.get_input_embeddings().weight
    target.name = name
    target.reference = model
    target.hidden_size = int(config.hidden_size)
    target.max_positions = max_positions(config)
    target.eos_token_ids = eos_token_ids(model)
    target.feature_layers = chosen
    target.feature_width = len(chosen) * target.hidden_size
    target.device = embedding.device
    target.dtype = embedding.dtype
    target.embedding = embedding.detach()
    head = model.get_output_embeddings()
    target.output_weight = target.embedding if head is None else head.weight.detach()
    target.vocab_size = int(target.output_weight.shape[0])


def max_positions(config: Any) -> int:
    """Longest text in tokens that every row of a batch may have without changing the others.

    A ``longrope`` model switches frequencies when any row passes its original length, so it is held
    below that.
    """
    limit = int(getattr(config, "max_position_embeddings", None) or 1 << 20)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        limit = min(limit, int(rope.get("original_max_position_embeddings") or limit))
    return limit


def default_feature_layers(layers: int) -> tuple[int, ...]:
    """Half, five sixths and all of the layers: the depths that heads read best (duplicates dropped)."""
    return tuple(sorted({max(1, layers // 2), max(1, round(5 * layers / 6)), layers}))


def eos_token_ids(model: Any) -> frozenset[int]:
    """End tokens of the generation config and the config; each may hold one, a list or none."""
    found: set[int] = set()
    for config in (getattr(model, "generation_config", None), model.config.get_text_config()):
        value = getattr(config, "eos_token_id", None)
        if value is not None:
            found.update(int(token) for token in (value if isinstance(value, list | tuple) else [value]))
    return frozenset(found)


def checked_length(max_length: int, max_positions: int) -> int:
    """``max_length``, refused if the model has no positions for it."""
    if not 1 <= max_length <= max_positions:
        raise InvalidValueError("max_length", max_length, f"1..{max_positions}, the target's positions")
    return max_length


def resolve_device(device: str) -> torch.device:
    """``auto`` is CUDA where there is one.

    Raises:
        InvalidValueError: A device that is not there.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device)
    except RuntimeError as error:
        raise InvalidValueError("target.device", device, "auto, cpu, cuda or cuda:N") from error
    if resolved.type == "cuda" and not torch.cuda.is_available():
        raise InvalidValueError("target.device", device, "auto or cpu: no CUDA device was found")
    return resolved


def resolve_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """``auto`` is bfloat16 on CUDA and float32 on the CPU."""
    table = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if dtype not in table:
        raise InvalidValueError("target.dtype", dtype, f"auto, {', '.join(table)}")
    return table[dtype]
