"""Which models get compiled passes, and what serves the others."""

from collections.abc import Sequence

import llvmlite.binding
import pytest
import torch

from drafts.errors import InvalidValueError
from drafts.native.codes import Tiles, tiles_of
from drafts.native.team import team
from osd.serve.load import build_target
from osd.serve.native import NativeTarget, native_obstacle
from osd.serve.probe import probe
from osd.serve.quantize import quantise
from osd.serve.target import PassRow, TargetModel
from tests.osd.native_rig import SIZES, Calls, close, fitting_model
from tests.osd.passes import feed, plain_logits, random_text
from tests.tiny import tiny_model

pytestmark = pytest.mark.skipif(team() is None, reason="torch does not lend its threads here")

UNFIT = {
    "gemma": ("gemma", SIZES, "gemma"),
    "heads": ("llama", {**SIZES, "head_dim": 16}, "16"),
    "hidden": ("llama", {**SIZES, "hidden_size": 80}, "80"),
    "inner": ("llama", {**SIZES, "intermediate_size": 48}, "48"),
    "gelu": ("llama", {**SIZES, "hidden_act": "gelu_pytorch_tanh"}, "gelu"),
}


def serves(target: TargetModel) -> bool:
    text = random_text(30, seed=1)
    cache = target.make_cache(1, 64, keep_features=True)
    slot = cache.acquire()
    found = feed(target, cache, slot, text[:20], chunk=11)
    rest = target.forward(cache, [PassRow(slot, 20, text[20:])]).logits
    return close(torch.cat((found, rest)), plain_logits(target.reference, text))


@pytest.mark.parametrize("case", UNFIT)
def test_models_without_compiled_passes_are_named_with_the_reason(case: str) -> None:
    kind, sizes, reason = UNFIT[case]
    model = tiny_model(kind, scale=0.2, **sizes)
    assert reason in (native_obstacle(model) or "")
    with pytest.raises(InvalidValueError, match=rf"target\.forward: got 'native'.*{reason}"):
        build_target(model, name=case, forward="native")


@pytest.mark.parametrize("case", UNFIT)
def test_models_without_compiled_passes_are_served_by_the_lean_forward(case: str) -> None:
    kind, sizes, _ = UNFIT[case]
    target = build_target(tiny_model(kind, scale=0.2, **sizes), name=case)
    assert target.forward_kind == "lean"
    assert serves(target)


def test_int8_weights_are_left_to_the_lean_forward() -> None:
    pytest.importorskip("torchao")
    model = fitting_model()
    quantise(model, "tiny")
    assert "int8" in (native_obstacle(model) or "")
    with pytest.raises(InvalidValueError, match=r"target\.forward: got 'native'"):
        build_target(model, name="int8", forward="native")


def test_half_precision_of_another_type_has_no_compiled_passes() -> None:
    assert "float16" in (native_obstacle(fitting_model().half()) or "")


def test_torch_without_a_team_has_no_compiled_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    model = fitting_model()
    monkeypatch.setattr("osd.serve.native.team", lambda: None)
    assert "threads" in (native_obstacle(model) or "")
    target = build_target(model, name="alone")
    assert target.forward_kind == "lean"
    assert serves(target)


@pytest.mark.parametrize("kind", ["llama-bias", "llama3-rope", "qwen3"])
def test_fitting_models_pass_the_probe(kind: str, calls: Calls) -> None:
    target = build_target(fitting_model(kind), name=kind, forward="native")
    assert isinstance(target, NativeTarget)
    assert target.forward_kind == "native"
    before = calls.count
    assert serves(target)
    assert calls.count == before + 3


def test_auto_takes_compiled_passes_up_to_a_measured_limit() -> None:
    target = build_target(fitting_model(), name="auto")
    assert isinstance(target, NativeTarget)
    assert 0 <= target.limit <= target.most
    assert probe(target).ok
    assert serves(target)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_auto_serves_models_of_few_positions(dtype: torch.dtype) -> None:
    model = fitting_model(max_position_embeddings=16).to(dtype)
    assert probe(build_target(model, name="short")).ok


def test_lean_on_request_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("compiled something")

    monkeypatch.setattr(llvmlite.binding, "create_mcjit_compiler", refuse)
    target = build_target(fitting_model(), name="lean", forward="lean")
    assert target.forward_kind == "lean"
    assert not isinstance(target, NativeTarget)
    with pytest.raises(AssertionError, match="compiled something"):
        build_target(fitting_model(), name="native", forward="native")


@pytest.fixture
def spoilt_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiled pass reads weights that are half a per cent off."""

    def off(weights: Sequence[torch.Tensor], *args: object, **options: object) -> Tiles | None:
        return tiles_of([1.005 * weight for weight in weights], *args, **options)

    monkeypatch.setattr("osd.serve.native_weights.tiles_of", off)


@pytest.mark.usefixtures("spoilt_weights")
def test_a_wrong_compiled_pass_is_caught_and_the_lean_forward_serves(
    calls: Calls,
    caplog: pytest.LogCaptureFixture,
) -> None:
    target = build_target(fitting_model(), name="spoilt")
    assert "not compiled, logits differ" in caplog.text
    before = calls.count
    assert serves(target)
    assert calls.count == before


@pytest.mark.usefixtures("spoilt_weights")
def test_a_wrong_compiled_pass_is_refused_where_it_is_asked_for() -> None:
    with pytest.raises(InvalidValueError, match=r"target\.forward: got 'native'.*logits differ"):
        build_target(fitting_model(), name="spoilt", forward="native")
