from __future__ import annotations

import json

import pytest

from drafts.config import NgramConfig
from drafts.cross import HALF_LIFE, POSITIONS, CrossAcceptance
from drafts.kinds.base import DraftRow
from drafts.kinds.ngram import NgramSource


def test_a_cell_is_the_share_of_positions_that_were_right() -> None:
    cross = CrossAcceptance()
    cross.add("math", "code", 4, 16)
    cross.add("math", "code", 12, 16)
    cross.add("code", "code", 16, 16)
    figures = cross.figures()
    assert figures["math"]["code"]["agreement"] == pytest.approx(0.5, abs=0.01)
    assert figures["math"]["code"]["positions"] == pytest.approx(32, abs=0.2)
    assert figures["code"]["code"]["agreement"] == 1.0
    assert "math" not in figures["math"]


def test_what_was_seen_a_half_life_ago_counts_half() -> None:
    cross = CrossAcceptance()
    cross.add("math", "code", 1000, 1000)
    for _ in range(int(HALF_LIFE)):
        cross.add("math", "code", 0, 1)
    cell = cross.figures()["math"]["code"]
    assert cell["agreement"] * cell["positions"] == pytest.approx(500)
    assert cell["positions"] < 500 + HALF_LIFE / 0.69


def test_cells_are_bounded_and_the_least_known_goes_first() -> None:
    cross = CrossAcceptance(most=9)
    for expert in range(3):
        for domain in range(3):
            cross.add(str(expert), str(domain), 1, 10 + expert)
    cross.add("9", "9", 1, 1)
    cells = {(e, d) for e, row in cross.figures().items() for d in row}
    assert len(cells) == 9
    assert ("9", "9") in cells
    assert sum(expert == "0" for expert, _ in cells) == 2


def test_a_domain_that_is_gone_leaves_no_row_and_no_column() -> None:
    cross = CrossAcceptance()
    for expert, domain in (("a", "a"), ("a", "b"), ("b", "a"), ("b", "b")):
        cross.add(expert, domain, 1, 2)
    cross.forget("b")
    assert set(cross.figures()) == {"a"}
    assert set(cross.figures()["a"]) == {"a"}


def test_counts_survive_as_json_but_not_those_of_unknown_domains() -> None:
    cross, again = CrossAcceptance(), CrossAcceptance()
    for expert, domain in (("a", "a"), ("a", "b"), ("c", "a")):
        cross.add(expert, domain, 1, 2)
    again.load_state(json.loads(json.dumps(cross.state())), ["a", "b"])
    assert again.figures() == {"a": cross.figures()["a"]}


def test_every_other_domain_gets_its_turn_and_never_the_same_one() -> None:
    cross = CrossAcceptance(seed=3)
    chosen = {cross.another("b", ["a", "b", "c", "d"]) for _ in range(60)}
    assert chosen == {"a", "c", "d"}
    assert cross.another("b", ["b"]) is None
    assert cross.sample(5) == [0, 1, 2, 3, 4]
    assert len(set(cross.sample(500))) == POSITIONS
    assert any(cross.sample(500) != cross.sample(500) for _ in range(3))


def finished(domain: str, answer: list[int], store: bool = True) -> DraftRow:
    return DraftRow("r", domain, [1, 2, 3, *answer], 3, store=store)


def test_a_memory_knows_its_own_domains_text_and_the_others_do_not() -> None:
    source = NgramSource(NgramConfig())
    for domain in ("math", "code"):
        source.add_domain(domain)
    texts = {"math": [4, 5, 6, 7] * 5, "code": [8, 9, 10, 11] * 5, "base": [12, 13, 14, 15] * 5}
    for _ in range(30):
        for domain, text in texts.items():
            source.finish(finished(domain, text))
    figures = source.cross.figures()
    for draft in texts:
        for domain in texts:
            agreement = figures[draft][domain]["agreement"]
            assert agreement > 0.8 if draft == domain else agreement < 0.2


def test_a_memory_is_asked_before_it_learns_the_text() -> None:
    source = NgramSource(NgramConfig())
    source.add_domain("math")
    source.finish(finished("math", [4, 5, 6, 7, 8, 9]))
    assert source.cross.figures()["math"]["math"] == {"agreement": 0.0, "positions": 6.0}


def test_text_that_may_not_be_stored_and_shared_memories_are_not_compared() -> None:
    source = NgramSource(NgramConfig())
    source.add_domain("math")
    source.finish(finished("math", [4, 5, 6], store=False))
    source.finish(finished("gone", [4, 5, 6]))
    shared = NgramSource(NgramConfig(shared=True))
    shared.add_domain("math")
    shared.finish(finished("math", [4, 5, 6]))
    assert source.cross.figures() == shared.cross.figures() == {}
    source.finish(finished("math", [4, 5, 6]))
    source.drop_domain("math")
    assert source.cross.figures() == {}
