"""Stored prefixes: what is reused is bit for bit what was computed, and no text depends on it."""

import pytest
import torch

from drafts.errors import IntegrityError
from osd.serve.cache import SlotCache
from osd.serve.prefix import BLOCK, PrefixStore
from tests.osd.draft_rig import mixture
from tests.osd.engine_rig import Client, Forced, greedy, make_engine, prompts

FEATURES = 6


def filled(slots: int = 3, room: int = 96) -> SlotCache:
    cache = SlotCache(layers=2, slots=slots, kv_heads=2, max_length=room, head_dim=4, feature_width=FEATURES)
    generator = torch.Generator().manual_seed(0)
    for tensor in (*cache.pairs, cache.features):
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return cache


def opened(cache: SlotCache, length: int) -> int:
    row = cache.acquire()
    cache.reserve(row, 0, length)
    cache.commit(row, length)
    return row


def test_a_loaded_prefix_is_bit_for_bit_what_was_stored_features_included():
    cache = filled()
    store = PrefixStore(cache, 64)
    text = list(range(40))
    row = opened(cache, 40)
    store.keep(row, text)
    other = cache.acquire()
    blocks = store.match([*text, 99])
    assert store.load(other, blocks) == 32
    assert cache.lengths[other] == 32
    for pair in cache.pairs:
        assert torch.equal(pair[:, other, :, :32], pair[:, row, :, :32])
    assert torch.equal(cache.features[other, :32], cache.features[row, :32])
    store.check()
    cache.check()


def test_only_whole_blocks_behind_the_same_text_match_and_never_the_whole_prompt():
    cache = filled()
    store = PrefixStore(cache, 64)
    text = list(range(2 * BLOCK))
    store.keep(opened(cache, 2 * BLOCK), text)
    assert len(store.match(text)) == 1
    assert len(store.match([*text, 7])) == 2
    assert len(store.match([*text[:-1], 99, 7])) == 1
    assert store.match([99, *text[1:], 7]) == []
    assert store.match([*text[BLOCK:], *text[BLOCK:], 7]) == []


def test_the_least_recently_used_go_first_and_no_block_outlives_what_it_continues():
    cache = filled()
    store = PrefixStore(cache, 4 * BLOCK)
    row = opened(cache, 5 * BLOCK)
    first, second = list(range(2 * BLOCK)), list(range(100, 100 + 2 * BLOCK))
    store.keep(row, first)
    store.keep(row, second)
    store.load(cache.acquire(), store.match([*first, 0]))
    store.keep(row, list(range(200, 200 + BLOCK)))
    store.check()
    assert len(store.match([*first, 0])) == 2
    assert len(store.match([*second, 0])) == 1
    long = list(range(300, 300 + 5 * BLOCK))
    store.keep(row, long)
    store.check()
    assert len(store.match([*long, 0])) == 4
    assert store.tokens == 4 * BLOCK
    store.clear()
    store.check()
    assert store.match([*long, 0]) == []


def test_a_store_without_room_keeps_nothing_and_uncommitted_text_is_refused():
    cache = filled()
    row = opened(cache, BLOCK)
    nothing = PrefixStore(cache, BLOCK - 1)
    nothing.keep(row, list(range(BLOCK)))
    assert (nothing.bytes, nothing.tokens, nothing.match(list(range(40)))) == (0, 0, [])
    with pytest.raises(IntegrityError, match="32 tokens, 16 committed"):
        PrefixStore(cache, 64).keep(row, list(range(32)))


def engine_with(tokens: int, **changes):
    return make_engine(prefix_cache_tokens=tokens, **changes)


