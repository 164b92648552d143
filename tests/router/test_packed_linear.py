"""Blocked linear layers: the same vectors, chosen only where they are faster and right."""

import pytest
import torch
from torch import nn

from router.mind import packed_linear
from router.mind.packed_linear import PackedLinear, fastest


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Sequential(nn.Linear(64, 16, bias=False)))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-2)])
def test_a_packed_layer_computes_what_the_plain_one_does(dtype, tolerance):
    layer, x = nn.Linear(32, 48), torch.randn(2, 5, 32)
    try:
        packed = PackedLinear(layer, dtype)
    except (RuntimeError, NotImplementedError, AttributeError):
        pytest.skip("this build of torch has no blocked weights")
    with torch.inference_mode():
        torch.testing.assert_close(packed(x), layer(x), atol=tolerance, rtol=tolerance)


def choose(monkeypatch: pytest.MonkeyPatch, plain: float, packed: float) -> nn.Module:
    model, x = net().eval(), torch.randn(3, 32)

    def seconds(candidate: nn.Module, run: object, repeats: int) -> float:
        return plain if candidate is model else packed

    monkeypatch.setattr(packed_linear, "_seconds", seconds)
    with torch.inference_mode():
        found = fastest(model, lambda m: m(x))
        torch.testing.assert_close(found(x), model(x), atol=5e-2, rtol=5e-2)
    return model if found is model else found


def test_the_plain_layers_stay_where_nothing_is_clearly_faster(monkeypatch):
    assert not any(isinstance(m, PackedLinear) for m in choose(monkeypatch, 1.0, 0.95).modules())


def test_a_form_that_computes_something_else_is_never_chosen(monkeypatch):
    monkeypatch.setattr(PackedLinear, "forward", lambda self, x: torch.randn(*x.shape[:-1], self.size))
    monkeypatch.setattr(PackedLinear, "__init__", lambda self, layer, dtype: _stub(self, layer))
    model, x = net().eval(), torch.randn(3, 32)
    monkeypatch.setattr(packed_linear, "_seconds", lambda candidate, *_: 1.0 if candidate is model else 0.1)
    with torch.inference_mode():
        assert fastest(model, lambda m: m(x)) is model


def _stub(self: nn.Module, layer: nn.Linear) -> None:
    nn.Module.__init__(self)
    self.size = layer.out_features
