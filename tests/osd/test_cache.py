import pytest
import torch

from drafts.errors import BusyError, IntegrityError, InvalidValueError
from osd.serve.cache import SlotCache


def make(slots: int = 3, features: int = 5) -> SlotCache:
    return SlotCache(layers=2, slots=slots, kv_heads=2, max_length=10, head_dim=4, feature_width=features)


def write(cache: SlotCache, row: int, count: int, mark: float) -> None:
    """Fill the next ``count`` entries of a row with ``mark + place``."""
    start = cache.lengths[row]
    cache.reserve(row, start, count)
    marks = mark + torch.arange(start, start + count).float()
    for pair in cache.pairs:
        pair[:, row, :, start : start + count] = marks[None, None, :, None]
    if cache.features is not None:
        cache.features[row, start : start + count] = marks[:, None]


def marks(cache: SlotCache, row: int, length: int) -> list[list[float]]:
    """What a row holds, read from every tensor, so that a forgotten one shows."""
    found = [pair[half, row, 1, :length, 2].tolist() for pair in cache.pairs for half in (0, 1)]
    if cache.features is not None:
        found.append(cache.features[row, :length, 3].tolist())
    assert all(values == found[0] for values in found)
    return found[0]


def test_rows_are_handed_out_in_order_and_run_out() -> None:
    cache = make()
    assert [cache.acquire() for _ in range(3)] == [0, 1, 2]
    with pytest.raises(BusyError, match="3 cache slots"):
        cache.acquire()
    cache.check()


def test_release_moves_the_last_row_into_the_hole() -> None:
    cache = make()
    for row, count in enumerate((4, 2, 6)):
        cache.acquire()
        write(cache, row, count, 100.0 * row)
        cache.commit(row, count)
    assert cache.release(0) == 2
    assert cache.lengths == [6, 2]
    assert marks(cache, 0, 6) == [200.0 + i for i in range(6)]
    assert marks(cache, 1, 2) == [100.0, 101.0]
    assert cache.release(1) is None
    assert (cache.active, cache.free) == (1, 2)
    cache.check()


def test_a10_commit_keeps_a_chain_by_length_and_the_rest_is_overwritten() -> None:
    cache = make()
    row = cache.acquire()
    write(cache, row, 4, 0.0)
    cache.commit(row, 2)
    write(cache, row, 3, 50.0)
    cache.commit(row, 5)
    assert marks(cache, row, 5) == [0.0, 1.0, 52.0, 53.0, 54.0]


def test_commit_path_gathers_the_kept_nodes_of_a_tree() -> None:
    cache = make()
    row = cache.acquire()
    write(cache, row, 2, 0.0)
    cache.commit(row, 2)
    write(cache, row, 6, 10.0)  # offsets 0..5 hold 12..17
    cache.commit_path(row, 2, [0, 2, 5])
    assert cache.lengths == [5]
    assert marks(cache, row, 5) == [0.0, 1.0, 12.0, 14.0, 17.0]
    cache.check()


def test_commit_path_of_a_prefix_only_moves_the_length() -> None:
    cache = make()
    row = cache.acquire()
    write(cache, row, 4, 0.0)
    cache.commit_path(row, 0, [0, 1])
    assert cache.lengths == [2]
    assert marks(cache, row, 2) == [0.0, 1.0]


@pytest.mark.parametrize("kept", [[0, 0], [2, 1], [-1, 0], [0, 4]])
def test_commit_path_refuses_impossible_paths(kept: list[int]) -> None:
    cache = make()
    row = cache.acquire()
    write(cache, row, 4, 0.0)
    with pytest.raises(IntegrityError):
        cache.commit_path(row, 0, kept)


def test_a_pass_must_start_at_the_committed_length_and_fit() -> None:
    cache = make()
    row = cache.acquire()
    write(cache, row, 3, 0.0)
    cache.commit(row, 3)
    with pytest.raises(IntegrityError, match="starts at 2, committed length is 3"):
        cache.reserve(row, 2, 1)
    with pytest.raises(IntegrityError, match="exceed"):
        cache.reserve(row, 3, 8)
    with pytest.raises(IntegrityError, match="not active"):
        cache.reserve(1, 0, 1)


def test_commit_beyond_what_was_written_is_refused() -> None:
    cache = make()
    row = cache.acquire()
    write(cache, row, 3, 0.0)
    with pytest.raises(IntegrityError, match="commit to 4, written so far 3"):
        cache.commit(row, 4)


def test_a26_a_reused_row_starts_empty() -> None:
    cache = make()
    row = cache.acquire()
    write(cache, row, 8, 0.0)
    cache.commit(row, 8)
    cache.release(row)
    assert cache.acquire() == row
    assert cache.lengths == [0]
    with pytest.raises(IntegrityError):
        cache.commit(row, 1)


@pytest.mark.parametrize("broken", [0, 1])
def test_a18_nan_of_a_failed_request_does_not_stay_in_the_rows(broken: int) -> None:
    cache = make(slots=2)
    for row in range(2):
        cache.acquire()
        write(cache, row, 6, float("nan") if row == broken else 1.0)
        cache.commit(row, 6)
    cache.release(0)
    cache.release(0)
    for pair in cache.pairs:
        assert bool(torch.isfinite(pair).all())


def test_no_features_are_kept_when_none_are_asked_for() -> None:
    assert make(features=0).features is None


@pytest.mark.parametrize("field", ["slots", "max_length"])
def test_sizes_below_one_are_refused_by_name(field: str) -> None:
    sizes = {"slots": 1, "max_length": 1, field: 0}
    with pytest.raises(InvalidValueError, match=field):
        SlotCache(layers=1, kv_heads=1, head_dim=2, **sizes)


def test_check_names_both_sides_of_a_broken_book() -> None:
    cache = make()
    cache.acquire()
    cache.lengths[0] = 5
    with pytest.raises(IntegrityError, match="length 5, written 0"):
        cache.check()
