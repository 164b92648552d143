"""The compiled layers are the Python ones, to the last bit."""

import pytest
import torch

from osd.serve import decoder
from osd.serve.decoder import compiled_layers, run_layers
from osd.serve.lean import LeanTarget
from osd.serve.target import PassRow
from tests.osd.passes import feed, random_text
from tests.tiny import tiny_model

TREE = (-1, -1, 0, 2, 1)


def passes_of(target: LeanTarget) -> list[torch.Tensor]:
    """Logits and keys of a prompt, a step of two rows, and one of a tree beside rows of other lengths."""
    cache = target.make_cache(3, 96, keep_features=True)
    for row, length in enumerate((9, 30, 17)):
        cache.acquire()
        feed(target, cache, row, random_text(length, seed=row))
    steps = [
        [PassRow(0, 9, [5])],
        [PassRow(0, 9, [5]), PassRow(1, 30, [6])],
        [
            PassRow(1, 30, [7, 8, 9, 10, 11, 12], TREE),
            PassRow(0, 9, [5, 6]),
            PassRow(2, 17, [1, 2, 3, 4], None, 3),
        ],
        [PassRow(0, 9, [3, 4]), PassRow(1, 30, [4, 5]), PassRow(2, 17, [5, 6])],
    ]
    found = [target.forward(cache, rows).logits.clone() for rows in steps]
    assert cache.features is not None
    return [*found, *cache.pairs, cache.features]


@pytest.mark.parametrize("kind", ["llama", "llama-bias", "mistral", "qwen2", "qwen3", "gemma"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_layers_give_the_same_bits(kind: str, dtype: torch.dtype) -> None:
    target = LeanTarget(tiny_model(kind).to(dtype), name=kind, feature_layers=None, budget=0.0)
    assert compiled_layers() is not run_layers, "this torch compiles the layers"
    assert target._run is compiled_layers()
    compiled = passes_of(target)
    target._run = run_layers
    assert all(map(torch.equal, compiled, passes_of(target)))


def test_layers_that_do_not_compile_run_from_python(monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    def refuse(function: object) -> object:
        raise RuntimeError("no compiler today")

    monkeypatch.setattr(decoder.torch.jit, "script", refuse)
    assert compiled_layers.__wrapped__() is run_layers
    assert "no compiler today" in caplog.text
