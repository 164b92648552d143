"""The compiled head computes what the library computes from the same eight-bit matrices."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from drafts.bank import ExpertBank
from drafts.compiled_head import MOST, CompiledHead, compiled_head, head_obstacle
from drafts.errors import InvalidValueError
from drafts.head_cache import HeadCache
from drafts.head_forward import HeadPath, LibraryHead
from drafts.kinds.base import DraftRow, Guess
from drafts.kinds.eagle import EagleSource
from drafts.native.codes import nearest_q8
from drafts.native.team import team
from drafts.trunk import HeadShape, Trunk
from tests.drafts.small_team import SmallTeam, lent

SHAPE = HeadShape(
    hidden_size=64,
    intermediate_size=96,
    heads=4,
    kv_heads=2,
    head_dim=32,
    norm_eps=1e-5,
    rope_theta=10000.0,
    feature_layers=(1, 2, 3),
    vocab_size=200,
)
IDS = torch.arange(3, 200, 2)
WINDOW = 24

pytestmark = pytest.mark.skipif(team() is None, reason="torch does not lend its threads here")


def make_trunk() -> Trunk:
    trunk = Trunk.fresh(SHAPE, IDS, seed=3)
    trunk.tensors["output_bias"].normal_(std=0.3, generator=torch.Generator().manual_seed(1))
    rounded = {
        n: nearest_q8(t) if t.ndim == 2 and n != "feature_norm" else t for n, t in trunk.tensors.items()
    }
    return Trunk(SHAPE, IDS, rounded)


def make_source(rank: int = 6, compile_passes: bool = True, window: int = WINDOW) -> EagleSource:
    """Trunk, embedding and output are drawn from seeds, and so the same each time."""
    generator = torch.Generator().manual_seed(8)
    embedding = torch.randn(SHAPE.vocab_size, SHAPE.hidden_size, generator=generator)
    output = nearest_q8(torch.randn(SHAPE.vocab_size, SHAPE.hidden_size, generator=generator))
    trunk = make_trunk()
    return EagleSource(
        trunk=trunk,
        bank=ExpertBank(trunk, rank, capacity=2),
        embedding=embedding,
        output_weight=output,
        window=window,
        time_products=False,
        compile_passes=compile_passes,
    )


def teach(source: EagleSource, domain: str, seed: int) -> None:
    source.add_domain(domain)
    tensors = source.bank.tensors(domain)
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            tensors[name] = (torch.randn(tensor.shape, generator=generator) * 0.1).half().float()
    source.bank.load(domain, tensors)


def make_row(number: int, length: int, domain: str) -> DraftRow:
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(0, SHAPE.vocab_size, (length,), generator=generator).tolist()
    features = torch.randn(300, SHAPE.feature_width, generator=generator)
    return DraftRow(f"r{number}", domain, tokens, 2, features=features)


def drafted(source: EagleSource, rows: list[DraftRow], limits: list[int]) -> list[list[list[Guess]]]:
    """Guesses by row and depth; every row goes on with its second best guess, which no argmax would take."""
    found: list[list[list[Guess]]] = [[] for _ in rows]

    def extend(index: int, guesses: Sequence[Guess]) -> int:
        found[index].append(list(guesses))
        return found[index][-1][1][0]

    source.draft(rows, limits, extend)
    return found


def agree(left: list[list[list[Guess]]], right: list[list[list[Guess]]]) -> None:
    for one, other in zip(left, right, strict=True):
        assert len(one) == len(other)
        for guesses, expected in zip(one, other, strict=True):
            assert [token for token, _ in guesses] == [token for token, _ in expected]
            assert [c for _, c in guesses] == pytest.approx([c for _, c in expected], rel=2e-3)


@pytest.fixture(scope="module")
def both() -> tuple[EagleSource, EagleSource]:
    return make_both(WINDOW)


def make_both(window: int) -> tuple[EagleSource, EagleSource]:
    sources = make_source(window=window), make_source(compile_passes=False, window=window)
    for source in sources:
        teach(source, "a", 1)
        teach(source, "b", 2)
        source.add_domain("fresh")
    assert isinstance(sources[0].forward, CompiledHead)
    assert isinstance(sources[1].forward, LibraryHead)
    return sources


@pytest.mark.parametrize("count", [1, 2, 3, 5, 16, 21, MOST + 3])
def test_guesses_are_the_librarys_over_steps_rows_and_experts(
    both: tuple[EagleSource, EagleSource], count: int
) -> None:
    domains = ["a", "b", "fresh", "unknown"]
    rows = [[make_row(100 + n, 2 + (7 * n) % 12, domains[n % 4]) for n in range(count)] for _ in both]
    limits = [1 + n % 4 for n in range(count)]
    for turn in range(4):
        found = [drafted(source, batch, limits) for source, batch in zip(both, rows, strict=True)]
        assert [len(depths) for depths in found[0]] == limits
        agree(*found)
        for batch in rows:
            for n, row in enumerate(batch):
                row.tokens += [
                    (13 * turn + n + place) % SHAPE.vocab_size for place in range(1 + (n + turn) % 3)
                ]


def test_long_prompts_windows_and_rewinding_leave_the_same_cache(
    both: tuple[EagleSource, EagleSource],
) -> None:
    rows = [[make_row(1, MOST + 40, "a"), make_row(2, 5, "b")] for _ in both]
    for turn in range(30):
        agree(*(drafted(source, batch, [3, 2]) for source, batch in zip(both, rows, strict=True)))
        for batch in rows:
            if turn % 5 < 4:
                for row in batch:
                    row.tokens += [turn + 3, turn + 50]
    caches = [batch[1].scratch["eagle"] for batch in rows]
    assert caches[0].length == caches[1].length
    assert caches[0].next_pair == caches[1].next_pair == len(rows[0][1].tokens) - 1
    torch.testing.assert_close(
        caches[0].keys[:, : caches[0].length], caches[1].keys[:, : caches[1].length], rtol=1e-3, atol=1e-3
    )


def test_prompts_that_join_leave_the_other_rows_where_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    both = make_both(window=512)
    read: list[list[int]] = []
    library = both[0].forward.library
    plain = library.read

    def counted(paths, pending):
        read.append(list(pending.counts))
        return plain(paths, pending)

    monkeypatch.setattr(library, "read", counted)
    lengths = [9, MOST + 40, 30, 2, 40, MOST + 1, MOST + 2, 5]
    rows = [[make_row(n, length, "ab"[n % 2]) for n, length in enumerate(lengths)] for _ in both]
    agree(*(drafted(source, batch, [3] * len(lengths)) for source, batch in zip(both, rows, strict=True)))
    assert read == [[MOST + 39], [MOST + 1]]
    for left, right in zip(*rows, strict=True):
        one, other = left.scratch["eagle"], right.scratch["eagle"]
        assert one.length == other.length == len(left.tokens) - 1
        torch.testing.assert_close(
            one.keys[:, : one.length], other.keys[:, : other.length], rtol=1e-3, atol=1e-3
        )


def test_a_team_smaller_than_asked_for_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    source = make_source()
    teach(source, "a", 1)
    teach(source, "b", 2)
    rows = [[make_row(n, 9 + n, "ab"[n % 2]) for n in range(5)] for _ in range(2)]
    expected = drafted(source, rows[0], [3] * 5)
    monkeypatch.setattr(source.forward, "_team", SmallTeam(lent()))
    assert drafted(source, rows[1], [3] * 5) == expected


def test_states_of_another_size_are_refused(both: tuple[EagleSource, EagleSource]) -> None:
    row = make_row(3, 6, "a")
    assert row.features is not None
    row.features = row.features[:, 1:]
    with pytest.raises(InvalidValueError, match=r"features.*\(pairs, 192\)"):
        drafted(both[0], [row], [2])
    row = make_row(4, 6, "a")
    for hidden in (torch.zeros(1, 63), torch.zeros(2, 64), torch.zeros(1, 64, dtype=torch.float64)):
        with pytest.raises(InvalidValueError, match=r"hidden.*float32 \(1, 64\)"):
            both[0].forward.step([HeadPath(0, row, HeadCache(both[0].trunk, WINDOW), 0, 2, 5)], hidden, 1)


def test_a_loaded_version_is_served_at_once_and_a_dropped_one_no_more(
    both: tuple[EagleSource, EagleSource],
) -> None:
    for seed in (11, 12):
        for source in both:
            teach(source, "later", seed)
        agree(*(drafted(source, [make_row(5, 6, "later")], [3]) for source in both))
    trained = drafted(both[0], [make_row(5, 6, "later")], [3])
    for source in both:
        source.drop_domain("later")
    plain = [drafted(source, [make_row(5, 6, "later")], [3]) for source in both]
    agree(*plain)
    assert plain[0] != trained
    for source in both:
        source.add_domain("heir", "a")
    agree(*(drafted(source, [make_row(5, 6, "heir")], [3]) for source in both))


def test_sampled_rows_see_the_same_logits(both: tuple[EagleSource, EagleSource]) -> None:
    row = make_row(9, 8, "a")
    caught = []
    for source in both:
        again = make_row(9, 8, "a")
        again.temperature = 0.7
        caught.append(drafted(source, [again], [2]))
    agree(*caught)
    assert caught[0] != drafted(both[0], [row], [2])


def test_odd_sizes_are_left_to_the_library() -> None:
    odd = HeadShape(**{**SHAPE.__dict__, "head_dim": 8})
    trunk = Trunk.fresh(odd, IDS)
    embedding = torch.zeros(SHAPE.vocab_size, SHAPE.hidden_size)
    assert "heads of 8" in str(head_obstacle(trunk, embedding))
    library = LibraryHead(trunk, ExpertBank(trunk, 2), embedding, embedding[IDS], 4, WINDOW)
    assert compiled_head(library) is None
