import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from osd.acceptance import coupled_acceptance, rejection_acceptance


def definition(p, q):
    total = 0.0
    for x in range(len(p)):
        if p[x] > 0 and q[x] > 0:
            total += 1 / sum(max(p[y] / p[x], q[y] / q[x]) for y in range(len(p)))
    return total


weights = st.lists(st.sampled_from([0.0, 0.0, 1.0, 2.0, 3.5, 0.01, 40.0]), min_size=6, max_size=6).filter(any)


@given(a=weights, b=weights)
@settings(max_examples=300, deadline=None)
def test_coupled_acceptance_is_its_definition_and_lies_between_its_bounds(a, b):
    p, q = torch.tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64)
    p, q = p / p.sum(), q / q.sum()
    value = float(coupled_acceptance(p, q))
    overlap = float(rejection_acceptance(p, q))
    assert value == pytest.approx(definition(p.tolist(), q.tolist()), abs=1e-12)
    assert overlap / (2 - overlap) - 1e-12 <= value <= overlap + 1e-12


def test_equal_distributions_are_always_accepted_and_disjoint_ones_never():
    p = torch.softmax(torch.randn(3, 50, generator=torch.Generator().manual_seed(0)), -1)
    torch.testing.assert_close(
        coupled_acceptance(p, p), torch.ones(3, dtype=torch.float64), atol=1e-6, rtol=0
    )
    left, right = torch.tensor([0.5, 0.5, 0.0]), torch.tensor([0.0, 0.0, 1.0])
    assert coupled_acceptance(left, right) == rejection_acceptance(left, right) == 0


def test_a_certain_draft_is_accepted_as_often_as_the_target_says_it():
    p = torch.tensor([0.2, 0.7, 0.1])
    q = torch.tensor([0.0, 1.0, 0.0])
    assert float(coupled_acceptance(p, q)) == pytest.approx(0.7)
    assert float(rejection_acceptance(p, q)) == pytest.approx(0.7)


def test_positions_are_scored_together_as_each_alone():
    generator = torch.Generator().manual_seed(2)
    p, q = (torch.softmax(torch.randn(2, 4, 30, generator=generator) * 2, -1) for _ in range(2))
    for rule in (coupled_acceptance, rejection_acceptance):
        together = rule(p, q)
        assert together.shape == (2, 4)
        for i in range(2):
            for j in range(4):
                assert together[i, j] == pytest.approx(float(rule(p[i, j], q[i, j])))
