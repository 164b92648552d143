import pytest
import torch

from drafts.errors import InvalidValueError
from osd.serve.generic import GenericTarget
from osd.serve.lean import LeanTarget
from osd.serve.load import build_target
from osd.serve.probe import probe
from tests.tiny import tiny_model


@pytest.mark.parametrize("kind", ["llama", "llama-bias", "llama3-rope", "mistral", "qwen2", "qwen3", "gemma"])
def test_lean_families_pass_and_are_chosen(kind: str) -> None:
    target = build_target(tiny_model(kind), name=kind)
    assert target.forward_kind == "lean"
    assert probe(target).ok


@pytest.mark.parametrize("kind", ["mistral-sliding", "qwen2-sliding", "gemma2", "gemma3", "gpt2", "gpt-neox"])
def test_other_families_pass_through_the_generic_forward(kind: str) -> None:
    assert build_target(tiny_model(kind), name=kind).forward_kind == "generic"


@pytest.mark.parametrize("kind", ["bloom", "falcon-alibi", "mamba", "recurrent-gemma"])
def test_alibi_and_recurrent_models_are_refused_with_the_reason(kind: str) -> None:
    with pytest.raises(InvalidValueError, match=r"target\.model: got .*refused: "):
        build_target(tiny_model(kind), name=kind)


def spoil_rope(target: LeanTarget) -> None:
    target._inv_freq = target._inv_freq * 1.05


def spoil_scaling(target: LeanTarget) -> None:
    target._decoder = target._decoder._replace(scaling=1.1 * target._decoder.scaling)


def spoil_norm(target: LeanTarget) -> None:
    target._final_norm = target._final_norm * 1.01


@pytest.mark.parametrize("spoil", [spoil_rope, spoil_scaling, spoil_norm])
def test_the_probe_sees_a_small_fault_of_the_forward(spoil: object) -> None:
    target = LeanTarget(tiny_model(), name="x", feature_layers=None)
    spoil(target)  # type: ignore[operator]
    assert not probe(target).ok


@pytest.mark.parametrize("fault", ["sees all", "ignores trees", "no window"])
def test_the_probe_sees_a_wrong_mask(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = "mistral-sliding" if fault == "no window" else "llama"
    target = GenericTarget(tiny_model(kind), name="x", feature_layers=None)
    if fault == "sees all":
        monkeypatch.setattr(
            "osd.serve.layout.visible", lambda rows, width, length: torch.ones(len(rows), width, length) > 0
        )
    elif fault == "ignores trees":
        monkeypatch.setattr(
            "osd.serve.layout.ancestors",
            lambda parents: torch.ones(len(parents) + 1, len(parents) + 1).tril() > 0,
        )
    else:
        target._windows = {"full_attention": None}
    assert not probe(target).ok


def test_the_probe_fails_on_nan() -> None:
    model = tiny_model()
    target = LeanTarget(model, name="x", feature_layers=None)
    target._final_norm = target._final_norm * float("nan")
    assert not probe(target).ok


def test_auto_falls_back_to_generic_when_only_lean_differs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    whole = LeanTarget.__init__

    def spoilt(self: LeanTarget, *args: object, **kwargs: object) -> None:
        whole(self, *args, **kwargs)  # type: ignore[arg-type]
        spoil_rope(self)

    monkeypatch.setattr(LeanTarget, "__init__", spoilt)
    target = build_target(tiny_model(), name="spoilt")
    assert target.forward_kind == "generic"
    assert "lean forward not used" in caplog.text
    with pytest.raises(InvalidValueError, match=r"target\.forward.*differ"):
        build_target(tiny_model(), name="spoilt", forward="lean")


def test_lean_on_request_is_refused_where_it_cannot_run() -> None:
    with pytest.raises(InvalidValueError, match=r"target\.forward.*gemma2"):
        build_target(tiny_model("gemma2"), name="x", forward="lean")
