import pytest
import torch

from osd.serve import products
from osd.serve.products import (
    BUCKETS,
    Matrix,
    ProductPlan,
    can_pack,
    candidates,
    fastest,
    linear,
    pack,
    sample_of,
    untimed,
)

PACKS = can_pack([Matrix(torch.ones(4, 4))])


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 17])
def test_every_candidate_is_the_same_contiguous_product(count: int) -> None:
    torch.manual_seed(count)
    x, weight = torch.randn(count, 24), torch.randn(40, 24)
    matrix = Matrix(weight, pack(weight) if PACKS else None)
    for name, product in candidates(count, packed=PACKS).items():
        found = product(x, matrix)
        assert found.is_contiguous(), name
        assert torch.allclose(found, x @ weight.t(), atol=1e-5), name


def test_a_candidate_that_disagrees_is_never_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(x: torch.Tensor, weight: Matrix) -> torch.Tensor:
        return torch.zeros(x.shape[0], weight.plain.shape[0])

    monkeypatch.setattr(products, "candidates", lambda count, packed: {"linear": linear, "transposed": wrong})
    assert fastest([Matrix(torch.randn(512, 512))], 4, repeats=2, budget=1.0) == "linear"


def test_a_clearly_slower_candidate_loses(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(x: torch.Tensor, weight: Matrix) -> torch.Tensor:
        for _ in range(50):
            linear(x, weight)
        return linear(x, weight)

    monkeypatch.setattr(products, "candidates", lambda count, packed: {"transposed": slow, "linear": linear})
    monkeypatch.setattr(products, "untimed", lambda count, packed: "transposed")
    assert fastest([Matrix(torch.randn(256, 256))] * 4, 4, repeats=3, budget=5.0) == "linear"


@pytest.mark.parametrize("budget", [0.0, 2.0])
def test_plan_answers_every_row_count_with_and_without_time(budget: float) -> None:
    weights = {
        "a": [Matrix(torch.randn(12, 8))],
        "b": [Matrix(torch.randn(6, 12)), Matrix(torch.randn(6, 12))],
    }
    plan = ProductPlan(weights, budget=budget)
    for count in [*range(1, 66), 300]:
        for name, group in weights.items():
            for matrix in group:
                x = torch.randn(count, matrix.plain.shape[1])
                assert torch.allclose(plan.product(name, count)(x, matrix), x @ matrix.plain.t(), atol=1e-5)
    assert set(plan.names["a"]) == set(BUCKETS)
    if not budget:
        assert plan.names["a"] == {count: untimed(count, packed=PACKS) for count in BUCKETS}


def test_no_weight_is_packed_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    class Memory:
        available = 1000

    monkeypatch.setattr(products.psutil, "virtual_memory", Memory)
    weights = {"a": [Matrix(torch.randn(16, 16))]}  # 1024 bytes
    plan = ProductPlan(weights, budget=0.5)
    assert weights["a"][0].packed is None
    assert not any(name.startswith("blocked") for name in plan.names["a"].values())


def test_the_sample_takes_several_small_weights_and_slices_a_large_one() -> None:
    small = [Matrix(torch.empty(2048, 1024)) for _ in range(20)]  # 8 MiB each
    assert len(sample_of(small, packing=False)) == 4
    large = [Matrix(torch.empty(20_000, 1024))]  # 78 MiB
    assert sample_of(large, packing=False)[0].plain.shape[0] < 20_000
