"""A trunk before its first step: its vocabulary from the answers, its weights fresh or the target's own."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from drafts.errors import InvalidValueError
from drafts.trunk import Trunk
from osd.learn.pretrain_config import PretrainConfig
from osd.learn.pretrain_data import Answer, rank_vocabulary, vocabulary_size
from osd.lent import Lent

MEASURED = 64
"""Answers that the size of the target's hidden states is measured on."""

BLEND = 0.1
"""What the shallower layers count in the fused features of a head that begins as the target's last layer."""


def initial_trunk(
    lent: Lent, training: Sequence[Answer], held: Sequence[Answer], config: PretrainConfig
) -> Trunk:
    """The trunk that training begins with; it reads the layers of ``lent.shape``.

    Raises:
        InvalidValueError: No answers, or a target whose last layer the head cannot take over.
    """
    if not training or not held:
        raise InvalidValueError(
            "answers", f"{len(training)} to train on, {len(held)} held back", "at least one of both"
        )
    ranked = rank_vocabulary(training, lent.shape.vocab_size, lent.end_tokens)
    size = config.draft_vocab or vocabulary_size(ranked, held, config.coverage)
    trunk = Trunk.fresh(lent.shape, ranked[:size].sort().values, config.seed)
    if config.init == "target":
        _take_over(trunk, lent, training[:MEASURED])
    return trunk


def _take_over(trunk: Trunk, lent: Lent, answers: Sequence[Answer]) -> None:
    """Begin as the target's last layer over its deepest features.

    Its attention reads the hidden half of the head's input and the fresh weights of the embedding half; the
    fused features are the deepest layer's at their own size, for the layer's weights mean that basis.
    """
    layer = lent.last_layer
    if layer is None:
        raise InvalidValueError("init", "target", f"fresh for {lent.name}: {lent.obstacle}")
    tensors, width = trunk.tensors, lent.shape.hidden_size
    for name in ("hidden_norm", "attention_out", "mlp_norm", "gate_up", "down", "final_norm"):
        tensors[name] = layer[name].clone()
    tensors["qkv"][:, width:] = layer["qkv"]
    deepest = torch.cat([answer.features[:, -width:].float() for answer in answers])
    tensors["feature_norm"][-1] = float(deepest.square().mean().sqrt())
    tensors["fc"][:, :-width] *= BLEND
    tensors["fc"][:, -width:] = torch.eye(width)
