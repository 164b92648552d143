"""The decoder layers of the lean forward, in a form that both Python and TorchScript run.

A pass over a few tokens is some forty small operations a layer beside the products. Called from Python they
cost a tenth of a float32 pass and a fifth of a bfloat16 one (measured; ``docs/decisions.md``), the more as
the weights that stream by push Python out of the processor's cache. TorchScript runs the same operations,
with the same results to the last bit, from a small interpreter of its own.

Letters in shapes: N tokens of the pass, D size of a head, H heads, K key-value heads.
"""

import functools
import logging
import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from osd.serve.kernels import multiply

logger = logging.getLogger(__name__)


class Projection(NamedTuple):
    """One role's weights by layer, see :func:`~osd.serve.kernels.multiply`; ``bias`` may be empty."""

    plain: list[Tensor]
    packed: list[Tensor]
    scale: list[Tensor]
    zeros: list[Tensor]
    bias: list[Tensor]


class Decoder(NamedTuple):
    """The layers and their sizes.

    Attributes:
        input_norm: Norm weights before attention, an entry a layer.
        head_norm: Norm weights of queries and keys, ``[H + K, D]`` a layer; may be empty.
        mlp_norm: Norm weights before the MLP.
        qkv: Queries, keys and values in one matrix.
        attn_out: Attention's output.
        gate_up: Gate and up in one matrix.
        down: The MLP's output.
        heads: H.
        kv_heads: K.
        head_dim: D.
        scaling: Factor on the scores.
        eps: Of the norms.
        float_norm: Norm weights multiply in float32, before the result is rounded.
        gelu: The gate is GELU (tanh form) instead of SiLU.
    """

    input_norm: list[Tensor]
    head_norm: list[Tensor]
    mlp_norm: list[Tensor]
    qkv: Projection
    attn_out: Projection
    gate_up: Projection
    down: Projection
    heads: int
    kv_heads: int
    head_dim: int
    scaling: float
    eps: float
    float_norm: bool
    gelu: bool


class Part(NamedTuple):
    """Rows in consecutive slots that attend together.

    Attributes:
        slot: First slot; ``batch`` of them.
        width: Tokens of each row, padding included.
        length: Cache entries read.
        first: First packed token, where ``gather`` is ``None``.
        mask: Added to the scores, ``[batch, 1, width * share, length]``; ``None`` where all is seen.
        gather: Packed token of each padded place; ``None`` where the packed tokens are the padded ones.
        packed: Packed tokens of the part, and ``padded``, the place of each.
    """

    slot: int
    batch: int
    width: int
    length: int
    first: int
    mask: Tensor | None
    gather: Tensor | None
    packed: Tensor | None
    padded: Tensor | None


class Choice(NamedTuple):
    """Kernel and padding of the four products of a layer."""

    kernels: list[str]
    rows: list[int]


def norm(x: Tensor, weight: Tensor, eps: float, float_norm: bool) -> Tensor:
    """Root-mean-square norm in float32 over the last dimension; ``weight`` may be per head."""
    if weight.dim() == 1 and x.dtype == torch.float32:
        return torch.rms_norm(x, weight.size(), weight, eps)
    normed = torch.rms_norm(x.float(), [weight.size(-1)], None, eps)
    if float_norm:
        return (normed * weight.float()).to(x.dtype)
    return normed.to(x.dtype) * weight


def project(x: Tensor, weights: Projection, layer: int, kernel: str, rows: int) -> Tensor:
    """One product, with its bias."""
    found = multiply(
        x,
        weights.plain[layer],
        weights.packed[layer],
        weights.scale[layer],
        weights.zeros[layer],
        kernel,
        rows,
    )
    return found + weights.bias[layer] if len(weights.bias) > 0 else found


def attend(queries: Tensor, pair: Tensor, part: Part, kv_heads: int, scaling: float) -> Tensor:
    """Attention of one part, ``[B * width, H, D] -> [B * width, H * D]``.

    Query heads that share a key-value head are folded into the query length, so that keys are read as
    they lie.
    """
    batch, width = part.batch, part.width
    heads, size = queries.size(1), queries.size(2)
    share = heads // kv_heads
    folded = queries.reshape(batch, width, kv_heads, share, size).permute(0, 2, 1, 3, 4)
    folded = folded.reshape(batch, kv_heads, width * share, size)
    both = pair[:, part.slot : part.slot + batch, :, : part.length]
    out = F.scaled_dot_product_attention(folded, both[0], both[1], part.mask, scale=scaling)
    out = out.view(batch, kv_heads, width, share, size).permute(0, 2, 1, 3, 4)
    return out.reshape(batch * width, heads * size)


