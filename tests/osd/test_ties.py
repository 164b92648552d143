"""What counts as a near tie, and what does not."""

import math

import pytest
import torch

from drafts.errors import InvalidValueError
from osd.serve.noise import RequestNoise
from osd.serve.ties import BOUNDS, judge, tie_bound
from osd.serve.verify import target_token
from osd.types import SamplingParams

GREEDY = SamplingParams(temperature=0.0)


def test_every_dtype_of_a_target_has_a_bound_and_others_are_refused() -> None:
    assert BOUNDS[torch.float32] < BOUNDS[torch.float16] < BOUNDS[torch.bfloat16]
    with pytest.raises(InvalidValueError, match=r"dtype: got torch\.int8"):
        tie_bound(torch.int8)


@pytest.mark.parametrize(("gap", "kind"), [(0.0, "gap"), (9e-4, "gap"), (2e-3, "different")])
def test_a_greedy_token_is_a_tie_up_to_the_bound(gap: float, kind: str) -> None:
    row = torch.tensor([0.0, 3.0, 3.0 - gap])
    found = judge(row, 2, GREEDY, None, 0, 1e-3)
    assert (found.kind, found.chosen, found.is_tie) == (kind, 1, kind == "gap")
    assert found.gap == pytest.approx(gap, abs=1e-6)
    assert judge(row, 1, GREEDY, None, 0, 1e-3).kind == "same"


@pytest.mark.parametrize(
    ("changes", "row", "shift"),
    [
        # tokens 2 and 3 compete for the third place
        ({"top_k": 3}, [2.0, 1.9, 1.8, 1.79999, -9.0], {3: 2e-5}),
        # the first two hold just below 0.9 of the mass, so the third is kept, or just above
        ({"top_p": 0.9}, [1.0, 1.0, 1.0 + math.log(2 / 9) + 1e-5, -20.0], {2: -2e-5}),
    ],
    ids=["top_k", "top_p"],
)
def test_a_token_at_a_border_is_a_tie_of_its_own_kind(changes, row, shift) -> None:
    params = SamplingParams(temperature=1.0, **changes)
    rows = torch.tensor(row), torch.tensor(row)
    for token, by in shift.items():
        rows[1][token] += by
    parted = 0
    for seed in range(100):
        noise = RequestNoise(seed, vocab_size=len(row))
        said = [target_token(item, params, noise, 0) for item in rows]
        if said[0] == said[1]:
            continue
        parted += 1
        for reference in (0, 1):
            served = said[1 - reference]
            found = judge(rows[reference], served, params, noise, 0, 1e-3)
            assert (found.kind, found.chosen) == ("border", said[reference])
            assert found.gap is None or found.gap > 1e-3
            assert judge(rows[reference], served, params, noise, 0, 1e-7).kind == "different"
    assert parted >= 5


def test_a_token_far_outside_the_kept_set_is_no_tie_however_good_its_noise() -> None:
    params = SamplingParams(temperature=1.0, top_k=2)
    row = torch.tensor([2.0, 1.5, 1.0, 0.5])
    free, noise = SamplingParams(temperature=1.0), [RequestNoise(seed, vocab_size=4) for seed in range(100)]
    fond = [item for item in noise if target_token(row, free, item, 0) == 3]
    assert fond
    assert all(judge(row, 3, params, item, 0, 1e-3).kind == "different" for item in fond)


@pytest.mark.parametrize("changes", [{}, {"top_k": 8}, {"top_p": 0.8}, {"top_k": 12, "top_p": 0.9}])
def test_what_rounding_does_is_called_a_tie_and_nothing_else_is(changes) -> None:
    """Rows shaken by less than the bound: every other token is a tie; a token of another seed is not."""
    params = SamplingParams(temperature=0.8, **changes)
    generator = torch.Generator().manual_seed(3)
    moved = foreign = 0
    for position in range(600):
        row = 2 * torch.randn(40, generator=generator)
        noise = RequestNoise(5, vocab_size=40)
        shaken = row + 0.04 * (torch.rand(40, generator=generator) - 0.5)
        token = target_token(shaken, params, noise, position)
        found = judge(row, token, params, noise, position, 0.04)
        assert found.kind != "different"
        moved += found.is_tie
        other = target_token(row, params, RequestNoise(6, vocab_size=40), position)
        foreign += judge(row, other, params, noise, position, 0.04).kind == "different"
    assert moved >= 2
    assert foreign >= 200
