"""How stored prefixes are copied: every bit, from and to the right places, however scattered the blocks."""

import pytest
import torch

from osd.serve import prefix
from osd.serve.cache import SlotCache
from osd.serve.prefix import BLOCK, PrefixStore
from tests.osd.test_prefix import filled, opened

BITS = {2: torch.int16, 4: torch.int32}
KINDS = [torch.float32, torch.bfloat16, torch.float16]


def all_bits(cache: SlotCache) -> None:
    """Fill a cache with every pattern of bits, NaN of all kinds and negative zeros among them."""
    generator = torch.Generator().manual_seed(3)
    for tensor in (*cache.pairs, cache.features):
        kind = BITS[tensor.element_size()]
        ends = torch.iinfo(kind)
        tensor.view(kind).copy_(torch.randint(ends.min, ends.max, tensor.shape, generator=generator))


def row_bits(cache: SlotCache, row: int, length: int) -> list[torch.Tensor]:
    tensors = [pair[:, row, :, :length] for pair in cache.pairs] + [cache.features[row, :length]]
    return [tensor.clone().view(BITS[tensor.element_size()]) for tensor in tensors]


@pytest.fixture(params=["processor", "elsewhere"])
def by(request, monkeypatch):
    """How a store copies: in slices of bytes, or by indices as on an accelerator."""

    def make(cache: SlotCache, tokens: int) -> PrefixStore:
        if request.param == "processor":
            return PrefixStore(cache, tokens)
        monkeypatch.setattr(prefix, "_plain", lambda tensor: tensor)
        store = PrefixStore(cache, tokens)
        monkeypatch.setattr(store, "_sliced", False)
        return store

    return make


@pytest.mark.parametrize("dtype", KINDS)
def test_blocks_in_many_pieces_and_layers_of_unlike_shapes_keep_every_bit(by, dtype):
    cache = SlotCache(
        layers=3, slots=3, kv_heads=[1, 3, 2], max_length=96, head_dim=[8, 4, 6], feature_width=5, dtype=dtype
    )
    all_bits(cache)
    store = by(cache, 6 * BLOCK)
    first, second, other = (list(range(begin, begin + 5 * BLOCK)) for begin in (0, 100, 200))
    row = opened(cache, 5 * BLOCK)
    for count in (1, 2, 3):
        store.keep(row, first[: count * BLOCK])
        store.keep(row, second[: count * BLOCK])
    before = row_bits(cache, row, 5 * BLOCK)
    assert store.match([*second, 0]) == [1, 3, 5]
    reader = cache.acquire()
    untouched = row_bits(cache, reader, 96)
    assert store.load(reader, store.match([*second, 0])) == 3 * BLOCK
    for got, want, past in zip(row_bits(cache, reader, 96), before, untouched, strict=True):
        assert torch.equal(got[..., : 3 * BLOCK, :], want[..., : 3 * BLOCK, :])
        assert torch.equal(got[..., 3 * BLOCK :, :], past[..., 3 * BLOCK :, :])
    store.keep(row, other)
    assert store.load(cache.acquire(), store.match([*other, 0])) == 5 * BLOCK
    for got, want, kept in zip(
        row_bits(cache, 2, 5 * BLOCK), before, row_bits(cache, row, 5 * BLOCK), strict=True
    ):
        assert torch.equal(got, want)
        assert torch.equal(kept, want)


def test_whatever_was_kept_and_given_up_a_loaded_text_is_the_one_that_was_asked_for(by):
    cache = filled(slots=2, room=8 * BLOCK)
    store = by(cache, 11 * BLOCK)
    room = store.bytes
    chance = torch.Generator().manual_seed(4)

    def draw(least: int, most: int) -> int:
        return int(torch.randint(least, most + 1, (1,), generator=chance))

    def write(row: int, start: int, text: list[int]) -> None:
        """What a pass over ``text`` would leave: at every place something that all before it decides."""
        sums = torch.tensor(text).cumsum(0)[start:].float()
        for pair in cache.pairs:
            pair[:, row, :, start : len(text)] = sums[:, None]
        cache.features[row, start : len(text)] = sums[:, None]

    found = 0
    texts = [[0]]
    for _ in range(150):
        base = texts[draw(0, len(texts) - 1)]
        text = [*base[: draw(0, len(base))], *(draw(1, 9999) for _ in range(draw(1, 3 * BLOCK)))]
        texts = [*texts[-5:], text[: 8 * BLOCK]]
        text = texts[-1]
        row = cache.acquire()
        loaded = store.load(row, store.match(text))
        sums = torch.tensor(text[:loaded]).cumsum(0).float()
        for tensor in (*(pair[:, row] for pair in cache.pairs), cache.features[row]):
            assert torch.equal(tensor[..., :loaded, :], sums[:, None].expand_as(tensor[..., :loaded, :]))
        found += loaded > 0
        cache.reserve(row, loaded, len(text) - loaded)
        write(row, loaded, text)
        cache.commit(row, len(text))
        for end in (draw(1, len(text)), len(text)):
            store.keep(row, text[:end])
            store.check()
            assert len(store.match([*text[:end], 0])) == end // BLOCK
        cache.release(row)
    assert found > 30
    assert store.tokens == 11 * BLOCK
    assert store.bytes == room


def test_a_text_takes_the_place_of_one_given_up_in_one_piece_and_what_it_continues_stays():
    cache = filled()
    store = PrefixStore(cache, 4 * BLOCK)
    row = opened(cache, 5 * BLOCK)
    store.keep(row, list(range(4 * BLOCK)))
    text = list(range(100, 100 + 5 * BLOCK))
    store.keep(row, text[:BLOCK])
    assert store.match([*text, 0]) == [3]
    store.keep(row, text)
    assert store.match([*text, 0]) == [3, 0, 1, 2]
    store.check()
