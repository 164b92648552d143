"""The matrix products of a pass by name, in a form that both Python and TorchScript run."""

import torch
import torch.nn.functional as F
from torch import Tensor

from osd.serve.quantize import int8_product


def multiply(
    x: Tensor, plain: Tensor, packed: Tensor, scale: Tensor, zeros: Tensor, kernel: str, rows: int
) -> Tensor:
    """``x [n, in]`` by a weight ``[out, in]``: ``x @ weight.T``, contiguous ``[n, out]``.

    Args:
        x: Inputs.
        plain: The weight as stored; int8 for the kernel ``int8``.
        packed: Its copy in the layout of the kernels ``blocked`` and ``int8``; others do not read it.
        scale: For ``int8``, float32 ``[out]``; others do not read it.
        zeros: For ``int8``, int64 zeros ``[out]``; others do not read it.
        kernel: ``linear``, the library's own product; ``transposed``, ``(W x^T)^T``, another blocking of
            it; ``blocked``, over oneDNN's own layout, whose copy costs as many bytes again; ``int8``.
        rows: Zero rows are added up to this number: some kernels are slower for fewer rows. 0 adds none.
    """
    count = x.size(0)
    if rows > count:
        x = F.pad(x, [0, 0, 0, rows - count])
    if kernel == "int8":
        found = int8_product(x, packed, scale, zeros)
    elif kernel == "blocked":
        found = torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
    elif kernel == "transposed":
        found = torch.matmul(plain, x.t()).t().contiguous()
    else:
        found = F.linear(x, plain)
    return found[:count] if rows > count else found