SHARED = prompts(1, seed=70, lengths=(50,))[0]
TAILS = prompts(4, seed=71, lengths=(3, 9, 1, 20))
SAMPLINGS = [{"temperature": 0.0}, {"temperature": 0.9, "top_p": 0.95, "seed": 5}]


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a26_reuse_changes_neither_text_nor_what_a_head_on_features_proposes(sampling):
    """A26: with reuse, rounds (proposed, accepted) are those of a fresh engine, one request at a time."""

    def runs(tokens):
        seen = []
        engine = engine_with(tokens, drafter=mixture(("eagle",)), fixed_k=3)
        for index, tail in enumerate([*TAILS, *TAILS]):
            client = Client(engine)
            client.submit(str(index), [*SHARED, *tail], max_tokens=12, ignore_eos=True, **sampling)
            client.run()
            record = client.outcomes[str(index)].record
            counts = [(item.proposed, item.accepted, item.emitted) for item in record.rounds]
            seen.append((record.output_ids, counts))
        return engine, seen

    without, expected = runs(0)
    engine, found = runs(512)
    assert found == expected
    assert without.prefixes.hits == 0
    assert engine.prefixes.hits == 7
    assert engine.prefixes.tokens_reused >= 7 * 48


def test_a26_nothing_of_one_request_is_proposed_in_another_that_shares_its_prefix():
    """A26: a row sees its own prompt and output only, however much of it was reused."""
    seen = {}
    source = Forced(lambda row, limit: seen.setdefault(row.request_id, list(row.tokens[:-1])) and [])
    engine = engine_with(512, source=source)
    for index, tail in enumerate(TAILS):
        client = Client(engine)
        client.submit(str(index), [*SHARED, *tail], max_tokens=4, ignore_eos=True)
        client.run()
        assert seen[str(index)] == [*SHARED, *tail]


def test_the_earlier_turns_of_a_conversation_are_not_computed_again():
    engine = engine_with(512)
    client = Client(engine)
    client.submit("one", SHARED, max_tokens=20, ignore_eos=True)
    answer = client.run()["one"]
    second = [*SHARED, *answer, 5, 6, 7]
    client.submit("two", second, max_tokens=8, ignore_eos=True)
    assert client.run()["two"] == tuple(greedy(second, 8, stop=()))
    assert client.outcomes["one"].record.cached_tokens == 0
    assert client.outcomes["two"].record.cached_tokens == 64


def test_choices_of_one_prompt_wait_for_the_first_to_compute_it():
    prompt = prompts(1, seed=72, lengths=(100,))[0]
    engine = engine_with(512, prefill_chunk=30, slots=4)
    client = Client(engine)
    for index in range(4):
        client.submit(str(index), prompt, max_tokens=6, ignore_eos=True)
    got = client.run()
    assert set(got.values()) == {tuple(greedy(prompt, 6, stop=()))}
    reused = [client.outcomes[str(index)].record.cached_tokens for index in range(4)]
    assert reused == [0, 96, 96, 96]


def test_a_row_stops_waiting_when_the_one_ahead_is_cancelled():
    prompt = prompts(1, seed=72, lengths=(100,))[0]
    client = Client(engine_with(512, prefill_chunk=30))
    for name in ("first", "second"):
        client.submit(name, prompt, max_tokens=6, ignore_eos=True)
    client.engine.step()
    assert [row.processed for row in client.engine.rows] == [30, 0]
    client.engine.intake.cancel("first")
    got = client.run()
    assert got["second"] == tuple(greedy(prompt, 6, stop=()))


def test_requests_that_may_not_be_stored_reuse_but_leave_nothing():
    engine = engine_with(512)
    client = Client(engine)
    client.submit("private", SHARED, max_tokens=20, ignore_eos=True, store=False)
    client.run()
    assert engine.prefixes.tokens == 0
    client.submit("public", SHARED, max_tokens=2, ignore_eos=True)
    client.run()
    held = engine.prefixes.tokens
    client.submit("reader", SHARED, max_tokens=40, ignore_eos=True, store=False)
    client.run()
    assert client.outcomes["reader"].record.cached_tokens == 48
    assert engine.prefixes.tokens == held
