"""Faster linear layers for the embedder, kept only where a timing on this processor says so.

Every new prompt is embedded on one core beside the target's passes, so its cost is serving capacity lost.
oneDNN's blocked weights, in single precision or in bfloat16, halved it on one processor; on others the
plain layers win, so nothing is assumed.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence

import torch
from torch import nn

_PACKED_FOR_ROWS = 32
_WORTH = 0.9
"""A form has to take less than this share of the plain time to be chosen."""

_ALIKE = 0.9995
"""Least cosine between a form's output and the plain one."""


class PackedLinear(nn.Module):
    """A linear layer over blocked weights; computes in ``dtype`` and returns its input's type.

    Args:
        layer: The layer to stand in for.
        dtype: Of the blocked weights.
        activation: ``none``, or ``gelu`` of the result.

    Raises:
        RuntimeError, NotImplementedError, AttributeError: This build of torch cannot.
    """

    def __init__(self, layer: nn.Linear, dtype: torch.dtype, activation: str = "none") -> None:
        super().__init__()
        self.dtype = dtype
        self.activation = activation
        self.bias = None if layer.bias is None else layer.bias.detach().to(dtype)
        weight = layer.weight.detach().to(dtype).contiguous()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR_ROWS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x [..., in] -> [..., out]``, of ``x``'s type."""
        return self.product(x).to(x.dtype)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """The same in the type it is computed in."""
        found: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            x.to(self.dtype), self.packed, self.bias, self.activation, [], "none"
        )
        return found


def packed(dtype: torch.dtype) -> Callable[[nn.Module], nn.Module]:
    """Makes a copy of a model with blocked linear layers."""

    def form(model: nn.Module) -> nn.Module:
        other = copy.deepcopy(model)
        _pack(other, dtype)
        return other

    return form


def fastest(
    model: nn.Module,
    run: Callable[[nn.Module], torch.Tensor],
    forms: Sequence[Callable[[nn.Module], nn.Module]] = (packed(torch.float32), packed(torch.bfloat16)),
    repeats: int = 3,
) -> nn.Module:
    """``model`` itself, or another form of it if that takes clearly less time for the same.

    Args:
        model: A model on the CPU, in evaluation mode.
        run: Computes a typical input with the model it is given; vectors ``[..., d]``.
        forms: Each makes one, and leaves ``model`` as it is; one that cannot be made or run is left out.
        repeats: The least of this many timings counts, the first call left out.
    """
    best, least = model, _WORTH * _seconds(model, run, repeats)
    expected = run(model)
    for form in forms:
        try:
            other = form(model)
            alike = nn.functional.cosine_similarity(run(other).float(), expected.float(), dim=-1).min()
            seconds = _seconds(other, run, repeats)
        except (RuntimeError, NotImplementedError, AttributeError, TypeError, ValueError):
            continue
        if seconds < least and float(alike) > _ALIKE:
            best, least = other, seconds
    return best


def _pack(module: nn.Module, dtype: torch.dtype) -> None:
    for name, child in module.named_children():
        if isinstance(child, nn.Linear):
            setattr(module, name, PackedLinear(child, dtype))
        else:
            _pack(child, dtype)


def _seconds(model: nn.Module, run: Callable[[nn.Module], torch.Tensor], repeats: int) -> float:
    times: list[float] = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        run(model)
        times.append(time.perf_counter() - begin)
    return min(times[1:])
