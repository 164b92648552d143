"""Finds a smaller form of a weight that decodes to it bit by bit, and lays it out in tiles.

A model shipped in quantised blocks (GGUF) is served from its dequantised float32 matrices, eight times the
bytes it came in. Few-row products are bound by reading weights, so the shipped form is the fast one; and as
decoding repeats the dequantisation exactly, the model stays the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from drafts.native.tiles import FORMATS, GROUP, OUTPUTS, PAIRED, ROUNDED, Format
from drafts.native.vectors import LANES


@dataclass(frozen=True, slots=True)
class Tiles:
    """Matrices of one shape in tiles.

    Attributes:
        data: uint8 ``[matrices, tiles, bytes of a tile]``.
        format: Of the weights.
        outputs: Rows of a matrix as given; the last tile is filled up with zeros.
        inputs: Columns of a matrix, a multiple of 32.
    """

    data: Tensor
    format: Format
    outputs: int
    inputs: int

    @property
    def padded(self) -> int:
        """Outputs in whole tiles."""
        return OUTPUTS * self.data.shape[1]


def tiles_of(
    weights: Sequence[Tensor], exact: Sequence[Tensor] | None = None, *, paired: bool = False
) -> Tiles | None:
    """``weights [out, in]``, all of one shape, in the smallest form that holds every one of them exactly.

    Args:
        weights: float32, float16 or bfloat16.
        exact: The float32 matrices that bfloat16 ``weights`` were rounded from, if they are at hand.
        paired: Codes lie as matrix registers want them, see :mod:`~drafts.native.matrix_tiles`.

    Returns:
        ``None`` where the inputs do not come in whole groups, or the type is another.
    """
    outputs, inputs = weights[0].shape
    dtype = weights[0].dtype
    if inputs % GROUP or dtype not in _PLAIN:
        return None
    sources = list(weights) if exact is None else list(exact)
    if sources[0].dtype == torch.float32 and (exact is None or dtype == torch.bfloat16):
        formats = FORMATS if dtype == torch.float32 else PAIRED if paired else ROUNDED
        for name, encode in (("q4", _q4), ("q8", _q8)):
            found = _all(encode, sources, paired)
            if found is not None and (
                dtype == torch.float32
                or all(torch.equal(s.to(dtype), w) for s, w in zip(sources, weights, strict=True))
            ):
                return Tiles(torch.stack(found), formats[name], outputs, inputs)
    name = _PLAIN[dtype]
    if dtype == torch.float32 and all(torch.equal(w.bfloat16().float(), w) for w in weights):
        weights, name = [w.bfloat16() for w in weights], "bf16"
    elif dtype == torch.float32 and all(torch.equal(w.half().float(), w) for w in weights):
        weights, name = [w.half() for w in weights], "f16"
    return Tiles(torch.stack([_plain(w) for w in weights]), FORMATS[name], outputs, inputs)


_PLAIN = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}


def _all(
    encode: Callable[[Tensor, bool], Tensor | None], weights: Sequence[Tensor], paired: bool
) -> list[Tensor] | None:
    found: list[Tensor] = []
    for weight in weights:
        tiles = encode(weight, paired)
        if tiles is None:
            return None
        found.append(tiles)
    return found


def _groups(weight: Tensor) -> Tensor:
    """``[tiles * 32, groups, 32]``, filled up with zero outputs."""
    missing = -len(weight) % OUTPUTS
    if missing:
        weight = torch.cat((weight, weight.new_zeros(missing, weight.shape[1])))
    return weight.reshape(len(weight), -1, GROUP)


def _bytes(x: Tensor) -> Tensor:
    """Per (tile, group) the bytes of ``x [tile * 32, groups]``, outputs side by side."""
    tiles = x.view(-1, OUTPUTS, x.shape[1]).transpose(1, 2).contiguous()
    return tiles.view(torch.uint8).reshape(*tiles.shape[:2], -1)


def _q4(weight: Tensor, paired: bool) -> Tensor | None:
    """Blocks of GGUF's ``Q4_1``: ``scale * code + shift``, the shift being the least weight."""
    groups = _groups(weight)
    shift = groups.amin(-1).half()
    scale = ((groups.amax(-1) - shift.float()) / 15).half()
    steps, base = scale.float()[..., None], shift.float()[..., None]
    codes = torch.where(steps > 0, (groups - base) / steps, 0.0).round().clamp(0, 15)
    if not torch.equal(codes * steps + base, groups):
        return None
    if paired:
        sides = _sides(codes.to(torch.uint8))
        pairs = sides[..., :LANES] | (sides[..., LANES:] << 4)
    else:
        split = codes.to(torch.uint8).view(-1, OUTPUTS, groups.shape[1], GROUP // 2, 2)
        low, high = split.permute(4, 0, 2, 3, 1)
        pairs = low | (high << 4)
    return torch.cat((pairs.flatten(2), _bytes(scale), _bytes(shift)), -1).flatten(1)


def _q8(weight: Tensor, paired: bool) -> Tensor | None:
    """Blocks of GGUF's ``Q8_0``: ``scale * code``, the largest code being 127."""
    groups = _groups(weight)
    scale = (groups.abs().amax(-1) / 127).half()
    steps = scale.float()[..., None]
    codes = torch.where(steps > 0, groups / steps, 0.0).round().clamp(-127, 127)
    if not torch.equal(codes * steps, groups):
        return None
    if paired:
        split = _sides(codes.to(torch.int8))
    else:
        split = codes.to(torch.int8).view(-1, OUTPUTS, groups.shape[1], GROUP).permute(0, 2, 3, 1)
    return torch.cat((split.contiguous().view(torch.uint8).flatten(2), _bytes(scale)), -1).flatten(1)


def _sides(codes: Tensor) -> Tensor:
    """``[tiles * 32, groups, 32] -> [tiles, groups, pairs of inputs, halves of a tile, 32]``.

    The last dimension holds outputs with their two inputs side by side.
    """
    split = codes.view(-1, OUTPUTS // LANES, LANES, codes.shape[1], GROUP // 2, 2)
    return split.permute(0, 3, 4, 1, 2, 5).flatten(-2)


def _plain(weight: Tensor) -> Tensor:
    groups = _groups(weight)
    split = groups.view(-1, OUTPUTS, groups.shape[1], GROUP).permute(0, 2, 3, 1)
    if weight.dtype == torch.bfloat16:
        split = split.reshape(*split.shape[:2], GROUP // 2, 2, OUTPUTS).transpose(-1, -2)
    return split.contiguous().view(torch.uint8).flatten(1)


def nearest_q8(weight: Tensor) -> Tensor:
    """``weight`` rounded to the form of ``Q8_0``, float32, for weights that need not be exact."""
    groups = weight.detach().float().reshape(len(weight), -1, GROUP)
    scale = (groups.abs().amax(-1, keepdim=True) / 127).half().float()
    codes = torch.where(scale > 0, groups / scale, 0.0).round().clamp(-127, 127)
    return (codes * scale).view_as(weight)
