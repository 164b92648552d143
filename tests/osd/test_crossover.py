"""Which way of computing a pass is taken from where on."""

import pytest

from osd.serve.crossover import crossover


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ({1: (1.0, 5.0), 8: (4.0, 5.0), 16: (8.0, 6.0), 64: (30.0, 10.0)}, 16),
        ({1: (1.0, 2.0), 64: (30.0, 31.0)}, None),
        ({1: (3.0, 2.0), 64: (30.0, 20.0)}, 1),
        ({4: (1.0, 1.0)}, None),
        ({}, None),
    ],
)
def test_the_second_way_is_taken_from_where_it_wins(times, expected: int | None) -> None:
    assert crossover(times) == expected


@pytest.mark.parametrize("spoiled", [1, 4, 8, 16, 32, 64])
@pytest.mark.parametrize("way", [0, 1])
def test_one_spoiled_reading_does_not_decide(spoiled: int, way: int) -> None:
    true = {count: (float(count), 5.0 + 0.3 * count) for count in (1, 2, 4, 8, 16, 32, 64)}
    assert crossover(true) == 8
    readings = list(true[spoiled])
    readings[way] *= 3
    assert crossover({**true, spoiled: (readings[0], readings[1])}) in (4, 8, 16, 32)
