"""The mixture: who proposes is decided by what each source earns, on evidence for all of them."""

from collections.abc import Sequence

import pytest

from drafts.errors import InvalidValueError
from drafts.kinds.base import DraftRow, MemorySource, NeuralSource
from drafts.mixture import Mixture
from drafts.proposal import EMPTY, Price


class Scripted(MemorySource):
    """Always guesses the same tokens with the same confidence."""

    name = "scripted"

    def __init__(self, tokens: Sequence[int], confidence: float) -> None:
        self.tokens, self.confidence, self.learned = tokens, confidence, 0

    def guesses(self, row, path):
        if list(path) != list(self.tokens[: len(path)]) or len(path) >= len(self.tokens):
            return []
        return [(self.tokens[len(path)], self.confidence)]

    def finish(self, row):
        self.learned += 1


class Head(NeuralSource):
    """A neural source that counts how often it runs."""

    name = "head"

    def __init__(self, tokens: Sequence[int], confidence: float) -> None:
        self.tokens, self.confidence, self.calls = tokens, confidence, 0

    def draft(self, rows, limits, extend):
        self.calls += 1
        for index, limit in enumerate(limits):
            for token in self.tokens[:limit]:
                if extend(index, [(token, self.confidence)]) is None:
                    break


def row(domain: str = "math", **extra) -> DraftRow:
    return DraftRow("r", domain, [1, 2, 3], 3, **extra)


def price(fixed_k: int | None = None, rows: int = 1) -> Price:
    return Price(rows, lambda n: 20.0 if n <= 2 else 20.0 + 5.0 * (n - 2), fixed_k)


def steep(tokens: int) -> float:
    return 10.0 + 10.0 * tokens


def run(mixture: Mixture, truth: Sequence[int], steps: int, domain: str = "math", cost=None):
    """``steps`` greedy rounds whose verified continuation is always ``truth``."""
    asking = price() if cost is None else Price(1, cost, None)
    proposals = []
    for _ in range(steps):
        request = row(domain)
        proposal = mixture.propose([request], [4], asking)[0]
        matched = len(proposal.path(truth))
        emitted = truth[: matched + 1]
        request.tokens.extend(emitted)
        mixture.observe([request], [proposal], [emitted])
        proposals.append(proposal)
    return proposals


def test_the_source_that_is_right_wins_over_the_one_that_is_sure():
    liar, honest = Scripted([9, 9, 9], 0.95), Scripted([5, 6, 7], 0.5)
    mixture = Mixture({"liar": liar, "honest": honest})
    assert mixture.propose([row()], [1], price(fixed_k=1))[0].tokens == (9,)
    proposals = run(mixture, [5, 6, 7, 8], 120)
    assert all(proposal.tokens[:1] == (5,) for proposal in proposals[-20:])
    assert mixture.propose([row()], [1], price(fixed_k=1))[0].tokens == (5,)


def test_sources_that_disagree_are_verified_side_by_side():
    mixture = Mixture({"a": Scripted([5, 6], 0.6), "b": Scripted([7, 8], 0.6)})
    proposals = [run(mixture, truth, 1)[0] for _ in range(60) for truth in ([5, 6, 1], [7, 8, 1])]
    wide = [proposal for proposal in proposals[-20:] if not proposal.is_chain]
    assert wide
    assert {"a", "b"} <= set(wide[-1].sources)


def test_without_trees_a_proposal_is_one_chain_as_long_as_pays():
    sources = {"a": Scripted([7, 8], 0.9), "b": Scripted([9, 4], 0.9)}
    by_trees = {trees: Mixture(dict(sources), trees=trees) for trees in (True, False)}
    found = {
        trees: mixture.propose([row()], [4], Price(1, lambda n: 20.0 + 0.1 * n, None))[0]
        for trees, mixture in by_trees.items()
    }
    assert not found[True].is_chain
    assert found[False].is_chain
    assert 0 < len(found[False]) <= 2
    assert by_trees[False].propose([row()], [4], Price(1, steep, None))[0].tokens == ()


def test_a_fixed_k_gives_a_chain():
    mixture = Mixture({"a": Scripted([5, 6], 0.6), "b": Scripted([7, 8], 0.6)})
    proposal = mixture.propose([row()], [8], price(fixed_k=4))[0]
    assert proposal.is_chain
    assert len(proposal) == 2


def test_forced_nodes_give_trees_that_would_not_pay() -> None:
    sources = {"a": Scripted([5, 6, 3], 0.6), "b": Scripted([7, 8], 0.6)}
    dear = Price(1, lambda tokens: 1000.0 * tokens, None)
    assert not any(len(proposal) for proposal in run(Mixture(dict(sources)), [5, 6, 1], 3, cost=dear.step_ms))
    mixture = Mixture(dict(sources), forced_nodes=4)
    found = [mixture.propose([row()], [4], dear)[0] for _ in range(3)]
    assert {len(proposal) for proposal in found} == {4}
    assert all(proposal.branch_nodes for proposal in found)
    assert len(Mixture(dict(sources), forced_nodes=2).propose([row()], [4], dear)[0]) == 2
    assert Mixture(dict(sources), forced_nodes=4).propose([row()], [0], dear) == [EMPTY]


