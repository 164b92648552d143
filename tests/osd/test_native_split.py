"""Compiled float32 passes whose products take inputs in parts, where the processor has matrix registers."""

import functools

import pytest
import torch

from drafts.native.matrix_tiles import has_matrix_registers
from drafts.native.team import team
from osd.serve.lean import LeanTarget
from osd.serve.native import NativeTarget
from osd.serve.target import PassRow
from tests.osd.native_rig import TREE, Calls, check_tree, close, coded_model, fitting_model, native, prompts
from tests.osd.passes import feed, plain_logits, random_text

pytestmark = pytest.mark.skipif(
    team() is None or not has_matrix_registers(), reason="no team of torch, or no matrix registers, here"
)


@functools.cache
def split(bits: int = 4, vocab: int = 131) -> NativeTarget:
    """Every pass hands inputs over in parts."""
    target = native(coded_model(bits, vocab_size=vocab))
    assert target.native.split
    target.split_from = 1
    return target


@pytest.mark.parametrize("bits", [4, 8])
def test_logits_of_every_number_of_tokens_are_the_plain_models(bits: int, calls: Calls) -> None:
    target = split(bits)
    text = random_text(150, seed=1)
    expected = plain_logits(target.reference, text)
    counts = [*range(1, 34), 47, 48, 49, 63, 64, 65, 96, 127, 128, 129, 150]
    for count in counts:
        cache = target.make_cache(1, count, keep_features=False)
        found = feed(target, cache, cache.acquire(), text[:count], chunk=count)
        assert close(found, expected[:count]), count
    assert calls.count == len(counts)


def test_a25_trees_beside_a_chunked_prefill() -> None:
    target = split()
    cache = prompts(target, [17, 9, 30])
    texts = [random_text(length, seed=slot) for slot, length in enumerate([17, 9])]
    prompt = random_text(30, seed=2) + random_text(40, seed=9)
    rows = [PassRow(2, 30, prompt[30:], logits_from=39)]
    rows += [
        PassRow(slot, len(text), random_text(len(TREE) + 1, seed=5 + slot), TREE)
        for slot, text in enumerate(texts)
    ]
    output = target.forward(cache, rows)
    assert close(output.logits[:1], plain_logits(target.reference, prompt)[-1:])
    for row, offset, text in zip(rows[1:], output.offsets[1:], texts, strict=True):
        check_tree(target, output.logits[offset : offset + len(row.tokens)], row, text)


def test_keys_values_and_features_are_the_lean_forwards() -> None:
    lean = LeanTarget(coded_model(4, vocab_size=131), name="x", feature_layers=None, budget=0.0)
    caches = [prompts(target, [30, 9, 17], features=True) for target in (split(), lean)]
    rows = [PassRow(1, 9, [5, 6]), PassRow(0, 30, random_text(13, seed=8), TREE, logits_from=12)]
    found, expected = (
        target.forward(cache, rows) for target, cache in zip((split(), lean), caches, strict=True)
    )
    assert close(found.logits, expected.logits)
    assert close(caches[0].features, caches[1].features)
    for ours, theirs in zip(caches[0].pairs, caches[1].pairs, strict=True):
        assert close(ours[:, :2, :, :43], theirs[:, :2, :, :43])


def test_both_kinds_of_passes_take_turns_over_one_cache() -> None:
    target = native(coded_model(4, vocab_size=131))
    target.split_from = 5
    text = random_text(60, seed=3)
    cache = target.make_cache(1, 60, keep_features=True)
    slot, done, found = cache.acquire(), 0, []
    for count in (3, 20, 1, 5, 6, 4, 21):
        found.append(target.forward(cache, [PassRow(slot, done, text[done : done + count])]).logits)
        done += count
        cache.commit(slot, done)
    assert close(torch.cat(found), plain_logits(target.reference, text))


def test_a_rows_logits_are_the_same_bits_beside_other_rows() -> None:
    target = split()
    row = PassRow(1, 9, [5, 6, 7])
    alone = target.forward(prompts(target, [30, 9, 17]), [row]).logits
    for others in ([PassRow(0, 30, [1])], [PassRow(0, 30, random_text(60, seed=1)), PassRow(2, 17, [3, 4])]):
        output = target.forward(prompts(target, [30, 9, 17]), [*others, row])
        at = output.offsets[-1]
        assert torch.equal(output.logits[at : at + 3], alone)


def test_a18_nan_in_one_row_stays_in_that_row() -> None:
    target = split()
    rows = [PassRow(0, 5, random_text(10, seed=1)), PassRow(1, 9, random_text(10, seed=2))]
    clean = target.forward(prompts(target, [5, 9]), rows).logits
    cache = prompts(target, [5, 9])
    cache.pairs[0][:, 0, :, :5] = float("nan")
    found = target.forward(cache, rows)
    assert bool(found.logits[:10].isnan().all())
    assert torch.equal(found.logits[10:], clean[10:])


def test_only_coded_weights_in_float32_and_fast_numerics_are_split() -> None:
    assert not native(fitting_model()).native.split
    assert not native(coded_model(4), strict=True).native.split
    assert not native(coded_model(4).bfloat16()).native.split
