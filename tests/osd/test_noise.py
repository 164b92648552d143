import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from osd.serve.device_noise import SPAN, Wanted, prepare
from osd.serve.noise import RequestNoise, _open_uniform, fresh_seed
from osd.serve.philox import LANES, gumbel_of, gumbel_rows, philox_words, signed, uniforms

PINNED = [0.8201981478608876, 0.18924562408645496, 0.8676608148821462]
SEEDS = st.integers(-(2**63), 2**64 - 1)


@given(
    seed=SEEDS,
    choice=st.integers(0, 5),
    positions=st.lists(st.integers(0, 2**40), min_size=1, max_size=20),
    keep=st.integers(1, 4),
)
@settings(max_examples=60, deadline=None)
def test_noise_depends_on_nothing_but_seed_choice_position_and_id(seed, choice, positions, keep):
    noise = RequestNoise(seed, choice, 11, keep)
    asked = [noise.uniform(position) for position in positions]
    for position, row in zip(positions, asked, strict=True):
        assert np.array_equal(row, RequestNoise(seed, choice, 11).uniform(position))


def test_the_bits_are_pinned_so_that_a_seed_means_the_same_text_tomorrow():
    words = np.random.Philox(key=np.array([42, 1], np.uint64), counter=np.array([0, 7, 0, 0], np.uint64))
    expected = [(int(word) >> 11 | 1) / 2**53 for word in words.random_raw(5)]
    assert RequestNoise(42, 1, 5).uniform(7).tolist() == expected
    assert RequestNoise(42, 0, 3).uniform(0).tolist() == PINNED


def test_a_token_keeps_its_noise_when_the_vocabulary_is_padded():
    small, large = RequestNoise(5, 0, 20), RequestNoise(5, 0, 64)
    assert np.array_equal(small.uniform(3), large.uniform(3)[:20])
    ids = torch.tensor([1, 50])
    assert torch.equal(small.gumbel(3, ids), large.gumbel(3, ids))


def test_gumbel_is_the_double_logarithm_of_the_uniform_of_exactly_the_ids_asked():
    noise = RequestNoise(9, 2, 100)
    ids = torch.tensor([99, 0, 7, 7])
    expected = -np.log(-np.log(noise.uniform(4)[ids.numpy()]))
    got = noise.gumbel(4, ids)
    assert got.dtype == torch.float64
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-14)
    assert noise.gumbel(4, torch.empty(0, dtype=torch.int64)).shape == (0,)


def test_the_interval_is_open_at_both_ends_for_the_extreme_words():
    ends = _open_uniform(np.array([0, 2**64 - 1], np.uint64))
    assert ends.tolist() == [2.0**-53, 1 - 2.0**-53]
    assert np.isfinite(-np.log(-np.log(ends))).all()


@pytest.mark.parametrize("seed", [-(2**63), -1, 0, 2**63, 2**64 - 1])
def test_every_allowed_seed_works(seed):
    row = RequestNoise(seed, 0, 50).uniform(0)
    assert ((row > 0) & (row < 1)).all()


def test_other_seeds_choices_and_positions_give_other_noise():
    rows = [
        RequestNoise(seed, choice, 8).uniform(position)
        for seed in (0, 1, 2**32, -1)
        for choice in (0, 1)
        for position in (0, 1, 2**32)
    ]
    assert len({row.tobytes() for row in rows}) == len(rows)


@pytest.mark.parametrize("axis", ["ids", "positions", "seeds", "choices"])
def test_noise_is_uniform_and_uncorrelated_along_every_axis(axis):
    """Two tests an axis at 1e-3: with other seeds, a false alarm in 0.8 % of runs of all four."""
    n = 4000
    rows = {
        "ids": lambda: RequestNoise(3, 0, n).uniform(0),
        "positions": lambda: np.array([RequestNoise(3, 0, 1).uniform(at)[0] for at in range(n)]),
        "seeds": lambda: np.array([RequestNoise(seed, 0, 1).uniform(0)[0] for seed in range(n)]),
        "choices": lambda: np.array([RequestNoise(3, choice, 1).uniform(0)[0] for choice in range(n)]),
    }[axis]()
    cells = np.histogram(rows, bins=50, range=(0, 1))[0]
    assert stats.chisquare(cells).pvalue > 1e-3
    pairs = np.histogram2d(rows[0::2], rows[1::2], bins=8, range=((0, 1), (0, 1)))[0]
    assert stats.chisquare(pairs.ravel()).pvalue > 1e-3


