"""The products in matrix registers, where the processor has them."""

import functools
from functools import partial

import pytest
import torch

from drafts.native.codes import Tiles, tiles_of
from drafts.native.machine import compiled
from drafts.native.matrix_tiles import MATRIX_ROWS, emit_matrix_tile, has_matrix_registers, scratch_bytes
from drafts.native.tiles import FORMATS, GROUP, PAIRED, Format
from tests.drafts.kernel_checks import check_bits_at_every_place, check_nan_stays
from tests.drafts.test_native_tiles import OUTPUTS, call, plain_matrix, q4_matrix, q8_matrix

pytestmark = pytest.mark.skipif(not has_matrix_registers(), reason="no matrix registers here")
ALL = [*PAIRED.values(), FORMATS["bf16"]]
GUARD = 77


@functools.cache
def kernels(fmt: Format) -> dict[int, int]:
    found = compiled(
        lambda module: [emit_matrix_tile(module, f"rows_{count}", fmt, count) for count in MATRIX_ROWS],
    )
    return {count: found[f"rows_{count}"] for count in MATRIX_ROWS}


@functools.cache
def sample(fmt: Format, inputs: int = 96) -> tuple[Tiles, torch.Tensor]:
    """Tiles of the format, and the float32 matrix that they hold."""
    make = {"q4p": q4_matrix, "q8p": q8_matrix}.get(fmt.name, plain_matrix)
    exact = make(OUTPUTS, inputs)
    tiles = tiles_of([exact.bfloat16()], [exact], paired=True)
    assert tiles is not None
    assert tiles.format == fmt
    return tiles, exact.bfloat16().float()


def product(fmt: Format, x: torch.Tensor) -> torch.Tensor:
    tiles, _ = sample(fmt, x.shape[1])
    room = scratch_bytes(tiles.inputs)
    scratch = torch.full((room + 64,), GUARD, dtype=torch.uint8)
    out = torch.full((len(x), tiles.padded), float("nan"))
    for tile, weights in enumerate(tiles.data[0]):
        call(
            kernels(fmt)[len(x)],
            weights.data_ptr(),
            x.data_ptr(),
            out.data_ptr() + 128 * tile,
            4 * tiles.padded,
            tiles.inputs // GROUP,
            scratch.data_ptr(),
        )
    assert bool((scratch[room:] == GUARD).all())
    return out


def rows_of(count: int, seed: int = 1, inputs: int = 96) -> torch.Tensor:
    return torch.randn(count, inputs, generator=torch.Generator().manual_seed(seed)).bfloat16()


def formats(test):
    return pytest.mark.parametrize("fmt", ALL, ids=lambda fmt: fmt.key)(
        pytest.mark.parametrize("count", MATRIX_ROWS)(test)
    )


@formats
@pytest.mark.parametrize("inputs", [32, 64, 96, 160])
def test_the_product_is_that_of_the_rounded_matrix(fmt: Format, count: int, inputs: int) -> None:
    _, weight = sample(fmt, inputs)
    x = rows_of(count, inputs=inputs)
    found = product(fmt, x)
    expected = x.double() @ weight.double().t()
    allowed = 2 * inputs * 2.0**-24 * (x.double().abs() @ weight.double().abs().t())
    assert bool(((found[:, :OUTPUTS] - expected).abs() <= allowed).all())
    assert bool((found[:, OUTPUTS:] == 0).all())


@formats
def test_every_weight_decodes_to_its_bits(fmt: Format, count: int) -> None:
    _, weight = sample(fmt)
    inputs = weight.shape[1]
    for begin in range(0, inputs, count):
        x = torch.zeros(count, inputs, dtype=torch.bfloat16)
        x.diagonal(begin).fill_(1)
        rows = min(count, inputs - begin)
        assert torch.equal(product(fmt, x)[:rows, :OUTPUTS], weight.t()[begin : begin + rows])


@formats
def test_a_rows_result_is_the_same_bits_alone_and_at_every_place(fmt: Format, count: int) -> None:
    check_bits_at_every_place(partial(product, fmt), rows_of, count)


@formats
def test_nan_in_a_row_stays_there(fmt: Format, count: int) -> None:
    check_nan_stays(partial(product, fmt), rows_of(count))
