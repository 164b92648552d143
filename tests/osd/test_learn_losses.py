from __future__ import annotations

import math
from typing import get_args

import pytest
import torch

from osd.learn.config import LossName
from osd.learn.fused import mean_forward_kl
from osd.learn.losses import LOSSES, SparseTarget, draft_index

IDS = torch.tensor([1, 3, 4, 8, 9, 12])


def target(rows: int = 5, seed: int = 0) -> SparseTarget:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(14, generator=generator)[:5] for _ in range(rows)])
    logprobs = torch.randn(rows, 6, generator=generator).log_softmax(-1)[:, :5]
    return SparseTarget.from_evidence(ids, logprobs, draft_index(IDS, 14))


def logits_of(target: SparseTarget) -> torch.Tensor:
    """Logits whose outcomes equal the target's: the tail is spread over the ids that are not listed."""
    rows = len(target.tail)
    q = torch.zeros(rows, len(IDS))
    for row in range(rows):
        inside = target.index[row] >= 0
        q[row, target.index[row][inside]] = target.probs[row][inside]
        rest = q[row] == 0
        q[row][rest] = target.tail[row] / rest.sum()
    return q.log()


def test_a21_mass_outside_the_table_is_counted_as_tail() -> None:
    ids, logprobs = torch.tensor([[3, 0, 8]]), torch.tensor([[0.5, 0.3, 0.1]]).log()
    found = SparseTarget.from_evidence(ids, logprobs, draft_index(IDS, 14))
    assert found.index.tolist() == [[1, -1, 3]]
    assert found.probs[0].tolist() == pytest.approx([0.5, 0.0, 0.1])
    assert float(found.tail) == pytest.approx(0.4)


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_a_loss_is_zero_at_the_target_and_positive_elsewhere(name: str) -> None:
    goal = target()
    assert LOSSES[name](logits_of(goal), goal).abs().max() < 1e-5
    other = torch.randn(5, len(IDS), generator=torch.Generator().manual_seed(1))
    assert LOSSES[name](other, goal).min() > 1e-3


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_descending_a_loss_reaches_the_target(name: str) -> None:
    goal = target()
    logits = torch.zeros(5, len(IDS), requires_grad=True)
    optimiser = torch.optim.Adam([logits], lr=0.05)
    for _ in range(400):
        optimiser.zero_grad()
        LOSSES[name](logits, goal).sum().backward()
        optimiser.step()
    assert LOSSES["total_variation"](logits.detach(), goal).max() < 0.03


def test_forward_and_reverse_kl_agree_with_their_definitions() -> None:
    ids, p = torch.tensor([[1, 3]]), torch.tensor([[0.6, 0.3]])
    goal = SparseTarget.from_evidence(ids, p.log(), draft_index(IDS, 14))
    q = torch.tensor([[0.2, 0.5, 0.1, 0.1, 0.05, 0.05]])
    forward = 0.6 * math.log(0.6 / 0.2) + 0.3 * math.log(0.3 / 0.5) + 0.1 * math.log(0.1 / 0.3)
    reverse = 0.2 * math.log(0.2 / 0.6) + 0.5 * math.log(0.5 / 0.3) + 0.3 * math.log(0.3 / 0.1)
    assert float(LOSSES["forward_kl"](q.log(), goal)) == pytest.approx(forward, abs=1e-5)
    assert float(LOSSES["reverse_kl"](q.log(), goal)) == pytest.approx(reverse, abs=1e-5)
    assert float(LOSSES["total_variation"](q.log(), goal)) == pytest.approx(0.4, abs=1e-5)


def test_divergences_are_bounded() -> None:
    goal, far = target(), torch.full((5, len(IDS)), -50.0)
    far[:, 0] = 50.0
    assert LOSSES["jensen_shannon"](far, goal).max() <= math.log(2) + 1e-5
    assert LOSSES["total_variation"](far, goal).max() <= 1 + 1e-5


def test_fused_loss_and_gradients_equal_autograd() -> None:
    goal = target(300)
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(300, 7, generator=generator, requires_grad=True)
    bias = torch.randn(len(IDS), generator=generator, requires_grad=True)
    weight = torch.randn(len(IDS), 7, generator=generator)
    plain = LOSSES["forward_kl"](hidden @ weight.T + bias, goal).mean()
    fused = mean_forward_kl(hidden, bias, weight, goal)
    torch.testing.assert_close(plain, fused)
    for one, two in zip(
        torch.autograd.grad(plain, (hidden, bias)), torch.autograd.grad(fused, (hidden, bias)), strict=True
    ):
        torch.testing.assert_close(one, two, atol=2e-5, rtol=1e-3)


def test_acceptance_is_the_log_of_the_overlap_and_teaches_from_afar() -> None:
    goal = target()
    other = torch.randn(5, len(IDS), generator=torch.Generator().manual_seed(1))
    overlap = 1.0 - LOSSES["total_variation"](other, goal)
    torch.testing.assert_close(LOSSES["acceptance"](other, goal), -overlap.log())
    sizes = {}
    for name in ("acceptance", "total_variation"):
        far = torch.zeros(5, len(IDS))
        far[:, 0] = 6.0
        far.requires_grad_(True)
        LOSSES[name](far, goal).sum().backward()
        sizes[name] = float(far.grad.abs().sum())
    assert sizes["acceptance"] > 1.3 * sizes["total_variation"]


def test_every_loss_has_a_name_in_the_config() -> None:
    assert set(get_args(LossName)) == set(LOSSES)
