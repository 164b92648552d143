import sys

import pytest
import torch

from drafts.errors import InvalidValueError
from osd.serve.lean import LeanTarget
from osd.serve.load import build_target, load_target
from osd.serve.probe import probe
from osd.serve.quantize import has_int8_product, int8_parts, int8_product, pack_int8, quantise
from osd.serve.target import PassRow
from tests.osd.passes import feed, random_text
from tests.tiny import tiny_model

pytest.importorskip("torchao")
needs_product = pytest.mark.skipif(not has_int8_product(), reason="this torch has no integer product")


def quantised(**changes):
    model = tiny_model("llama", **changes)
    quantise(model, "tiny")
    return model


@needs_product
@pytest.mark.parametrize("rows", [1, 2, 7])
def test_the_product_is_torchaos(rows: int) -> None:
    torch.manual_seed(0)
    layer = quantised().model.layers[0].mlp.down_proj
    values, scale = int8_parts(layer.weight)
    x = torch.randn(rows, values.shape[1])
    found = int8_product(x, pack_int8(values), scale, torch.zeros(len(scale), dtype=torch.long))
    assert torch.allclose(found, layer(x), atol=1e-5 * float(layer(x).abs().max()))


@needs_product
def test_a_row_of_zeros_and_huge_values_stay_finite() -> None:
    values = torch.randint(-127, 128, (16, 32), dtype=torch.int8)
    x = torch.stack([torch.zeros(32), torch.full((32,), 1e30)])
    zeros = torch.zeros(16, dtype=torch.long)
    found = int8_product(x, pack_int8(values), torch.full((16,), 1e-3), zeros)
    assert torch.equal(found[0], torch.zeros(16))
    assert torch.isfinite(found).all()


@needs_product
def test_a_row_does_not_depend_on_its_neighbours() -> None:
    torch.manual_seed(1)
    values = torch.randint(-127, 128, (48, 32), dtype=torch.int8)
    packed, scale, zeros = pack_int8(values), torch.rand(48), torch.zeros(48, dtype=torch.long)
    x = torch.randn(9, 32)
    together = int8_product(x, packed, scale, zeros)
    for row in range(9):
        assert torch.equal(int8_product(x[row : row + 1], packed, scale, zeros)[0], together[row])


@needs_product
def test_the_lean_forward_serves_the_quantised_model() -> None:
    target = build_target(quantised(), name="tiny", forward="lean")
    assert isinstance(target, LeanTarget)
    assert set(target.plan.names["down"].values()) == {"int8"}
    assert "int8" not in target.plan.names["output"].values()
    assert probe(target).ok


@needs_product
def test_quantising_changes_the_model_and_the_target_follows_it() -> None:
    text = random_text(24, seed=5)
    plain, rounded = build_target(tiny_model(), name="a"), build_target(quantised(), name="b")
    logits = []
    for target in (plain, rounded):
        cache = target.make_cache(1, 64, keep_features=False)
        logits.append(feed(target, cache, cache.acquire(), text))
    difference = float((logits[0] - logits[1]).abs().max())
    assert 1e-4 < difference < 0.2 * float(logits[0].abs().max())


@needs_product
def test_verification_equals_plain_decoding_with_int8_weights() -> None:
    target = build_target(quantised(), name="tiny")
    text = random_text(12, seed=6)
    cache = target.make_cache(2, 64, keep_features=False)
    one, many = cache.acquire(), cache.acquire()
    feed(target, cache, one, text)
    feed(target, cache, many, text[:8])
    chain = target.forward(cache, [PassRow(many, 8, text[8:])]).logits
    cache.lengths[one] = 11
    single = target.forward(cache, [PassRow(one, 11, text[11:])]).logits
    assert torch.allclose(chain[-1], single[0], atol=1e-3 * float(single.abs().max()))
    assert int(chain[-1].argmax()) == int(single[0].argmax())


def test_generic_models_take_int8_too() -> None:
    model = tiny_model("gpt-neox")
    quantise(model, "neox")
    assert probe(build_target(model, name="neox", forward="generic")).ok


def test_without_torchao_the_field_is_named(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    with pytest.raises(InvalidValueError, match=r"target\.quantization.*int8.*torchao"):
        quantise(tiny_model(), "tiny")


def test_an_unknown_quantization_is_refused(tmp_path) -> None:
    tiny_model().save_pretrained(tmp_path)
    with pytest.raises(InvalidValueError, match=r"target\.quantization.*int4"):
        load_target(str(tmp_path), device="cpu", quantization="int4")


def test_strict_numerics_are_refused_by_name() -> None:
    with pytest.raises(InvalidValueError, match=r"target\.numerics.*strict.*fast where target\.quantization"):
        load_target(quantization="int8", numerics="strict")
