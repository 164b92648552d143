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


def philox_words(seeds: Tensor, choices: Tensor, positions: Tensor, blocks: Tensor, stream: int) -> Tensor:
    """Raw words, as numpy's ``Philox(key=(seed, choice), counter=(0, position, stream, 0))`` gives them.

    Args:
        seeds: int64 [R], as ``choices`` and ``positions``; all on one device.
        blocks: Which four words, int64 [B]: block b holds words ``4 * b`` to ``4 * b + 3``.
        stream: See :class:`osd.serve.noise.RequestNoise`.

    Returns:
        int64 [R, B, 4], to be read as unsigned.
    """
    shape = (len(seeds), len(blocks))
    blocks = blocks.expand(shape)
    seeds, choices, positions = (values.unsqueeze(-1).expand(shape) for values in (seeds, choices, positions))
    # Both products of a round at once: ``even`` holds words 0 and 2 of the counter, ``odd`` 1 and 3.
    even = torch.stack((blocks + 1, torch.full_like(blocks, stream)))
    odd = torch.stack((positions, torch.zeros_like(positions)))
    key = torch.stack((seeds, choices))
    low, high, step = (_pair(values, blocks) for values in (_halves(0), _halves(32), _STEPS))
    whole = _pair(_MULTIPLIERS, blocks)
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


def gumbel_rows(seeds: Tensor, choices: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Noise of every token at one position a row, float64 [R, vocab_size], from int64 [R] each."""
    blocks = torch.arange(math.ceil(vocab_size / LANES), device=seeds.device)
    words = philox_words(seeds, choices, positions, blocks, 0)
    return gumbel_of(words.flatten(1)[:, :vocab_size])


def gumbel_tokens(seed: int, choice: int, position: int, token_ids: Tensor, stream: int) -> Tensor:
    """Noise of ``token_ids`` (int64 [n]) at one position, float64 [n], on their device."""
    seeds, choices, positions = (
        torch.full((1,), signed(value), device=token_ids.device) for value in (seed, choice, position)
    )
    words = philox_words(seeds, choices, positions, token_ids >> 2, stream)[0]
    return gumbel_of(words.gather(-1, (token_ids & 3).unsqueeze(-1)).squeeze(-1))


def _halves(shift: int) -> tuple[int, int]:
    first, second = (value >> shift & _HALF for value in _MULTIPLIERS)
    return first, second


def _pair(values: tuple[int, int], like: Tensor) -> Tensor:
    """Two constants [2, 1, ...] that broadcast over a pair of ``like``: filled there, not copied."""
    filled = [torch.full((), signed(value), dtype=torch.int64, device=like.device) for value in values]
    return torch.stack(filled).view(2, *[1] * like.ndim)


def _upper_word(x: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Upper 64 bits of the unsigned product of ``x`` and ``high * 2**32 + low``."""
    x_low, x_high = x & _HALF, _upper_half(x)
    middle = x_high * low + _upper_half(x_low * low)
    lower = (middle & _HALF) + x_low * high
    return x_high * high + _upper_half(middle) + _upper_half(lower)


def _upper_half(x: Tensor) -> Tensor:
    return x >> 32 & _HALF
