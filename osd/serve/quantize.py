"""Eight-bit weights for the target, by torchao: the quantised model is then *the* target, served exactly.

Weights are int8 with a scale per output, inputs are rounded to int8 with a scale per row (torchao's
``Int8DynamicActivationInt8WeightConfig``). The products are integer sums, exact in any order, and a row's
scale depends on that row alone, so a result does not depend on the other rows of a batch.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from drafts.errors import InvalidValueError

logger = logging.getLogger(__name__)

HALF_RANGE = 127.5
"""torchao's symmetric int8 range is -128..127, its half width this."""

LEAST_STEP = torch.finfo(torch.float32).tiny
"""Step of a row of zeros."""


def quantise(model: Any, name: str) -> None:
    """Replace the weights of all linear layers of ``model`` but the output matrix by int8, in place.

    Raises:
        InvalidValueError: torchao is not installed or refuses the model.
    """
    try:
        from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_
    except ImportError as error:
        raise InvalidValueError(
            "target.quantization", "int8", "none, or install torchao (pip install 'polydraft[int8]')"
        ) from error
    output = model.get_output_embeddings()
    try:
        quantize_(
            model,
            Int8DynamicActivationInt8WeightConfig(),
            filter_fn=lambda module, _: isinstance(module, torch.nn.Linear) and module is not output,
        )
    except (RuntimeError, ValueError, NotImplementedError, AssertionError) as error:
        raise InvalidValueError(
            "target.quantization", "int8", f"none: {name} cannot be quantised ({error})"
        ) from error
    logger.info("%s: linear layers quantised to int8", name)


def int8_parts(weight: Tensor) -> tuple[Tensor, Tensor] | None:
    """``(values int8 [out, in], scales float32 [out])`` of a quantised weight, ``None`` for any other."""
    values, scale = getattr(weight, "qdata", None), getattr(weight, "scale", None)
    if values is None or scale is None or values.dtype != torch.int8:
        return None
    return values, scale.flatten().float()


def is_quantised(model: Any) -> bool:
    """Whether any linear layer of ``model`` holds int8 weights."""
    return any(
        int8_parts(module.weight) is not None
        for module in model.modules()
        if isinstance(module, torch.nn.Linear)
    )


def pack_int8(values: Tensor) -> Tensor:
    """``values`` in the layout of oneDNN's integer product."""
    packed: Tensor = torch.ops.onednn.qlinear_prepack(values, None)
    return packed


def int8_product(
    x: Tensor,
    packed: Tensor,
    scale: Tensor,
    zeros: Tensor,
    half_range: float = HALF_RANGE,
    least_step: float = LEAST_STEP,
) -> Tensor:
    """``x [n, in]`` by quantised weights: ``[n, out]`` in the type of ``x``, as torchao computes it.

    Args:
        x: Inputs, float.
        packed: From :func:`pack_int8`.
        scale: float32 ``[out]``.
        zeros: int64 ``[out]`` of zeros.
        half_range: See :data:`HALF_RANGE`.
        least_step: See :data:`LEAST_STEP`.
    """
    rows = x.float()
    step = (rows.abs().amax(-1, keepdim=True) / half_range).clamp_(min=least_step)
    rounded = (rows * step.reciprocal()).round_().clamp_(-128, 127).to(torch.int8)
    found = torch.ops.onednn.qlinear_pointwise(
        rounded, 1.0, 0, packed, scale, zeros, None, 1.0, 0, torch.float32, "none", [], ""
    )
    return found.mul_(step).to(x.dtype)  # type: ignore[no-any-return]


def has_int8_product() -> bool:
    """Whether this build of torch has the integer product."""
    try:
        packed = pack_int8(torch.ones(16, 16, dtype=torch.int8))
        ones, zeros = torch.ones(16), torch.zeros(16, dtype=torch.long)
        return bool(torch.isfinite(int8_product(torch.ones(1, 16), packed, ones, zeros)).all())
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
