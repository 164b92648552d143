"""The compiled pass is the plain model."""

import pytest
import torch

from drafts.native.team import team
from osd.serve.lean import LeanTarget
from osd.serve.target import PassRow
from tests.drafts.small_team import SmallTeam, lent
from tests.osd.native_rig import TREE, Calls, check_tree, close, fitting_model, prompts, shared
from tests.osd.passes import check_kept_path, check_refusals, feed, plain_logits, plain_states, random_text

pytestmark = pytest.mark.skipif(team() is None, reason="torch does not lend its threads here")

KINDS = ["llama", "llama-bias", "llama3-rope", "mistral", "qwen2", "qwen3"]


@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_the_plain_models(kind: str, calls: Calls) -> None:
    target = shared(kind)
    cache = target.make_cache(1, 128, keep_features=False)
    text = random_text(90, seed=1)
    found = feed(target, cache, cache.acquire(), text, chunk=40)
    assert close(found, plain_logits(target.reference, text))
    assert found.dtype == torch.float32
    assert (calls.count, calls.threads) == (3, {torch.get_num_threads()})


@pytest.mark.parametrize("pattern", ["RRR", "RRW", "RWR", "WWW", ""])
@pytest.mark.parametrize("prompt", [1, 9])
def test_a10_verified_logits_equal_a_cache_free_forward(pattern: str, prompt: int) -> None:
    target = shared()
    cache = target.make_cache(1, 200, keep_features=False)
    slot = cache.acquire()
    text, noise = random_text(prompt + 32 * 4, seed=3), random_text(32, seed=4)
    done = prompt - 1
    feed(target, cache, slot, text[:done])
    expected = plain_logits(target.reference, text)
    right = len(pattern) - len(pattern.lstrip("R"))
    for turn in range(32):
        tokens = [text[done]]
        for offset, mark in enumerate(pattern, start=1):
            true = text[done + offset]
            tokens.append(true if mark == "R" else (true + 1 + noise[turn] % 100) % 128)
        output = target.forward(cache, [PassRow(slot, done, tokens)])
        assert close(output.logits[: right + 1], expected[done : done + right + 1])
        cache.commit(slot, done + right + 1)
        done += right + 1


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a25_trees_beside_a_chunked_prefill(kind: str, calls: Calls) -> None:
    target = shared(kind)
    cache = target.make_cache(5, 560, keep_features=True)
    texts = [random_text(length, seed=10 + length) for length in (17, 1, 200, 2)]
    trees = [(), (-1,), (-1, -1, 0, 0, 2), TREE]
    late = random_text(150, seed=20)
    for slot, text in enumerate(texts):
        assert cache.acquire() == slot
        feed(target, cache, slot, text[:-1])
    joining, before = cache.acquire(), calls.count
    for turn, begin in enumerate(range(0, len(late), 40)):
        chunk = late[begin : begin + 40]
        rows = [PassRow(joining, begin, chunk, logits_from=len(chunk) - 1)]
        for slot, text in enumerate(texts):
            parents = trees[(slot + turn) % 4]
            nodes = random_text(len(parents), seed=30 + slot)
            rows.append(PassRow(slot, len(text) - 1, [text[-1], *nodes], parents))
        output = target.forward(cache, rows)
        assert close(output.logits[:1], plain_logits(target.reference, late[: begin + len(chunk)])[-1:])
        for row, offset in zip(rows[1:], output.offsets[1:], strict=True):
            check_tree(target, output.logits[offset:], row, texts[row.slot][:-1])
        cache.commit(joining, begin + len(chunk))
        for slot, text in enumerate(texts):
            cache.commit(slot, len(text))
            text.append(random_text(1, seed=99 + slot + turn)[0])
    cache.check()
    assert calls.count == before + 4


def test_a_kept_path_of_a_tree_continues_as_a_chain() -> None:
    check_kept_path(shared(), close)


