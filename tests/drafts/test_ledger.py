from __future__ import annotations

import json

from drafts.ledger import Ledger
from drafts.proposal import Proposal

TREE = Proposal((10, 11, 12, 13), (-1, 0, 1, 0), ("a+b", "a", "b", "b"), (0.9, 0.8, 0.7, 0.1))
"""A chain 10, 11, 12 and a branch 13; two sources name the first node."""


def ledger() -> Ledger:
    book = Ledger()
    book.add("math", {"a": 2, "b": 1}, TREE, [0, 1])
    book.add("math", {"a": 0, "b": 0}, TREE, [])
    return book


def test_share_and_gain_follow_from_the_nodes_a_source_named() -> None:
    a, b = ledger().figures("math", "a"), ledger().figures("math", "b")
    assert (a["proposed_tokens"], a["accepted_tokens"], a["accepted_alone"]) == (4, 2, 1)
    assert (b["proposed_tokens"], b["accepted_tokens"], b["accepted_alone"]) == (6, 1, 0)
    assert (a["share"], b["share"]) == (1.0, 0.5)
    assert (a["gain"], b["gain"]) == (0.5, 0.0)
    assert (a["acceptance_rate"], a["right_per_step"], a["steps"]) == (0.5, 1.0, 2)
    assert ledger().figures("code", "a")["share"] == 0.0


def test_counters_survive_and_rows_of_an_older_form_begin_anew() -> None:
    book = Ledger()
    book.load_state(json.loads(json.dumps([*ledger().state(), ["code", "a", 9, 9, 9, 9, 9]])))
    assert book.figures("math", "a") == ledger().figures("math", "a")
    assert book.figures("code", "a")["spoke"] == 0
    book.forget("math")
    assert book.state() == []
