"""Weights that were shipped in codes are served from them, and the model stays what it was."""

import copy

import pytest
import torch

from drafts.native.team import team
from osd.serve.cache import SlotCache
from osd.serve.lean import LeanTarget
from osd.serve.native import NativeTarget
from osd.serve.target import PassRow
from tests.osd.native_rig import TREE, close, coded_model, error, fitting_model, native, prompts
from tests.osd.passes import feed, plain_logits, random_text

pytestmark = pytest.mark.skipif(team() is None, reason="torch does not lend its threads here")
ROLES = {"qkv", "attn_out", "gate_up", "down", "output"}


def stored(target: NativeTarget) -> set[str]:
    assert set(target.native.tiles) == ROLES
    return {tiles.format.name for tiles in target.native.tiles.values()}


def driven(target: LeanTarget) -> tuple[torch.Tensor, SlotCache]:
    """Logits of a chain and of a tree beside a row, over prompts."""
    cache = prompts(target, [30, 9], features=True)
    chain = target.forward(cache, [PassRow(1, 9, random_text(6, seed=2))]).logits
    rows = [PassRow(0, 30, random_text(13, seed=3), TREE), PassRow(1, 9, [5])]
    return torch.cat((chain, target.forward(cache, rows).logits)), cache


@pytest.mark.parametrize(("bits", "vocab"), [(4, 131), (8, 128)])
def test_coded_weights_give_the_same_logits(bits: int, vocab: int) -> None:
    target = native(coded_model(bits, vocab_size=vocab))
    assert stored(target) == {f"q{bits}"}
    lean = LeanTarget(coded_model(bits, vocab_size=vocab), name="x", feature_layers=None, budget=0.0)
    (found, a), (expected, b) = driven(target), driven(lean)
    assert close(found, expected)
    assert close(a.features, b.features)
    text = random_text(40, seed=4)
    cache = target.make_cache(1, 40, keep_features=False)
    assert close(feed(target, cache, cache.acquire(), text, chunk=17), plain_logits(target.reference, text))


def test_one_layers_weight_without_codes_is_not_rounded_to_any() -> None:
    model = coded_model(4)
    weight = model.model.layers[2].mlp.down_proj.weight.data
    weight[0, 0] += 1.0
    weight[5, 40:50] *= 1.001
    target = native(model)
    assert target.native.tiles["down"].format.name == "f32"
    assert target.native.tiles["qkv"].format.name == "q4"
    lean = LeanTarget(copy.deepcopy(model), name="x", feature_layers=None, budget=0.0)
    assert close(driven(target)[0], driven(lean)[0])


def test_float32_weights_of_a_bfloat16_model_take_half_the_bytes() -> None:
    target = native(fitting_model().bfloat16().float())
    assert stored(target) == {"bf16"}
    lean = LeanTarget(fitting_model().bfloat16().float(), name="x", feature_layers=None, budget=0.0)
    assert close(driven(target)[0], driven(lean)[0])


def near(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((found - expected).abs().max() <= 0.05 * expected.abs().max())


@pytest.mark.parametrize("kind", ["llama-bias", "llama3-rope", "qwen3"])
def test_bfloat16_errs_no_more_than_the_lean_forward(kind: str) -> None:
    model = fitting_model(kind).bfloat16()
    lean = LeanTarget(copy.deepcopy(model), name=kind, feature_layers=None, budget=0.0)
    whole = LeanTarget(copy.deepcopy(model).float(), name=kind, feature_layers=None, budget=0.0)
    (found, a), (other, b), (exact, c) = driven(native(model)), driven(lean), driven(whole)
    assert found.dtype == torch.float32
    assert torch.equal(found.bfloat16().float(), found)
    assert near(found, other)
    assert a.features is not None
    assert a.features.dtype == a.pairs[0].dtype == torch.bfloat16
    sides = [(found, other, exact), (a.features, b.features, c.features)]
    for ours, theirs, right in [*sides, *zip(a.pairs, b.pairs, c.pairs, strict=True)]:
        assert error(ours, right) <= 1.2 * error(theirs, right)


@pytest.mark.parametrize(("bits", "tied"), [(4, False), (8, True)])
def test_bfloat16_is_served_from_the_codes_that_it_was_rounded_from(bits: int, tied: bool) -> None:
    model = coded_model(bits, tie_word_embeddings=tied)
    exact = {name: tensor.clone() for name, tensor in model.named_parameters()}
    model = model.bfloat16()
    lean = LeanTarget(copy.deepcopy(model), name="x", feature_layers=None, budget=0.0)
    target = native(copy.deepcopy(model), exact=exact.__getitem__)
    assert {name[:2] for name in stored(target)} == {f"q{bits}"}
    assert near(driven(target)[0], driven(lean)[0])
    plain = native(model)
    assert stored(plain) == {"bf16"}
    assert near(driven(target)[0], driven(plain)[0])


def test_bfloat16_weights_that_are_not_the_exact_ones_rounded_are_kept() -> None:
    model = coded_model(4)
    exact = {name: tensor.clone() for name, tensor in model.named_parameters()}
    model = model.bfloat16()
    model.lm_head.weight.data.mul_(1.05)
    target = native(copy.deepcopy(model), exact=exact.__getitem__)
    assert target.native.tiles["output"].format.name == "bf16"
    lean = LeanTarget(model, name="x", feature_layers=None, budget=0.0)
    assert near(driven(target)[0], driven(lean)[0])


def test_nan_in_one_bfloat16_row_stays_in_that_row() -> None:
    target = native(fitting_model("qwen3").bfloat16())
    cache = prompts(target, [6, 6, 20])
    rows = [PassRow(0, 6, [3, 4]), PassRow(1, 6, [3, 5]), PassRow(2, 20, [7])]
    clean = target.forward(cache, rows).logits.clone()
    for pair in cache.pairs:
        pair[:, 1, :, 2] = float("nan")
    for found in (target.forward(cache, rows).logits, target.forward(cache, rows).logits):
        assert bool(found[2:4].isnan().all())
        assert torch.equal(found[:2], clean[:2])
        assert torch.equal(found[4:], clean[4:])
