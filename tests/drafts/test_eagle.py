from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafts.bank import ExpertBank
from drafts.errors import CheckpointError
from drafts.head_cache import HeadCache
from drafts.kinds.base import DraftRow
from drafts.kinds.eagle import EagleSource
from drafts.proposal import EMPTY
from tests import host_reads
from tests.drafts.head_rig import IDS, matrices, random_expert, row, source, tiny_trunk


def cache_of(item: DraftRow) -> HeadCache:
    cache = item.scratch["eagle"]
    assert isinstance(cache, HeadCache)
    return cache


def test_a21_no_proposal_lies_outside_the_table() -> None:
    eagle = source()
    rows = [row(4 + n, seed=n) for n in range(30)]
    tokens = {t for p in eagle.propose(rows, [4] * 30) for t in p.tokens}
    assert len(tokens) > 5
    assert tokens <= set(IDS.tolist())


def test_limits_are_kept_and_zero_means_silence() -> None:
    eagle = source()
    proposals = eagle.propose([row(6, n) for n in range(4)], [0, 1, 3, 5])
    assert [len(p) for p in proposals] == [0, 1, 3, 5]
    assert proposals[0] is EMPTY
    for proposal in proposals:
        proposal.check()


def test_rows_without_features_or_pairs_stay_silent() -> None:
    eagle = source()
    blind = row(6, 1)
    blind.features = None
    silent = [blind, row(1, 2, prompt=1)]
    assert eagle.propose(silent, [3, 3]) == [EMPTY, EMPTY]
    assert [eagle.unread(item) for item in silent] == [0, 0]


def test_unread_is_what_the_next_call_reads_at_most_a_window() -> None:
    eagle = source(window=8)
    item = row(30, 1)
    assert eagle.unread(item) == 8
    eagle.propose([item], [2])
    assert eagle.unread(item) == 0
    item.tokens += [1, 2, 3]
    assert eagle.unread(item) == 3