def attend_all(queries: Tensor, pair: Tensor, parts: list[Part], kv_heads: int, scaling: float) -> Tensor:
    """Attention of all parts, each at its packed places: ``[N, H, D] -> [N, H * D]``."""
    if len(parts) == 1 and parts[0].gather is None:
        return attend(queries, pair, parts[0], kv_heads, scaling)
    attended = queries.new_empty(queries.size(0), queries.size(1) * queries.size(2))
    for part in parts:
        gather, packed, padded = part.gather, part.packed, part.padded
        if gather is not None and packed is not None and padded is not None:
            out = attend(queries[gather], pair, part, kv_heads, scaling)
            attended[packed] = out[padded]
        else:
            end = part.first + part.batch * part.width
            attended[part.first : end] = attend(queries[part.first : end], pair, part, kv_heads, scaling)
    return attended


def run_layers(
    h: Tensor,
    cos: Tensor,
    sin: Tensor,
    pairs: list[Tensor],
    decoder: Decoder,
    parts: list[Part],
    span: list[int],
    slots: Tensor,
    places: Tensor,
    choice: Choice,
    kept_layers: list[int],
) -> tuple[Tensor, list[Tensor]]:
    """All layers; writes the new keys and values.

    Args:
        h: Embedded tokens ``[N, hidden]``.
        cos: Rotary factors ``[N, 1, D]``.
        sin: The same; signed so that a half swap replaces negation.
        pairs: Keys and values by layer, see :attr:`SlotCache.pairs`.
        decoder: The layers.
        parts: Who attends with whom.
        span: Slot, begin and end of the new entries where all are one row's; else empty.
        slots: int64 ``[N]``, the cache row of each token.
        places: int64 ``[N]``, its place there.
        choice: How to multiply.
        kept_layers: Layers passed (1-based) whose hidden states are returned.

    Returns:
        Hidden states ``[N, hidden]``, and those of the kept layers.
    """
    count = h.size(0)
    heads, kv_heads, size = decoder.heads, decoder.kv_heads, decoder.head_dim
    eps, float_norm = decoder.eps, decoder.float_norm
    kernels, rows = choice.kernels, choice.rows
    kept: list[Tensor] = []
    for layer in range(len(pairs)):
        x = norm(h, decoder.input_norm[layer], eps, float_norm)
        qkv = project(x, decoder.qkv, layer, kernels[0], rows[0]).view(count, -1, size)
        qk = qkv[:, : heads + kv_heads]
        if len(decoder.head_norm) > 0:
            qk.copy_(norm(qk, decoder.head_norm[layer], eps, float_norm))
        turned = qk.roll(size // 2, -1)
        qk.mul_(cos).addcmul_(turned, sin)
        pair = pairs[layer]
        new = qkv[:, heads:].view(count, 2, kv_heads, size)
        if len(span) > 0:
            pair[:, span[0], :, span[1] : span[2]] = new.permute(1, 2, 0, 3)
        else:
            pair[:, slots, :, places] = new
        attended = attend_all(qkv[:, :heads], pair, parts, kv_heads, decoder.scaling)
        h = h + project(attended, decoder.attn_out, layer, kernels[1], rows[1])
        x = norm(h, decoder.mlp_norm[layer], eps, float_norm)
        gate, up = project(x, decoder.gate_up, layer, kernels[2], rows[2]).chunk(2, -1)
        gate = F.gelu(gate, approximate="tanh") if decoder.gelu else F.silu(gate)
        h = h + project(gate.mul_(up), decoder.down, layer, kernels[3], rows[3])
        if layer + 1 in kept_layers:
            kept.append(h)
    return h, kept


Layers = Callable[..., tuple[Tensor, list[Tensor]]]
"""The signature of :func:`run_layers`."""


@functools.cache
def compiled_layers() -> Layers:
    """:func:`run_layers` in TorchScript; as it is, in Python, where this torch cannot compile it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            scripted = torch.jit.script(run_layers)
    except Exception as error:
        logger.warning("the layers run from Python, TorchScript does not compile them: %s", error)
        return run_layers

    @functools.wraps(run_layers)
    def run(*arguments: object) -> tuple[Tensor, list[Tensor]]:
        # Profiling would compile anew for every mix of shapes, and there is nothing here to fuse.
        with torch.jit.optimized_execution(False):  # type: ignore[attr-defined]
            found: tuple[Tensor, list[Tensor]] = scripted(*arguments)
        return found

    return run