def test_memory_is_bounded_by_the_positions_kept():
    noise = RequestNoise(1, 0, 10, keep=3)
    for position in range(20):
        noise.uniform(position)
    assert list(noise._rows) == [17, 18, 19]


def test_fresh_seeds_differ_and_fit_the_parameter():
    """20 equal pairs among 63-bit seeds: chance below 1e-16."""
    seeds = {fresh_seed() for _ in range(20)}
    assert len(seeds) == 20
    assert all(0 <= seed < 2**63 for seed in seeds)


# --- the same noise in torch's operators


@given(
    keys=st.lists(st.tuples(SEEDS, st.integers(0, 2**63), st.integers(0, 2**63 - 1)), min_size=1, max_size=8),
    stream=st.integers(0, 2),
    size=st.integers(1, 300),
)
@settings(max_examples=150, deadline=None)
def test_torchs_words_are_numpys_bit_for_bit(keys, stream, size):
    seeds, choices, positions = torch.tensor([[signed(value) for value in key] for key in keys]).T
    blocks = torch.arange(-(-size // LANES))
    streams = torch.full_like(positions, stream)
    found = philox_words(torch.stack((seeds, choices)), positions, streams, blocks)
    for row, (seed, choice, position) in zip(found, keys, strict=True):
        noise = RequestNoise(seed, choice, size, stream=stream)
        expected = noise._words(position, size)
        assert row.flatten()[:size].tolist() == expected.view(np.int64).tolist()
        assert uniforms(row).flatten()[:size].tolist() == noise.uniform(position).tolist()


def test_torchs_words_are_numpys_at_counters_that_carry_between_halves():
    """First and last words of a counter's range: products whose middle terms overflow 32 bits."""
    edges = [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**62, 2**63 - 2]
    blocks = torch.tensor(edges)
    keys = torch.tensor([[-1], [-1]])
    found = philox_words(keys, torch.tensor([2**63 - 1]), torch.tensor([2]), blocks)[0]
    for row, block in zip(found, edges, strict=True):
        key = np.array([2**64 - 1] * 2, np.uint64)
        counter = np.array([block, 2**63 - 1, 2, 0], np.uint64)
        expected = np.random.Philox(key=key, counter=counter).random_raw(LANES)
        assert row.tolist() == expected.view(np.int64).tolist()


def test_torchs_gumbel_noise_is_numpys_to_the_last_digits():
    """The bits of a logarithm are a library's own; eight units in the last place are far below any tie."""
    noise = RequestNoise(2**64 - 3, 2, 5001)
    keys = torch.tensor([[signed(noise.seed)], [noise.choice]])
    found = gumbel_rows(keys, torch.tensor([77]), torch.tensor([0]), 5001)[0]
    torch.testing.assert_close(found, noise.gumbel(77, torch.arange(5001)), rtol=2e-15, atol=2e-15)
    assert gumbel_of(torch.tensor([0, -1])).isfinite().all()


def test_off_the_processor_noise_is_computed_without_reading_the_ids():
    """A device that holds no values refuses to be read."""
    found = RequestNoise(5, 0, 50).gumbel(3, torch.empty(9, dtype=torch.int64, device="meta"))
    assert (found.device.type, found.dtype, found.shape) == ("meta", torch.float64, (9,))


def test_a_window_of_noise_on_the_device_is_the_noise_and_moves_with_the_text():
    noises = [RequestNoise(seed, seed % 2, 30, stream=seed % 3) for seed in range(7)]
    ids = torch.arange(30)
    for first, last in ((0, 3), (2, 9), (15, 40), (41, 41)):
        prepare([Wanted(noise.on_device, first, last) for noise in noises], 30, ids.device)
        for noise in noises:
            for position in range(first, last + 1):
                row, expected = noise.on_device.row(position), noise.gumbel(position, ids)
                torch.testing.assert_close(row, expected, rtol=2e-15, atol=2e-15)
            assert min(noise.on_device.spans) >= first // SPAN - 1


def test_a_position_is_made_once_and_again_only_for_a_larger_vocabulary():
    noise, device = RequestNoise(4, 0, 30).on_device, torch.device("cpu")
    prepare([Wanted(noise, 3, 5)], 30, device)
    kept = noise.spans[0]
    prepare([Wanted(noise, 4, 12)], 30, device)
    assert noise.spans[0] is kept
    assert list(noise.spans) == [0, 1]
    prepare([Wanted(noise, 4, 4)], 64, device)
    assert torch.equal(noise.row(4)[:30], kept[4])
