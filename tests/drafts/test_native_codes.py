"""Weights are stored in the smallest form that gives back every bit, and in no smaller one."""

import pytest
import torch

from drafts.native.codes import Tiles, tiles_of
from tests.drafts.test_native_tiles import decoded, plain_matrix, q4_matrix, q8_matrix


def stored(*weights: torch.Tensor, exact: list[torch.Tensor] | None = None) -> Tiles:
    """Tiles of the weights, once it is sure that they hold them."""
    tiles = tiles_of(list(weights), exact)
    assert tiles is not None
    assert (tiles.outputs, tiles.inputs) == weights[0].shape
    for index, weight in enumerate(weights):
        found = decoded(tiles, index)
        assert torch.equal(found[: len(weight)], weight.float())
        assert not found[len(weight) :].any()
    return tiles


MAKERS = {"q4": q4_matrix, "q8": q8_matrix, "f32": plain_matrix}


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize(("outputs", "inputs"), [(32, 32), (64, 96), (1, 32), (33, 64), (95, 32)])
def test_the_form_is_found_at_every_size(kind: str, outputs: int, inputs: int) -> None:
    tiles = stored(*[MAKERS[kind](outputs, inputs, seed=seed) for seed in (1, 2)])
    assert tiles.format.key == kind
    assert tiles.padded == -(-outputs // 32) * 32


@pytest.mark.parametrize(("kind", "most"), [("q4", 5 / 32), ("q8", 9 / 32), ("f32", 1.0)])
def test_codes_take_the_bytes_that_they_promise(kind: str, most: float) -> None:
    tiles = stored(MAKERS[kind](64, 64))
    assert tiles.data.numel() <= most * 4 * 64 * 64
    assert tiles.data.shape == (1, 2, 2 * tiles.format.group_bytes)


@pytest.mark.parametrize("kind", ["q4", "q8"])
@pytest.mark.parametrize("place", [(0, 0), (0, 3), (20, 17), (44, 63), (7, 40)])
@pytest.mark.parametrize("to", [float("inf"), float("-inf")])
def test_one_weight_moved_by_one_ulp_is_not_coded(kind: str, place: tuple[int, int], to: float) -> None:
    weight = MAKERS[kind](45, 64)
    weight[place] = torch.nextafter(weight[place], torch.tensor(to))
    assert stored(weight).format.key == "f32"


@pytest.mark.parametrize("kind", ["q4", "q8"])
def test_one_matrix_that_has_no_codes_decides_for_all(kind: str) -> None:
    coded, plain = MAKERS[kind](40, 32), plain_matrix(40, 32)
    assert stored(coded, plain).format.key == "f32"
    assert stored(plain, coded).format.key == "f32"


def test_numbers_that_fit_half_the_bytes_are_halved() -> None:
    weight = plain_matrix(40, 64)
    assert stored(weight.bfloat16().float()).format.key == "bf16"
    assert stored(weight.half().float()).format.key == "f16"
    assert stored(weight.bfloat16()).format.key == "bf16"
    assert stored(weight.half()).format.key == "f16"
    assert stored(weight.bfloat16().float(), weight).format.key == "f32"


def test_inputs_that_are_no_whole_groups_and_other_types_have_no_tiles() -> None:
    assert tiles_of([plain_matrix(32, 64)[:, :48].contiguous()]) is None
    assert tiles_of([plain_matrix(32, 32)[:, :31].contiguous()]) is None
    assert tiles_of([plain_matrix(32, 32).double()]) is None
    assert tiles_of([torch.ones(32, 32, dtype=torch.int8)]) is None


@pytest.mark.parametrize("value", [0.0, 0.5, -0.25, 1.0])
def test_constant_groups_among_coded_ones_stay_coded(value: float) -> None:
    weight = q4_matrix(40, 64)
    weight[3, 32:] = value
    weight[:, :32] = value
    assert stored(weight).format.key == "q4"


def test_a_matrix_of_zeros_is_coded() -> None:
    assert stored(torch.zeros(40, 64)).format.key == "q4"
    weight = q8_matrix(40, 64)
    weight[5] = 0
    assert stored(weight).format.key == "q8"


@pytest.mark.parametrize(
    "value", [0.1, -0.1, 1e-9, 1e6, -1e6, 3e38, 2.0**-24, 2.0**-30, 65504.0, 65520.0, 1.0 + 2.0**-23]
)
@pytest.mark.parametrize("alone", [True, False])
def test_numbers_that_float16_does_not_hold_keep_their_bits(value: float, alone: bool) -> None:
    weight = torch.zeros(32, 32) if alone else q4_matrix(32, 32)
    weight[0, :] = value
    weight[1, 4] = value
    stored(weight)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_not_coded(value: float) -> None:
    weight = q4_matrix(32, 32)
    weight[2, 3] = value
    tiles = tiles_of([weight])
    assert tiles is not None
    assert tiles.format.name not in ("q4", "q8")


@pytest.mark.parametrize("kind", ["q4", "q8"])
def test_bfloat16_weights_are_stored_as_what_they_were_rounded_from(kind: str) -> None:
    exact = [MAKERS[kind](45, 64, seed=seed) for seed in (1, 2)]
    tiles = stored(*[matrix.bfloat16() for matrix in exact], exact=exact)
    assert (tiles.format.name, tiles.format.rounded) == (kind, True)


@pytest.mark.parametrize("kind", ["q4", "q8"])
def test_bfloat16_weights_that_another_matrix_rounds_to_stay_plain(kind: str) -> None:
    exact = MAKERS[kind](45, 64)
    weight = exact.bfloat16()
    weight[44, 63] *= 1.01
    assert stored(weight, exact=[exact]).format.key == "bf16"
    assert stored(exact.bfloat16(), exact=[plain_matrix(45, 64)]).format.key == "bf16"


def test_bfloat16_weights_rounded_from_no_codes_stay_plain() -> None:
    exact = plain_matrix(45, 64)
    assert stored(exact.bfloat16(), exact=[exact]).format.key == "bf16"
