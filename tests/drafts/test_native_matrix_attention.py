"""Attention of a block of tokens in matrix registers, against torch in double precision."""

import ctypes
import functools
import struct

import pytest
import torch

from drafts.native.machine import compiled
from drafts.native.matrix_attention import KEYS, TOKENS, block_fits, block_scratch_bytes, emit_attend
from drafts.native.matrix_tiles import has_matrix_registers

pytestmark = pytest.mark.skipif(not has_matrix_registers(), reason="no matrix registers here")


@functools.cache
def kernel(size: int):
    address = compiled(lambda module: emit_attend(module, "attend", size))["attend"]
    return ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 8)(address)


def bits(number: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f", number))[0])


def attend(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float, spare: int = 0
) -> torch.Tensor:
    """``[16, D]`` from bfloat16 queries, keys and values; what lies behind the keys is NaN."""
    count, size = keys.shape
    stride = -(-(count + spare) // KEYS) * KEYS
    behind = torch.full((KEYS, size), float("nan"), dtype=torch.bfloat16)
    read = torch.cat((keys, behind))
    turned = torch.zeros(size, stride, dtype=torch.bfloat16)
    turned[:, :count] = values.T
    scratch = torch.full((block_scratch_bytes(size, count) // 4,), float("nan"))
    out = torch.full((TOKENS, size), float("nan"))
    kernel(size)(
        queries.contiguous().data_ptr(),
        read.data_ptr(),
        turned.data_ptr(),
        count,
        scratch.data_ptr(),
        out.data_ptr(),
        bits(scaling),
        stride,
    )
    return out


def expected(queries, keys, values, scaling: float) -> torch.Tensor:
    scores = queries.double() @ keys.double().T * scaling
    count = len(keys)
    seen = torch.arange(count) <= torch.arange(count - TOKENS, count)[:, None]
    return scores.masked_fill(~seen, float("-inf")).softmax(-1) @ values.double()


def drawn(count: int, size: int, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, size, generator=generator).bfloat16() for n in (TOKENS, count, count)]


@pytest.mark.parametrize("size", [32, 64, 96])
@pytest.mark.parametrize("count", [16, 17, 31, 32, 33, 48, 100, 257, 512])
def test_every_token_sees_the_keys_up_to_its_own(size: int, count: int) -> None:
    assert block_fits(size)
    queries, keys, values = drawn(count, size)
    for scaling in (size**-0.5, 2.0):
        found = attend(queries, keys, values, scaling)
        assert float((found.double() - expected(queries, keys, values, scaling)).abs().max()) < 0.012


def test_later_keys_change_nothing() -> None:
    queries, keys, values = drawn(40, 64)
    found = attend(queries, keys, values, 0.125)
    keys[25 + 3 :], values[25 + 3 :] = 7.0, 100.0
    assert torch.equal(attend(queries, keys, values, 0.125)[:4], found[:4])


def test_values_may_lie_wider_apart_than_the_keys_are_many() -> None:
    queries, keys, values = drawn(40, 64)
    assert torch.equal(attend(queries, keys, values, 0.125, spare=300), attend(queries, keys, values, 0.125))


def test_scores_beyond_the_range_of_exp() -> None:
    queries, keys, values = drawn(64, 64, seed=3)
    found = attend(100 * queries, 100 * keys, values, 0.125)
    assert bool(found.isfinite().all())
    torch.testing.assert_close(
        found.double(), expected(100 * queries, 100 * keys, values, 0.125), atol=0.02, rtol=0.02
    )


def test_nan_in_one_query_stays_there() -> None:
    queries, keys, values = drawn(50, 64)
    clean = attend(queries, keys, values, 0.125)
    queries[5, 3] = float("nan")
    found = attend(queries, keys, values, 0.125)
    others = torch.arange(TOKENS) != 5
    assert bool(found[5].isnan().all())
    assert torch.equal(found[others], clean[others])
