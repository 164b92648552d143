import pytest
import torch

from osd.serve import products
from osd.serve.products import BUCKETS, ProductPlan, candidates, fastest, linear, untimed, working_set


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 17])
def test_every_candidate_is_the_same_product(count: int) -> None:
    torch.manual_seed(count)
    x, weight = torch.randn(count, 24), torch.randn(40, 24)
    for name, product in candidates(count).items():
        found = product(x, weight)
        assert found.is_contiguous() or name.startswith("linear"), name
        assert torch.allclose(found, x @ weight.t(), atol=1e-5), name


def test_a_candidate_that_disagrees_is_never_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.zeros(x.shape[0], weight.shape[0])

    monkeypatch.setattr(products, "candidates", lambda count: {"linear": linear, "transposed": wrong})
    assert fastest([torch.randn(512, 512)], 4, repeats=2, budget=1.0) == "linear"


def test_a_clearly_slower_candidate_loses(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        for _ in range(50):
            linear(x, weight)
        return linear(x, weight)

    monkeypatch.setattr(products, "candidates", lambda count: {"transposed": slow, "linear": linear})
    assert fastest([torch.randn(256, 256)] * 4, 4, repeats=3, budget=5.0) == "linear"


def test_plan_answers_every_row_count_also_without_time() -> None:
    weights = {"a": [torch.randn(12, 8)], "b": [torch.randn(6, 12)]}
    plan = ProductPlan(weights, budget=0.0)
    for count in [*range(1, 66), 300]:
        for name, (weight,) in weights.items():
            x = torch.randn(count, weight.shape[1])
            assert torch.allclose(plan.product(name, count)(x, weight), x @ weight.t(), atol=1e-5)
    assert set(plan.names["a"]) == set(BUCKETS)
    assert plan.names["a"][1] == untimed(1, torch.device("cpu"), torch.float32)


def test_working_set_takes_several_small_weights_and_slices_a_large_one() -> None:
    small = [torch.empty(2048, 1024) for _ in range(20)]  # 8 MiB each
    assert len(working_set(small)) == 8
    large = [torch.empty(20_000, 1024)]  # 78 MiB
    assert working_set(large)[0].shape[0] < 20_000
