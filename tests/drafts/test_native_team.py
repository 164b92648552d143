import numba
import numpy as np
import pytest
import torch
from numba import types

from drafts.native.calls import call0, call0_int
from drafts.native.team import team
from tests.drafts.small_team import lent

pytestmark = pytest.mark.skipif(team() is None, reason="torch does not lend its threads here")
THREAD, BARRIER, SIZE, FIRST = 0, 1, 2, 3
PLACES = 8


@numba.cfunc(types.void(types.CPointer(types.int64)))
def note(a):
    """Each thread counts itself in at its place, waits, and notes the size of the team and what it sees."""
    thread = call0_int(a[THREAD])
    a[FIRST + thread] += 1
    call0(a[BARRIER])
    seen = 0
    for place in range(PLACES):
        if a[FIRST + place] > 0:
            seen += 1
    a[FIRST + PLACES + thread] = 100 * call0_int(a[SIZE]) + seen


def run(threads: int) -> tuple[list[int], list[int]]:
    table = np.zeros(FIRST + 2 * PLACES, dtype=np.int64)
    table[THREAD], table[BARRIER], table[SIZE] = lent().thread, lent().barrier, lent().size
    lent().run(note.address, table.ctypes.data, threads)
    taken, seen = table[FIRST:].reshape(2, PLACES).tolist()
    return taken, seen


@pytest.mark.parametrize("threads", [1, 2, 3, 4])
def test_as_many_threads_run_as_are_asked_for_each_once(threads: int) -> None:
    rest = [0] * (PLACES - threads)
    for _ in range(20):
        taken, seen = run(threads)
        assert taken == [1] * threads + rest
        assert seen == [101 * threads] * threads + rest


def test_the_team_changes_its_size_and_torch_keeps_its_own() -> None:
    before = torch.get_num_threads()
    x = torch.randn(256, 256)
    expected = x @ x
    for threads in (2, 1, 3, 2):
        assert sum(run(threads)[0]) == threads
        assert torch.equal(x @ x, expected)
    assert torch.get_num_threads() == before


def test_the_team_is_one() -> None:
    assert team() is team()
