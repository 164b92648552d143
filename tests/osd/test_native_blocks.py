"""Compiled bfloat16 passes over many tokens: attention by blocks, tiles decoded once for all chunks."""

import copy

import numpy as np
import pytest
import torch

from drafts.native.matrix_tiles import has_matrix_registers
from drafts.native.team import team
from osd.serve import native_entries as entry
from osd.serve.lean import LeanTarget
from osd.serve.native import NativeTarget
from osd.serve.probe import probe
from osd.serve.target import PassRow
from tests.osd.native_rig import TREE, coded_model, error, fitting_model, native
from tests.osd.passes import feed, random_text

pytestmark = pytest.mark.skipif(
    team() is None or not has_matrix_registers(), reason="no team of torch, or no matrix registers, here"
)

LENGTHS = [150, 7, 16, 33, 90]
LATER = [20, 40, 1, 16, 17]


def driven(target: LeanTarget, texts: list[list[int]]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Logits of all tokens of prompts, of their continuations beside a tree, and the cache behind them."""
    cache = target.make_cache(len(texts) + 1, 220, keep_features=True)
    for _ in range(cache.slots):
        cache.acquire()
    feed(target, cache, len(texts), random_text(30, seed=77))
    rows = [
        PassRow(slot, 0, text[:length])
        for slot, (text, length) in enumerate(zip(texts, LENGTHS, strict=True))
    ]
    found = [target.forward(cache, rows).logits.clone()]
    for slot, length in enumerate(LENGTHS):
        cache.commit(slot, length)
    rows = [
        PassRow(slot, start, text[start : start + more])
        for slot, (text, start, more) in enumerate(zip(texts, LENGTHS, LATER, strict=True))
    ]
    rows.append(PassRow(len(texts), 30, random_text(len(TREE) + 1, seed=9), TREE))
    found.append(target.forward(cache, rows).logits.clone())
    ends = [start + more for start, more in zip(LENGTHS, LATER, strict=True)]
    assert cache.features is not None
    kept = [cache.features[slot, :end].float() for slot, end in enumerate(ends)]
    kept += [pair[:, slot, :, :end].float() for pair in cache.pairs for slot, end in enumerate(ends)]
    return torch.cat(found), kept


def texts() -> list[list[int]]:
    return [
        random_text(length + more, seed=slot)
        for slot, (length, more) in enumerate(zip(LENGTHS, LATER, strict=True))
    ]


def check_errors(target: NativeTarget, model) -> None:
    """Against the float32 model, errors are those of the library's bfloat16 forward."""
    lean = LeanTarget(copy.deepcopy(model), name="x", feature_layers=None, budget=0.0)
    whole = LeanTarget(copy.deepcopy(model).float(), name="x", feature_layers=None, budget=0.0)
    (found, ours), (other, theirs), (exact, right) = (driven(t, texts()) for t in (target, lean, whole))
    assert bool(found.isfinite().all())
    assert error(found, exact) <= 1.2 * error(other, exact)
    for one, two, true in zip(ours, theirs, right, strict=True):
        assert error(one, true) <= 1.3 * error(two, true)


@pytest.mark.parametrize("kind", ["llama", "llama3-rope", "qwen3"])
def test_prompts_err_no_more_than_the_lean_forward(kind: str) -> None:
    model = fitting_model(kind).bfloat16()
    target = native(copy.deepcopy(model))
    assert "attend" in target.native.kernels
    check_errors(target, model)


@pytest.mark.parametrize("bits", [4, 8])
def test_tiles_are_decoded_for_the_first_chunk_only(bits: int) -> None:
    model = coded_model(bits)
    exact = {name: tensor.clone() for name, tensor in model.named_parameters()}
    model = model.bfloat16()
    target = native(copy.deepcopy(model), exact=exact.__getitem__)
    assert target.native.tiles["gate_up"].format.name == f"q{bits}p"
    check_errors(target, model)


@pytest.mark.parametrize("size", [32, 64])
def test_a_block_agrees_with_its_tokens_one_by_one(size: int) -> None:
    target = native(fitting_model(head_dim=size).bfloat16())
    text = random_text(120, seed=4)
    logits = []
    for chunk in (120, 15):
        cache = target.make_cache(1, 128, keep_features=False)
        logits.append(feed(target, cache, cache.acquire(), text, chunk=chunk))
    assert error(*logits) < 0.02


def test_strict_passes_have_no_blocks_since_a_tokens_place_in_one_would_count() -> None:
    target = NativeTarget(fitting_model().bfloat16(), name="x", feature_layers=None, strict=True)
    assert "attend" not in target.native.kernels


def test_the_probe_sees_a_fault_of_blocks() -> None:
    target = native(fitting_model().bfloat16())
    assert probe(target).ok
    target._table[entry.SCALING] = int(np.float32(2 * target._scaling).view(np.int32))
    result = probe(target)
    assert not result.ok
    assert result.where.startswith("long chunk")