def test_a_tree_has_no_more_nodes_than_the_most() -> None:
    sources = {"a": Scripted([5, 6, 3], 0.9), "b": Scripted([7, 8], 0.9)}
    free = Price(1, lambda n: 20.0 + 1e-6 * n, None)
    sizes = {
        most: len(Mixture(dict(sources), max_nodes=most).propose([row()], [4], free)[0]) for most in (2, 9)
    }
    assert sizes == {2: 2, 9: 5}


def test_a_source_that_was_not_verified_is_scored_too():
    mixture = Mixture({"chosen": Scripted([9], 0.9), "idle": Scripted([5], 0.2)})
    request = row()
    proposals = mixture.propose([request], [1], price(fixed_k=1))
    assert proposals[0].tokens == (9,)
    mixture.observe([request], proposals, [[5]])
    assert mixture.describe("math")["idle"]["right_per_step"] == 1.0
    assert mixture.describe("math")["idle"]["chosen"] == 0


def test_domains_keep_their_own_scores():
    mixture = Mixture({"a": Scripted([5], 0.5)})
    run(mixture, [5, 5], 100, "good")
    run(mixture, [6, 6], 100, "bad")
    assert mixture.describe("good")["a"]["right_per_step"] == 1.0
    assert mixture.describe("bad")["a"]["right_per_step"] == 0.0


def test_a_useless_neural_source_is_hardly_asked_but_can_come_back():
    head = Head([9, 9], 0.9)
    mixture = Mixture({"head": head})
    run(mixture, [5, 6, 7], 60, cost=steep)
    before = head.calls
    run(mixture, [5, 6, 7], 200, cost=steep)
    assert head.calls - before <= 10
    head.tokens = [5, 6]
    run(mixture, [5, 6, 7], 3000, cost=steep)
    before = head.calls
    run(mixture, [5, 6, 7], 50, cost=steep)
    assert head.calls - before >= 45


def test_fixed_k_is_proposed_whatever_it_costs():
    mixture = Mixture({"a": Scripted([5, 6, 7, 8, 9], 0.01)})
    proposal = mixture.propose([row()], [8], price(fixed_k=4))[0]
    assert proposal.tokens == (5, 6, 7, 8)


def test_fixed_k_zero_proposes_nothing():
    mixture = Mixture({"a": Scripted([5], 0.99)})
    assert mixture.propose([row()], [8], price(fixed_k=0)) == [EMPTY]


def test_a_hopeless_proposal_is_trimmed_to_what_is_free():
    mixture = Mixture({"a": Scripted([5, 6, 7, 8], 0.1)})
    run(mixture, [1, 1, 1, 1, 1], 60)
    assert len(mixture.propose([row()], [4], price())[0]) <= 1


def test_a_domain_uses_only_its_own_sources():
    mixture = Mixture({"a": Scripted([5], 0.9), "b": Scripted([6], 0.99)}, {"math": ("a",)})
    assert mixture.propose([row()], [1], price())[0].tokens == (5,)
    assert mixture.names("other") == ("a", "b")


@pytest.mark.parametrize("store", [True, False])
def test_only_storable_requests_teach(store):
    source = Scripted([5], 0.9)
    mixture = Mixture({"a": source})
    mixture.finish(row(store=store))
    assert source.learned == int(store)


def test_a_frozen_mixture_learns_no_text():
    source = Scripted([5], 0.9)
    Mixture({"a": source}, learn=False).finish(row())
    assert source.learned == 0


def test_what_lies_beyond_the_emitted_tokens_is_not_counted_against_a_source():
    mixture = Mixture({"a": Scripted([5, 6, 7, 8], 0.9)})
    request = row()
    mixture.propose([request], [4], price(fixed_k=4))
    mixture.observe([request], [EMPTY], [[5]])
    assert mixture.describe("math")["a"]["right_per_step"] == 1.0


def test_a_dropped_domain_is_forgotten_even_while_its_requests_still_run():
    mixture = Mixture({"a": Scripted([5, 6], 0.9)})
    run(mixture, [5, 6, 7], 20)
    assert mixture.describe("math")["a"]["spoke"] == 20
    request = row()
    proposals = mixture.propose([request], [4], price())
    mixture.drop_domain("math")
    mixture.observe([request], proposals, [[5]])
    assert mixture.describe("math")["a"]["spoke"] == 0
    mixture.add_domain("math")
    run(mixture, [5, 6, 7], 3)
    assert mixture.describe("math")["a"]["spoke"] == 3


def test_a_neural_source_is_not_credited_with_what_another_one_earns():
    good, idle = Head([5, 6, 7], 0.9), Head([9, 9, 9], 0.9)
    good.name, idle.name = "good", "idle"
    mixture = Mixture({"good": good, "idle": idle})
    run(mixture, [5, 6, 7, 8], 400, cost=steep)
    before = good.calls, idle.calls
    run(mixture, [5, 6, 7, 8], 100, cost=steep)
    assert good.calls - before[0] == 100
    assert idle.calls - before[1] <= 5


def test_only_memories_and_neural_sources_can_propose():
    with pytest.raises(InvalidValueError, match="MemorySource"):
        Mixture({"a": object()})