def test_rows_in_any_order_and_with_gaps_give_the_same_logits() -> None:
    target = shared()
    lengths = [5, 9, 3]
    cache = prompts(target, lengths)
    rows = [PassRow(slot, lengths[slot], random_text(slot + 1, seed=50 + slot)) for slot in range(3)]
    expected = {
        row.slot: plain_logits(target.reference, random_text(row.start, seed=row.slot) + row.tokens)
        for row in rows
    }
    for order in [(0, 1, 2), (2, 0, 1), (1, 2, 0), (2, 0), (0, 2), (1,)]:
        chosen = [rows[slot] for slot in order]
        output = target.forward(cache, chosen)
        for row, offset in zip(chosen, output.offsets, strict=True):
            count = len(row.tokens)
            assert close(output.logits[offset : offset + count], expected[row.slot][-count:])


@pytest.mark.parametrize("kind", KINDS)
def test_keys_values_and_features_are_the_lean_forwards(kind: str) -> None:
    found, lean = shared(kind), LeanTarget(fitting_model(kind), name=kind, feature_layers=None, budget=0.0)
    lengths = [30, 9, 17]
    passes = [
        [PassRow(1, 9, [5, 6]), PassRow(0, 30, random_text(13, seed=8), TREE, logits_from=12)],
        [PassRow(2, 17, [1, 2, 3, 4], None, 3), PassRow(0, 30, [3])],
    ]
    caches = [prompts(target, lengths, features=True) for target in (found, lean)]
    for rows in passes:
        a, b = (target.forward(cache, rows) for target, cache in zip((found, lean), caches, strict=True))
        assert a.offsets == b.offsets
        assert close(a.logits, b.logits)
    for a, b in zip(caches[0].pairs, caches[1].pairs, strict=True):
        assert close(a, b)
    assert caches[0].features is not None
    assert found.feature_layers == lean.feature_layers == (1, 2, 3)
    assert close(caches[0].features, caches[1].features)
    assert bool(caches[0].features[0, 30 + 12].any())


def test_only_the_logits_asked_for_come_back(calls: Calls) -> None:
    target = shared()
    cache = target.make_cache(2, 32, keep_features=True)
    cache.acquire()
    cache.acquire()
    text = random_text(8, seed=7)
    rows = [PassRow(0, 0, text, logits_from=8), PassRow(1, 0, text, logits_from=6)]
    output = target.forward(cache, rows)
    assert output.offsets == [0, 0]
    assert close(output.logits, plain_logits(target.reference, text)[6:])
    assert cache.features is not None
    cache.features.zero_()
    none = target.forward(cache, rows[:1])
    assert none.logits.shape == (0, target.vocab_size)
    assert close(cache.features[0, :8], plain_states(target.reference, text, target.feature_layers))
    assert cache.lengths == [0, 0]
    assert calls.count == 2


def test_a_team_smaller_than_asked_for_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    target = shared()
    texts = [random_text(length, seed=length) for length in (3, 17, 40)]
    found = []
    for _ in range(2):
        cache = target.make_cache(3, 64, keep_features=False)
        rows = [PassRow(cache.acquire(), 0, text) for text in texts]
        found.append(target.forward(cache, rows).logits.clone())
        monkeypatch.setattr(target, "_team", SmallTeam(lent()))
    assert torch.equal(*found)


def test_forward_refuses_a_slot_twice_and_a_wrong_start() -> None:
    cache = shared().make_cache(1, 32, keep_features=False)
    cache.acquire()
    check_refusals(shared(), cache)


def test_a18_nan_in_one_row_stays_in_that_row() -> None:
    target = shared()
    lengths = [6, 6, 20]
    cache = prompts(target, lengths)
    rows = [PassRow(slot, lengths[slot], [3, 4 + slot, 5]) for slot in range(3)]
    clean = target.forward(cache, rows).logits.clone()
    for pair in cache.pairs:
        pair[:, 1, :, 2] = float("nan")
    found = target.forward(cache, rows).logits
    assert bool(found[3:6].isnan().all())
    assert torch.equal(found[:3], clean[:3])
    assert torch.equal(found[6:], clean[6:])
    after = target.forward(cache, [rows[2], rows[0]]).logits
    assert torch.equal(after[:3], clean[6:])
    assert torch.equal(after[3:], clean[:3])
