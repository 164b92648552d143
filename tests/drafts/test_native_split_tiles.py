"""float32 products with matrix registers, where the processor has them."""

import functools
from functools import partial

import pytest
import torch

from drafts.native.codes import Tiles, tiles_of
from drafts.native.machine import compiled
from drafts.native.matrix_tiles import has_matrix_registers
from drafts.native.split_tiles import (
    GROUP_BYTES,
    INPUT_BYTES,
    LINE_BYTES,
    SPLIT_ROWS,
    emit_split,
    emit_split_tile,
    split_scratch_bytes,
    splittable,
)
from drafts.native.tiles import FORMATS, GROUP, Format
from tests.drafts.kernel_checks import check_bits_at_every_place, check_nan_stays
from tests.drafts.test_native_tiles import OUTPUTS, call, q4_matrix, q8_matrix

pytestmark = pytest.mark.skipif(not has_matrix_registers(), reason="no matrix registers here")
GUARD = 77


@functools.cache
def kernels(fmt: Format) -> dict[str, int]:
    names = [f"rows_{count}" for count in SPLIT_ROWS]

    def emit(module) -> None:
        for count, name in zip(SPLIT_ROWS, names, strict=True):
            emit_split_tile(module, name, fmt, count)
        emit_split(module, "split")

    return compiled(emit)


@functools.cache
def sample(fmt: Format, inputs: int = 96) -> tuple[Tiles, torch.Tensor]:
    exact = {"q4": q4_matrix, "q8": q8_matrix}[fmt.name](OUTPUTS, inputs)
    tiles = tiles_of([exact])
    assert tiles is not None
    assert tiles.format == fmt
    assert splittable(fmt)
    return tiles, exact


def product(fmt: Format, x: torch.Tensor) -> torch.Tensor:
    tiles, _ = sample(fmt, x.shape[1])
    rows, inputs = x.shape
    split = torch.full((rows * inputs * INPUT_BYTES + 64,), GUARD, dtype=torch.uint8)
    for row in range(rows):
        sums = split.data_ptr() + 6 * rows * inputs + 4 * row * (inputs // GROUP)
        at = split.data_ptr() + row // 16 * (inputs // GROUP) * GROUP_BYTES + row % 16 * LINE_BYTES
        call(kernels(fmt)["split"], x.data_ptr() + 4 * row * inputs, at, inputs, sums)
    assert bool((split[-64:] == GUARD).all())
    room = split_scratch_bytes(inputs)
    scratch = torch.full((room + 64,), GUARD, dtype=torch.uint8)
    out = torch.full((rows, tiles.padded), float("nan"))
    for tile, weights in enumerate(tiles.data[0]):
        call(
            kernels(fmt)[f"rows_{rows}"],
            weights.data_ptr(),
            split.data_ptr(),
            out.data_ptr() + 128 * tile,
            4 * tiles.padded,
            inputs // GROUP,
            scratch.data_ptr(),
        )
    assert bool((scratch[room:] == GUARD).all())
    return out


def rows_of(count: int, seed: int = 1, inputs: int = 96) -> torch.Tensor:
    return torch.randn(count, inputs, generator=torch.Generator().manual_seed(seed))


def formats(test):
    return pytest.mark.parametrize("fmt", [FORMATS["q4"], FORMATS["q8"]], ids=lambda fmt: fmt.key)(
        pytest.mark.parametrize("count", SPLIT_ROWS)(test)
    )


@formats
@pytest.mark.parametrize("inputs", [32, 64, 96, 1536])
def test_the_product_is_as_accurate_as_float32_sums(fmt: Format, count: int, inputs: int) -> None:
    _, weight = sample(fmt, inputs)
    x = rows_of(count, inputs=inputs) * torch.logspace(-3, 3, inputs)
    found = product(fmt, x)
    expected = x.double() @ weight.double().t()
    sizes = x.double().abs() @ weight.double().abs().t()
    assert bool(((found[:, :OUTPUTS] - expected).abs() <= 2 * inputs * 2.0**-24 * sizes).all())
    typical = ((found[:, :OUTPUTS] - expected).abs() / sizes).mean()
    library = (((x @ weight.t()).double() - expected).abs() / sizes).mean()
    assert typical < 4 * library + 2.0**-24
    assert bool((found[:, OUTPUTS:] == 0).all())


@formats
def test_a_rows_result_is_the_same_bits_alone_and_at_every_place(fmt: Format, count: int) -> None:
    check_bits_at_every_place(partial(product, fmt), rows_of, count)


@formats
def test_nan_in_a_row_stays_there(fmt: Format, count: int) -> None:
    check_nan_stays(partial(product, fmt), rows_of(count), OUTPUTS)


def test_other_formats_are_left_to_other_kernels() -> None:
    assert not any(splittable(FORMATS[name]) for name in ("f32", "f16", "bf16"))
