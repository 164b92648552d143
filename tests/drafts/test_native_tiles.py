"""A product over tiles is the product of the matrix, and a row's result is its own."""

import ctypes
import functools

import pytest
import torch

from drafts.native.codes import Tiles, tiles_of
from drafts.native.machine import compiled
from drafts.native.tiles import FORMATS, GROUP, ROUNDED, Format, emit_tile

ALL = [*FORMATS.values(), *ROUNDED.values()]
NARROW = (1, 2, 3, 4, 5, 6)
WIDE = (*NARROW, 8, 10, 12, 14, 16)
INPUTS, OUTPUTS = 96, 45


def call(address: int, *arguments: int) -> None:
    ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * len(arguments))(address)(*arguments)


@functools.cache
def kernels(fmt: Format, wide: bool) -> dict[int, int]:
    counts = WIDE if wide else NARROW
    found = compiled(
        lambda module: [emit_tile(module, f"rows_{count}", fmt, count, wide) for count in counts],
    )
    return {count: found[f"rows_{count}"] for count in counts}


def product(address: int, tiles: Tiles, x: torch.Tensor, matrix: int = 0) -> torch.Tensor:
    """``x [rows, inputs]`` through every tile; the outputs that fill up the last one too."""
    laid_out = x.t().contiguous()
    out = torch.full((len(x), tiles.padded), float("nan"))
    for tile, weights in enumerate(tiles.data[matrix]):
        call(
            address,
            weights.data_ptr(),
            laid_out.data_ptr(),
            out.data_ptr() + 128 * tile,
            4 * tiles.padded,
            tiles.inputs // GROUP,
            0,
        )
    return out


def decoded(tiles: Tiles, matrix: int = 0) -> torch.Tensor:
    """``[padded outputs, inputs]`` as the kernel for one row reads them."""
    address = kernels(tiles.format, True)[1]
    lines = [product(address, tiles, one[None], matrix) for one in torch.eye(tiles.inputs)]
    return torch.cat(lines).t()


def blocks(outputs: int, inputs: int, least: int, most: int, shifted: bool, seed: int = 0) -> torch.Tensor:
    """Blocks as GGUF has them: float16 steps, the codes' ends in every group, maybe a float16 shift."""
    generator = torch.Generator().manual_seed(seed)
    shape = (outputs, inputs // GROUP, 1)
    scale = (0.002 + 0.02 * torch.rand(shape, generator=generator)).half().float()
    shift = (0.3 * torch.rand(shape, generator=generator) - 0.3).half().float() if shifted else 0.0
    codes = torch.randint(least, most + 1, (*shape[:2], GROUP), generator=generator).float()
    codes[..., 3], codes[..., 17] = least, most
    return (scale * codes + shift).flatten(1)


def q4_matrix(outputs: int, inputs: int, seed: int = 0) -> torch.Tensor:
    return blocks(outputs, inputs, 0, 15, shifted=True, seed=seed)


def q8_matrix(outputs: int, inputs: int, seed: int = 0) -> torch.Tensor:
    return blocks(outputs, inputs, -127, 127, shifted=False, seed=seed)


def plain_matrix(outputs: int, inputs: int, seed: int = 0) -> torch.Tensor:
    return 0.1 * torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed))


@functools.cache
def sample(fmt: Format) -> tuple[Tiles, torch.Tensor]:
    """Tiles of the format, and the float32 matrix that they hold."""
    make = {"q4": q4_matrix, "q8": q8_matrix}.get(fmt.name, plain_matrix)
    weight = make(OUTPUTS, INPUTS)
    if fmt.rounded:
        tiles, weight = tiles_of([weight.bfloat16()], [weight]), weight.bfloat16().float()
    elif fmt.name in ("bf16", "f16"):
        weight = weight.to({"bf16": torch.bfloat16, "f16": torch.float16}[fmt.name])
        tiles, weight = tiles_of([weight]), weight.float()
    else:
        tiles = tiles_of([weight])
    assert tiles is not None
    assert tiles.format == fmt
    return tiles, weight


def rows_of(count: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(count, INPUTS, generator=torch.Generator().manual_seed(seed))


def formats(test):
    return pytest.mark.parametrize("fmt", ALL, ids=lambda fmt: fmt.key)(
        pytest.mark.parametrize("wide", [True, False], ids=["wide", "narrow"])(test)
    )


@formats
def test_the_product_is_that_of_the_matrix_for_every_row_count(fmt: Format, wide: bool) -> None:
    tiles, weight = sample(fmt)
    for count, address in kernels(fmt, wide).items():
        x = rows_of(count)
        found = product(address, tiles, x)
        expected = x.double() @ weight.double().t()
        allowed = INPUTS * 2.0**-24 * (x.double().abs() @ weight.double().abs().t())
        assert bool(((found[:, :OUTPUTS] - expected).abs() <= allowed).all()), count
        assert bool((found[:, OUTPUTS:] == 0).all()), count


@formats
def test_a_rows_result_is_the_same_bits_alone_and_at_every_place(fmt: Format, wide: bool) -> None:
    tiles, _ = sample(fmt)
    row = rows_of(1, seed=2)
    alone = product(kernels(fmt, wide)[1], tiles, row)
    for count, address in kernels(fmt, wide).items():
        for place in range(count):
            x = 100 * rows_of(count, seed=3 + place)
            x[place] = row
            assert torch.equal(product(address, tiles, x)[place], alone[0]), (count, place)


@formats
def test_what_is_not_finite_in_a_row_stays_there(fmt: Format, wide: bool) -> None:
    tiles, _ = sample(fmt)
    for count, address in list(kernels(fmt, wide).items())[1:]:
        x = rows_of(count, seed=4)
        clean = product(address, tiles, x)
        x[0] = float("nan")
        x[-1, 5] = float("inf")
        found = product(address, tiles, x)
        assert bool(found[0].isnan().all())
        assert torch.equal(found[1:-1], clean[1:-1]), count


@pytest.mark.parametrize("fmt", ALL, ids=lambda fmt: fmt.key)
def test_every_weight_decodes_to_its_bits(fmt: Format) -> None:
    tiles, weight = sample(fmt)
    found = decoded(tiles)
    assert torch.equal(found[:OUTPUTS], weight)
    assert not found[OUTPUTS:].any()


@pytest.mark.parametrize("fmt", ALL, ids=lambda fmt: fmt.key)
def test_rows_of_the_output_may_lie_apart(fmt: Format) -> None:
    tiles, _ = sample(fmt)
    x = rows_of(3)
    laid_out, out = x.t().contiguous(), torch.full((3, 50), 7.0)
    weights = tiles.data[0, 0].data_ptr()
    address = kernels(fmt, True)[3]
    call(address, weights, laid_out.data_ptr(), out.data_ptr() + 4 * 9, 200, INPUTS // GROUP, 0)
    assert torch.equal(out[:, 9:41], product(address, tiles, x)[:, :32])
    assert bool((out[:, :9] == 7).all() and (out[:, 41:] == 7).all())