@pytest.mark.parametrize("steps", [[1, 1, 1], [3, 1, 5, 2], [40]])
def test_a23_cache_equals_one_built_from_scratch(steps: list[int]) -> None:
    eagle = source()
    full = row(100, seed=9)
    part = copy.deepcopy(full)
    part.tokens = full.tokens[:10]
    for count in steps:
        eagle.propose([part], [4])
        part.tokens = full.tokens[: len(part.tokens) + count]
    again = eagle.propose([part], [4])
    fresh = copy.deepcopy(part)
    fresh.scratch = {}
    assert again[0].tokens == eagle.propose([fresh], [4])[0].tokens
    one, two = cache_of(part), cache_of(fresh)
    assert one.length == two.length == len(part.tokens) - 1
    torch.testing.assert_close(one.keys[:, : one.length], two.keys[:, : two.length], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(one.values[:, : one.length], two.values[:, : two.length], atol=1e-5, rtol=1e-5)


def test_asking_twice_without_a_commit_changes_nothing() -> None:
    eagle = source()
    item = row(12, 3)
    first = eagle.propose([item], [4])[0]
    again = eagle.propose([item], [4])[0]
    assert again.tokens == first.tokens
    assert again.confidence == pytest.approx(first.confidence, abs=1e-4)
    assert cache_of(item).length == 11


def test_a25_unequal_rows_in_a_batch_equal_each_row_alone() -> None:
    eagle = source()
    lengths = [2, 3, 17, 200, 350]
    together = eagle.propose([row(n, n) for n in lengths], [4, 0, 1, 3, 5])
    for n, limit, proposal in zip(lengths, [4, 0, 1, 3, 5], together, strict=True):
        alone = eagle.propose([row(n, n)], [limit])[0]
        assert alone.tokens == proposal.tokens
        assert alone.confidence == pytest.approx(proposal.confidence, abs=1e-4)


def test_a26_a_request_sees_nothing_of_the_one_before() -> None:
    eagle = source()
    fresh = source().propose([row(5, 1)], [4])
    eagle.propose([row(300, 2)], [4])
    assert eagle.propose([row(5, 1)], [4]) == fresh


def test_a18_a_row_that_is_not_finite_proposes_nothing_and_harms_no_neighbour() -> None:
    eagle = source()
    broken = row(8, 1)
    assert broken.features is not None
    broken.features[6] = float("nan")
    good = source().propose([row(9, 2)], [3])[0]
    proposals = eagle.propose([broken, row(9, 2)], [3, 3])
    assert proposals[0] == EMPTY
    assert proposals[1].tokens == good.tokens


def test_window_bounds_memory_and_equals_a_row_cut_to_the_window() -> None:
    eagle = source(window=20)
    item = row(380, 4)
    tokens = item.tokens
    item.tokens = tokens[:30]
    while len(item.tokens) < 380:
        eagle.propose([item], [3])
        item.tokens = tokens[: len(item.tokens) + 3]
    proposal = eagle.propose([item], [3])[0]
    assert cache_of(item).keys.shape[1] <= 2 * 64
    fresh = row(380, 4)
    assert eagle.propose([fresh], [3])[0].tokens == proposal.tokens


def test_mixed_experts_in_one_batch_equal_each_alone() -> None:
    eagle = source()
    for n, domain in enumerate(["math", "code", "sql"]):
        random_expert(eagle.bank, domain, n)
    domains = ["math", "base", "code", "math", "sql", "unheard-of"]
    together = eagle.propose([row(9 + n, n, d) for n, d in enumerate(domains)], [3] * 6)
    alone = [eagle.propose([row(9 + n, n, d)], [3])[0] for n, d in enumerate(domains)]
    assert [p.tokens for p in together] == [p.tokens for p in alone]
    trunk_only = [eagle.propose([row(9 + n, n)], [3])[0].tokens for n in range(6)]
    assert together[0].tokens != trunk_only[0]
    assert together[1].tokens == trunk_only[1]
    assert together[5].tokens == trunk_only[5]


def test_floor_ends_a_chain_where_it_is_unlikely_to_be_reached() -> None:
    eagle = source()
    item = row(9, 7)
    free = eagle.propose([item], [5])[0]
    floor = free.reach[1]
    cut = eagle.propose_priced([item], [5], [floor * 1.0001])[0]
    assert len(free) == 5
    assert len(cut) == 2
    assert free.tokens[:2] == cut.tokens


class Fixed:
    """Noise from a table: position p and id x get ``table[p, x]``."""

    def __init__(self, table: torch.Tensor) -> None:
        self.table = table

    def gumbel(self, position: int, token_ids: torch.Tensor) -> torch.Tensor:
        return self.table[position, token_ids]


def test_sampled_rows_perturb_with_the_noise_of_their_output_position() -> None:
    eagle = source()
    table = torch.zeros(20, 50, dtype=torch.float64)
    wanted = [13, 7, 21]
    for depth, token in enumerate(wanted):
        table[6 + depth, token] = 1e6
    item = row(9, 7, prompt=3)
    item.temperature, item.noise = 0.8, Fixed(table)
    assert list(eagle.propose([item], [3])[0].tokens) == wanted


def test_a_target_of_another_size_is_refused() -> None:
    trunk = tiny_trunk()
    embedding, output = matrices()
    with pytest.raises(CheckpointError, match="embedding"):
        EagleSource(
            trunk=trunk,
            bank=ExpertBank(trunk),
            embedding=embedding[:40],
            output_weight=output,
            time_products=False,
        )


def test_a_trunk_from_a_file_proposes_as_before_and_other_layers_are_refused(tmp_path: Path) -> None:
    trunk = tiny_trunk()
    trunk.save(tmp_path / "t.safetensors")
    embedding, output = matrices()
    loaded = EagleSource.from_file(
        tmp_path / "t.safetensors", embedding=embedding, output_weight=output, feature_layers=[1, 2, 3]
    )
    assert loaded.propose([row(9, 1)], [3])[0].tokens == source().propose([row(9, 1)], [3])[0].tokens
    with pytest.raises(CheckpointError, match="layers"):
        EagleSource.from_file(
            tmp_path / "t.safetensors", embedding=embedding, output_weight=output, feature_layers=[1, 2]
        )


def test_a21_experts_survive_a_file_and_a_fresh_source(tmp_path: Path) -> None:
    eagle = source()
    random_expert(eagle.bank, "math", 1)
    for domain, tensors in eagle.state().items():
        save_file(tensors, tmp_path / f"{domain}.safetensors")
    again = source()
    again.load_state({"math": load_file(tmp_path / "math.safetensors")})
    one = eagle.propose([row(9, n, "math") for n in range(20)], [4] * 20)
    assert again.propose([row(9, n, "math") for n in range(20)], [4] * 20) == one
    assert one != eagle.propose([row(9, n) for n in range(20)], [4] * 20)


def test_swapping_an_expert_needs_no_new_cache() -> None:
    """Case A27: deltas never touch keys or values, so a version switch leaves caches valid."""
    eagle = source()
    random_expert(eagle.bank, "math", 1)
    item = row(30, 5, "math")
    eagle.propose([item], [4])
    random_expert(eagle.bank, "math", 2)
    fresh = row(30, 5, "math")
    one, two = eagle.propose([item], [4])[0], eagle.propose([fresh], [4])[0]
    assert one.tokens == two.tokens
    torch.testing.assert_close(
        cache_of(item).keys[:, :29], cache_of(fresh).keys[:, :29], atol=1e-5, rtol=1e-5
    )


# --- waits for an accelerator, counted on a processor


@pytest.mark.parametrize("sampled", [(), (1,), (0, 1, 2)], ids=["greedy", "mixed", "sampled"])
def test_the_host_reads_once_a_depth_whatever_the_rows_are(sampled: tuple[int, ...]) -> None:
    def rows() -> list[DraftRow]:
        made = [row(9 + 3 * n, seed=n) for n in range(3)]
        for n in sampled:
            made[n].temperature, made[n].noise = 0.9, Fixed(torch.randn(60, 50, dtype=torch.float64))
        return made

    torch.manual_seed(0)
    expected = source(compile_passes=False).propose(rows(), [4, 2, 3])
    torch.manual_seed(0)
    watched = rows()
    for item in watched:
        assert item.features is not None
        item.features = host_reads.watched(item.features)
    assert source(compile_passes=False).propose(watched, [4, 2, 3]) == expected
    assert host_reads.counts == {"tolist": 4}


def test_a_broken_row_falls_silent_and_its_sampled_neighbour_is_guessed_as_alone() -> None:
    eagle = source(compile_passes=False)
    random_expert(eagle.bank, "ill", 1)
    eagle.bank._stacked["output_bias"][eagle.bank.index("ill")] = float("nan")
    noise = Fixed(torch.randn(40, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(2)))
    items = [row(9, 1, "ill"), row(12, 2), row(9, 3, "ill")]
    for item in items:
        item.temperature, item.noise = 0.9, noise
    items[2].temperature, items[2].noise = 0.0, None
    alone = row(12, 2)
    alone.temperature, alone.noise = 0.9, noise
    found = eagle.propose(items, [3, 3, 3])
    assert [len(proposal) for proposal in found] == [0, 3, 0]
    assert found[1].tokens == eagle.propose([alone], [3])[0].tokens
