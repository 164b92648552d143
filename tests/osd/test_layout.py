import pytest
import torch

from drafts.errors import IntegrityError
from osd.serve.cache import SlotCache
from osd.serve.layout import LONG_ROW, PassLayout, ancestors, depths, visible
from osd.serve.target import PassRow

CPU = torch.device("cpu")


def layout(*rows: PassRow) -> PassLayout:
    cache = SlotCache(layers=1, slots=8, kv_heads=1, max_length=4096, head_dim=2)
    for slot in range(8):
        cache.acquire()
        start = next((row.start for row in rows if row.slot == slot), 0)
        cache.reserve(slot, 0, start)
        cache.commit(slot, start)
    return PassLayout(cache, rows, CPU)


def test_a25_positions_are_counted_per_row_and_by_depth_in_a_tree() -> None:
    packed = layout(PassRow(1, 7, [1, 2, 3]), PassRow(0, 2, [4, 5, 6, 7], (-1, -1, 1)))
    assert packed.positions.tolist() == [7, 8, 9, 2, 3, 3, 4]
    assert packed.places.tolist() == [7, 8, 9, 2, 3, 4, 5]
    assert packed.slots.tolist() == [1, 1, 1, 0, 0, 0, 0]


def test_logit_rows_follow_the_rows_given() -> None:
    packed = layout(
        PassRow(0, 0, [1, 2, 3], logits_from=3), PassRow(1, 0, [4, 5], logits_from=1), PassRow(2, 0, [6])
    )
    assert packed.offsets == [0, 0, 1]
    assert packed.logit_tokens is not None
    assert packed.logit_tokens.tolist() == [4, 5]
    assert layout(PassRow(0, 0, [1, 2])).logit_tokens is None


def test_a_tree_token_sees_the_text_its_ancestors_and_itself() -> None:
    assert depths(PassRow(0, 9, [0] * 5, (-1, 0, -1, 2))) == [0, 1, 2, 1, 2]
    assert ancestors((-1, 0, -1, 2)).int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 0, 0, 1, 0],
        [1, 0, 0, 1, 1],
    ]
    mask = visible([PassRow(0, 2, [1, 2, 3], (-1, -1)), PassRow(1, 0, [1])], 3, 6)
    assert mask[0].int().tolist() == [[1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 0, 0], [1, 1, 1, 0, 1, 0]]
    assert mask[1].int().tolist() == [[1, 0, 0, 0, 0, 0]] * 3


def test_a_chain_given_as_a_tree_has_the_chains_mask() -> None:
    chain = PassRow(0, 3, [1, 2, 3, 4])
    tree = PassRow(0, 3, [1, 2, 3, 4], (-1, 0, 1))
    assert torch.equal(visible([chain], 4, 7), visible([tree], 4, 7))


def test_window_distance_counts_depth_not_place() -> None:
    (group,) = layout(PassRow(0, 2, [1, 2, 3, 4], (-1, -1, 1))).groups()
    assert group.distances()[0, 3].tolist() == [4, 3, 2, 1, 1, 0]


def sizes(*rows: PassRow) -> list[list[int]]:
    return [[row.slot for row in group.rows] for group in layout(*rows).groups()]


def test_long_rows_and_gaps_split_the_attention_groups() -> None:
    long = [1] * (LONG_ROW + 1)
    assert sizes(PassRow(0, 5, [1]), PassRow(1, 9, [1, 2]), PassRow(2, 0, [1])) == [[0, 1, 2]]
    assert sizes(PassRow(2, 5, [1]), PassRow(0, 9, [1, 2])) == [[0], [2]]
    assert sizes(PassRow(0, 5, [1]), PassRow(1, 0, long), PassRow(2, 0, [1])) == [[0], [1], [2]]


def test_rows_of_very_unequal_length_do_not_pad_each_other() -> None:
    assert sizes(PassRow(0, 3000, [1]), PassRow(1, 20, [1]), PassRow(2, 30, [1])) == [[0], [1, 2]]
    assert sizes(PassRow(0, 300, [1]), PassRow(1, 20, [1]), PassRow(2, 200, [1])) == [[0, 1, 2]]


@pytest.mark.parametrize("row", [PassRow(0, 0, []), PassRow(0, 0, [1, 2], ()), PassRow(0, 0, [1], (-1,))])
def test_malformed_rows_are_refused(row: PassRow) -> None:
    with pytest.raises(IntegrityError):
        layout(row)
