"""The noise's generator where the logits are: Philox4x64-10 in torch's operators, bit for bit numpy's.

torch multiplies int64 modulo 2**64 on every device, which is all that the low words need; the high words of
the 128-bit products are put together from 32-bit halves. Nothing here waits for a device.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

ROUNDS = 10
LANES = 4
"""Words that one counter gives."""

_HALF = 2**32 - 1
_MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
_STEPS = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)


def signed(value: int) -> int:
    """The int64 with the bits of ``value`` modulo ``2**64``."""
    value &= 2**64 - 1
    return value - 2**64 if value >= 2**63 else value


def philox_words(keys: Tensor, positions: Tensor, streams: Tensor, blocks: Tensor) -> Tensor:
    """Raw words, as numpy's ``Philox(key=(seed, choice), counter=(0, position, stream, 0))`` gives them.

    Args:
        keys: Seeds and choices, int64 [2, R], read as unsigned; all arguments on one device.
        positions: int64 [R]; ``streams`` likewise.
        blocks: Which four words, int64 [B]: block b holds words ``4 * b`` to ``4 * b + 3``.

    Returns:
        int64 [R, B, 4], to be read as unsigned.
    """
    shape = (len(positions), len(blocks))
    first, second, third = (
        values.expand(shape) for values in (blocks + 1, positions.unsqueeze(-1), streams.unsqueeze(-1))
    )
    # Both products of a round at once: ``even`` holds words 0 and 2 of the counter, ``odd`` 1 and 3.
    even = torch.stack((first, third))
    odd = torch.stack((second, torch.zeros_like(second)))
    key = keys.unsqueeze(-1)
    low, high, whole, step = (
        _pair(values, blocks.device) for values in (_halves(0), _halves(32), _MULTIPLIERS, _STEPS)
    )
    for _ in range(ROUNDS):
        upper = _upper_word(even, low, high)
        even, odd = upper.flip(0) ^ odd ^ key, (even * whole).flip(0)
        key = key + step
    return torch.stack((even[0], odd[0], even[1], odd[1]), dim=-1)


def uniforms(words: Tensor) -> Tensor:
    """Odd multiples of ``2**-53`` in (0, 1), float64: what :meth:`RequestNoise.uniform` makes of them."""
    return (((words >> 11) & (2**53 - 1)) | 1).double() * 2.0**-53


def gumbel_of(words: Tensor) -> Tensor:
    """Standard Gumbel noise, float64; the logarithms are the device's own, to its last digit."""
    return -(-uniforms(words).log()).log()


def gumbel_rows(keys: Tensor, positions: Tensor, streams: Tensor, vocab_size: int) -> Tensor:
    """Noise of every token at one position a row, float64 [R, vocab_size]; see :func:`philox_words`."""
    blocks = torch.arange(math.ceil(vocab_size / LANES), device=positions.device)
    return gumbel_of(philox_words(keys, positions, streams, blocks).flatten(1)[:, :vocab_size])


def _halves(shift: int) -> tuple[int, int]:
    first, second = (value >> shift & _HALF for value in _MULTIPLIERS)
    return first, second


def _pair(values: tuple[int, int], device: torch.device) -> Tensor:
    """Two constants [2, 1, 1], filled on the device instead of copied there."""
    filled = [torch.full((1, 1), signed(value), dtype=torch.int64, device=device) for value in values]
    return torch.stack(filled)


def _upper_word(x: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Upper 64 bits of the unsigned product of ``x`` and ``high * 2**32 + low``."""
    x_low, x_high = x & _HALF, _upper_half(x)
    middle = x_high * low + _upper_half(x_low * low)
    lower = (middle & _HALF) + x_low * high
    return x_high * high + _upper_half(middle) + _upper_half(lower)


def _upper_half(x: Tensor) -> Tensor:
    return x >> 32 & _HALF
