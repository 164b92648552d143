from collections.abc import Callable

import pytest
import torch

from osd.serve import products
from osd.serve.products import (
    BUCKETS,
    LINEAR,
    Matrix,
    Product,
    ProductPlan,
    can_pack,
    candidates,
    fastest,
    pack,
    untimed,
)

PACKS = can_pack([Matrix(torch.ones(4, 4))])


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 17])
def test_every_candidate_is_the_same_contiguous_product(count: int) -> None:
    torch.manual_seed(count)
    x, weight = torch.randn(count, 24), torch.randn(40, 24)
    matrix = Matrix(weight, pack(weight) if PACKS else None)
    found = candidates(count, packed=PACKS)
    assert len({product.name for product in found}) == len(found)
    for product in found:
        result = product(x, matrix)
        assert result.is_contiguous(), product
        assert torch.allclose(result, x @ weight.t(), atol=1e-5), product


def pretend(
    monkeypatch: pytest.MonkeyPatch, transposed: Callable[[Matrix, torch.Tensor], torch.Tensor]
) -> None:
    """Let ``transposed`` stand for the kernel of that name, the only rival of the library's own."""
    plain = Product.__call__

    def call(self: Product, x: torch.Tensor, weight: Matrix) -> torch.Tensor:
        return transposed(weight, x) if self.kernel == "transposed" else plain(self, x, weight)

    monkeypatch.setattr(Product, "__call__", call)
    monkeypatch.setattr(products, "candidates", lambda count, packed: [LINEAR, Product("transposed")])


def test_a_candidate_that_disagrees_is_never_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, lambda weight, x: torch.zeros(x.shape[0], weight.plain.shape[0]))
    assert fastest([("a", Matrix(torch.randn(512, 512)))], 4, repeats=2, budget=5.0) == {"a": LINEAR}


def test_a_clearly_slower_candidate_loses(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(weight: Matrix, x: torch.Tensor) -> torch.Tensor:
        for _ in range(50):
            LINEAR(x, weight)
        return LINEAR(x, weight)

    pretend(monkeypatch, slow)
    sample = [("a", Matrix(torch.randn(256, 256))) for _ in range(4)]
    assert fastest(sample, 4, repeats=3, budget=5.0) == {"a": LINEAR}


def test_nothing_is_concluded_from_half_a_round() -> None:
    assert fastest([("a", Matrix(torch.randn(64, 64)))], 4, repeats=3, budget=0.0) == {}


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
        assert plan.names["a"] == {count: untimed(count, packed=PACKS).name for count in BUCKETS}


def test_no_weight_is_packed_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    class Memory:
        available = 1000

    monkeypatch.setattr(products.psutil, "virtual_memory", Memory)
    weights = {"a": [Matrix(torch.randn(16, 16))]}  # 1024 bytes
    plan = ProductPlan(weights, budget=0.5)
    assert weights["a"][0].packed is None
    assert not any(name.startswith("blocked") for name in plan.names["a"].values())


def test_the_sample_takes_layers_in_a_pass_order_until_they_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = {name: [Matrix(torch.empty(64, 64)) for _ in range(3)] for name in "ab"}  # 16 KiB each
    weights["c"] = [Matrix(torch.empty(64, 64))]
    assert [name for name, _ in products.sample_of(weights)] == list("abcabab")
    monkeypatch.setattr(products, "_SAMPLE_BYTES", 1 << 10)
    found = products.sample_of(weights)
    assert [id(matrix) for _, matrix in found] == [id(weights[name][0]) for name in "abc"]


def test_a_choice_pads_only_where_rows_are_missing() -> None:
    table = products._table(dict.fromkeys(BUCKETS, Product("blocked", 4)))
    assert [product.rows for product in table[1:7]] == [4, 4, 4, 0, 0, 0]
