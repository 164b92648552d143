"""Compiled passes of every number of tokens, heads, threads and outputs; a row's logits are its own."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from drafts.native.team import team
from osd.serve.native import NativeTarget
from osd.serve.target import PassRow
from tests.osd.native_rig import (
    TREE,
    Calls,
    check_tree,
    close,
    fitting_model,
    native,
    prompts,
    shared,
)
from tests.osd.passes import feed, plain_logits, random_text

pytestmark = pytest.mark.skipif(team() is None, reason="torch does not lend its threads here")


@pytest.fixture
def torch_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_passes_of_every_number_of_tokens_up_to_the_limit(calls: Calls) -> None:
    target = shared()
    assert target.limit >= 64
    text = random_text(64, seed=1)
    expected = plain_logits(target.reference, text)
    for count in range(1, 65):
        cache = target.make_cache(1, 64, keep_features=False)
        found = feed(target, cache, cache.acquire(), text[:count], chunk=count)
        assert close(found, expected[:count]), count
    assert calls.count == 64


def test_longer_passes_run_through_the_library(calls: Calls) -> None:
    target = native(fitting_model())
    assert target.limit == target.most
    for limit in (target.most, 20, 1, 0):
        target.limit = limit
        for count, compiled in ((limit, 1), (limit + 1, 0)):
            if not count:
                continue
            before = calls.count
            text = random_text(count, seed=2)
            cache = target.make_cache(1, count, keep_features=False)
            found = feed(target, cache, cache.acquire(), text, chunk=count)
            assert close(found, plain_logits(target.reference, text))
            assert calls.count - before == compiled


def test_compiled_and_library_passes_take_turns_over_one_cache() -> None:
    target = native(fitting_model("qwen3"))
    target.limit = 5
    text = random_text(60, seed=3)
    cache = target.make_cache(1, 60, keep_features=True)
    slot, done, found = cache.acquire(), 0, []
    for count in (3, 20, 1, 5, 6, 4, 21):
        part = text[done : done + count]
        found.append(target.forward(cache, [PassRow(slot, done, part)]).logits)
        done += count
        cache.commit(slot, done)
    assert close(torch.cat(found), plain_logits(target.reference, text))


@pytest.mark.parametrize(
    "sizes",
    [
        {"num_attention_heads": 6, "num_key_value_heads": 2, "vocab_size": 131},
        {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 64, "vocab_size": 159},
        {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 33},
        {"num_attention_heads": 14, "num_key_value_heads": 2, "head_dim": 96, "hidden_size": 32},
    ],
    ids=lambda sizes: "-".join(map(str, sizes.values())),
)
def test_heads_and_vocabularies_of_other_sizes(sizes: dict[str, int]) -> None:
    target = native(fitting_model("qwen3", num_hidden_layers=2, intermediate_size=32, **sizes))
    vocab = target.vocab_size
    text = random_text(50, seed=4, vocab=vocab)
    cache = target.make_cache(2, 67, keep_features=True)
    cache.acquire()
    found = feed(target, cache, cache.acquire(), text, chunk=19)
    assert found.shape == (50, vocab)
    assert close(found, plain_logits(target.reference, text))
    row = PassRow(1, 50, random_text(len(TREE) + 1, seed=5, vocab=vocab), TREE)
    chain = PassRow(0, 0, random_text(3, seed=6, vocab=vocab), logits_from=1)
    output = target.forward(cache, [chain, row])
    assert output.logits.shape == (2 + len(row.tokens), vocab)
    assert close(output.logits[:2], plain_logits(target.reference, chain.tokens)[1:])
    check_tree(target, output.logits[2:], row, text)


@pytest.mark.usefixtures("torch_threads")
def test_any_number_of_threads_gives_the_same_bits() -> None:
    found = []
    for threads in (1, 2, 4):
        torch.set_num_threads(threads)
        target = native(fitting_model("llama-bias", num_hidden_layers=2))
        cache = prompts(target, [30, 1, 7], features=True)
        rows = [PassRow(0, 30, random_text(13, seed=6), TREE), PassRow(1, 1, [3, 4]), PassRow(2, 7, [5])]
        logits = target.forward(cache, rows).logits
        assert cache.features is not None
        found.append([logits, cache.features, *cache.pairs])
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


def alone(target: NativeTarget, lengths: list[int], row: PassRow) -> torch.Tensor:
    return target.forward(prompts(target, lengths), [row]).logits


@pytest.mark.parametrize("kind", ["llama", "llama-bias", "qwen3"])
@pytest.mark.parametrize("own", [1, 2, 5, 13])
def test_a_rows_logits_are_the_same_bits_beside_other_rows(kind: str, own: int) -> None:
    target = shared(kind)
    lengths = [21, 40, 1, 16]
    row = PassRow(1, 40, random_text(own, seed=7))
    expected = alone(target, lengths, row)
    for others in ((1, 1, 1), (4, 0, 0), (0, 3, 2), (9, 7, 11), (30, 8, 13)):
        beside = [
            PassRow(slot, lengths[slot], random_text(count, seed=8 + slot))
            for slot, count in zip((0, 2, 3), others, strict=True)
            if count
        ]
        cache = prompts(target, lengths)
        for place in range(len(beside) + 1):
            rows = [*beside[:place], row, *beside[place:]]
            output = target.forward(cache, rows)
            begin = output.offsets[place]
            assert torch.equal(output.logits[begin : begin + own], expected), (others, place)


def test_a_trees_logits_are_the_same_bits_beside_other_rows() -> None:
    target = shared()
    lengths = [21, 40, 5]
    row = PassRow(1, 40, random_text(13, seed=9), TREE)
    expected = alone(target, lengths, row)
    beside = [PassRow(0, 21, random_text(13, seed=10), (-1,) * 12), PassRow(2, 5, random_text(20, seed=11))]
    for rows in ([row, *beside], [*beside, row], [beside[0], row]):
        output = target.forward(prompts(target, lengths), rows)
        begin = output.offsets[rows.index(row)]
        assert torch.equal(output.logits[begin : begin + 13], expected)


def test_the_same_pass_twice_gives_the_same_bits() -> None:
    target = shared("qwen3")
    cache = prompts(target, [40, 13])
    rows = [PassRow(0, 40, random_text(13, seed=12), TREE), PassRow(1, 13, random_text(50, seed=13))]
    first = target.forward(cache, rows).logits.clone()
    for _ in range(30):
        assert torch.equal(target.forward(cache, rows).logits, first)


def test_a_pass_from_another_thread_gives_the_same_bits() -> None:
    target = shared("qwen3")
    cache = prompts(target, [40, 13])
    rows = [PassRow(0, 40, random_text(13, seed=12), TREE), PassRow(1, 13, random_text(5, seed=13))]
    expected = target.forward(cache, rows).logits.clone()
    with ThreadPoolExecutor(1) as pool:
        for _ in range(3):
            assert torch.equal(pool.submit(target.forward, cache, rows).result().logits, expected)
