"""Attention's kernels against torch."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from drafts.native.attention import (
    emit_gate,
    emit_round,
    emit_scores,
    emit_softmax,
    emit_store,
    emit_values,
    queries_at_once,
)
from drafts.native.machine import compiled
from tests.drafts.test_native_tiles import call

TYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
COUNTS = [0, 1, 15, 16, 17, 100]
SIZES = [32, 64, 128]
GUARD = 12345.0


@functools.cache
def kernel(emit, *options: object) -> int:
    return compiled(lambda module: emit(module, "it", *options))["it"]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", ["f32", "bf16"])
@pytest.mark.parametrize("size", SIZES)
def test_scores_are_the_products_of_query_and_keys(size: int, kind: str) -> None:
    query = random(size)
    for count in COUNTS:
        keys = random(count + 3, size, seed=1).to(TYPES[kind])
        keys[count:] = float("nan")
        out = torch.full((count + 16,), GUARD)
        call(kernel(emit_scores, size, kind), query.data_ptr(), keys.data_ptr(), count, out.data_ptr())
        seen = keys[:count].double()
        allowed = size * 2.0**-24 * (seen.abs() @ query.double().abs())
        assert bool(((out[:count] - seen @ query.double()).abs() <= allowed).all()), count
        assert bool((out[count:] == GUARD).all()), count


@pytest.mark.parametrize("kind", ["f32", "bf16"])
def test_a_keys_score_is_the_same_bits_wherever_it_lies(kind: str) -> None:
    query, key = random(64), random(64, seed=2).to(TYPES[kind])
    found = []
    for count, place in [(1, 0), (16, 0), (16, 11), (17, 16), (40, 7), (40, 39)]:
        keys = random(count, 64, seed=3).to(TYPES[kind])
        keys[place] = key
        out = torch.empty(count)
        call(kernel(emit_scores, 64, kind), query.data_ptr(), keys.data_ptr(), count, out.data_ptr())
        found.append(float(out[place]))
    assert len(set(found)) == 1


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("share", [1, 2, 3, 4, 5, 7, 8, 12, 16])
def test_queries_summed_at_once_divide_the_share(share: int, size: int) -> None:
    assert 1 <= queries_at_once(share, size) <= share
    assert share % queries_at_once(share, size) == 0


@pytest.mark.parametrize("kind", ["f32", "bf16"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("share", [1, 4, 7])
def test_values_are_summed_by_their_weights(size: int, share: int, kind: str) -> None:
    queries = queries_at_once(share, size)
    for count in COUNTS:
        weights = random(queries, count + 21, seed=4)
        weights[:, count:] = float("nan")
        values = random(count + 3, size, seed=5).to(TYPES[kind])
        values[count:] = float("nan")
        out = torch.full((queries * size + 16,), GUARD)
        call(
            kernel(emit_values, queries, size, kind),
            weights.data_ptr(),
            4 * weights.shape[1],
            values.data_ptr(),
            count,
            out.data_ptr(),
        )
        expected = weights[:, :count].double() @ values[:count].double()
        allowed = (
            max(1, count) * 2.0**-24 * (weights[:, :count].double().abs() @ values[:count].double().abs())
        )
        found = out[: queries * size].view(queries, size)
        assert bool(((found - expected).abs() <= allowed).all()), count
        assert bool((out[queries * size :] == GUARD).all()), count


def softmax(scores: Tensor) -> Tensor:
    count = len(scores)
    room = -(-count // 16) * 16
    line = torch.full((room + 16,), GUARD)
    line[:count] = scores
    call(kernel(emit_softmax), line.data_ptr(), count)
    assert bool((line[room:] == GUARD).all())
    return line[:count]


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("spread", [0.0, 1.0, 30.0, 1e4])
def test_softmax_is_torchs(count: int, spread: float) -> None:
    scores = spread * random(count, seed=6)
    expected = scores.double().softmax(0)
    assert torch.allclose(softmax(scores).double(), expected, rtol=2e-6 + 2e-7 * spread, atol=1e-36)


@pytest.mark.parametrize("count", [2, 15, 16, 17, 33, 100])
def test_masked_scores_get_no_weight_and_the_others_all_of_it(count: int) -> None:
    scores = random(count, seed=7)
    hidden = torch.arange(count) % 3 != 0
    scores[hidden] = float("-inf")
    found = softmax(scores)
    assert bool((found[hidden] == 0).all())
    assert torch.allclose(found[~hidden], scores[~hidden].softmax(0), rtol=2e-6)
    for kept in {0, count - 1, count // 2}:
        line = torch.full((count,), float("-inf"))
        line[kept] = -3.0
        assert softmax(line).tolist() == [float(place == kept) for place in range(count)]


@pytest.mark.parametrize("count", [1, 15, 16, 17, 100])
def test_one_nan_makes_all_weights_nan(count: int) -> None:
    for place in {0, count // 2, count - 1}:
        scores = random(count, seed=8)
        scores[place] = float("nan")
        assert bool(softmax(scores).isnan().all())
    assert bool(softmax(torch.full((count,), float("nan"))).isnan().all())


def gate(rounded: bool, side: Tensor, up: Tensor) -> Tensor:
    line = torch.cat((side, torch.full((16,), GUARD)))
    call(kernel(emit_gate, rounded), line.data_ptr(), up.data_ptr(), len(side))
    assert bool((line[len(side) :] == GUARD).all())
    return line[: len(side)]


def test_the_gate_is_silu_times_up() -> None:
    side = torch.cat((4 * random(4096), torch.linspace(-120, 120, 4096), torch.zeros(16)))
    up = random(len(side), seed=9)
    expected = F.silu(side.double()) * up.double()
    assert torch.allclose(gate(False, side, up).double(), expected, rtol=1e-6, atol=1e-33)


def test_the_rounded_gate_is_torchs_in_bfloat16() -> None:
    side, up = 4 * random(8192), random(8192, seed=10)
    found = gate(True, side, up)
    expected = (F.silu(side.bfloat16()) * up.bfloat16()).float()
    assert torch.equal(found.bfloat16().float(), found)
    assert torch.allclose(found, expected, rtol=2.0**-6, atol=0)
    assert float((found != expected).float().mean()) < 0.005


def test_nan_passes_the_gate() -> None:
    side, up = torch.zeros(16), torch.ones(16)
    side[3] = up[9] = float("nan")
    for rounded in (False, True):
        assert gate(rounded, side, up).isnan().nonzero().flatten().tolist() == [3, 9]


def numbers() -> Tensor:
    """Everyday, tiny, huge and special ones, and those in the middle between two of bfloat16."""
    bits = torch.randint(-(1 << 31), 1 << 31, (1 << 16,), generator=torch.Generator().manual_seed(11))
    middle = ((bits[:4096] >> 16) << 16) + 0x8000
    special = torch.tensor([0.0, -0.0, float("inf"), float("-inf"), float("nan"), 3.4e38, -3.4e38, 1e-45])
    drawn = torch.cat((bits, middle)).to(torch.int32).view(torch.float32)
    found = torch.cat((drawn[drawn.isfinite()], special, random(1000)))
    return torch.cat((found, torch.zeros(-len(found) % 16)))


def test_rounding_is_torchs() -> None:
    line = numbers()
    expected = line.bfloat16().float()
    found = line.clone()
    call(kernel(emit_round), found.data_ptr(), len(found))
    assert torch.equal(found.isnan(), expected.isnan())
    kept = ~expected.isnan()
    assert torch.equal(found[kept].view(torch.int32), expected[kept].view(torch.int32))


@pytest.mark.parametrize("kind", TYPES)
def test_storing_keeps_the_numbers(kind: str) -> None:
    line = numbers()
    if kind == "bf16":
        line = line.bfloat16().float()
    expected = line.to(TYPES[kind])
    found = torch.full((len(line) + 16,), 7.0, dtype=TYPES[kind])
    call(kernel(emit_store, kind), line.data_ptr(), found.data_ptr(), len(line))
    assert torch.equal(found[: len(line)].isnan(), expected.isnan())
    assert torch.equal(found[: len(line)].nan_to_num(1.0), expected.nan_to_num(1.0))
    assert bool((found[len(line) :] == 7).all())
