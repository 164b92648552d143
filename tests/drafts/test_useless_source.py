"""After fifty steps a source that is never right costs next to nothing."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drafts.mixture import Mixture
from drafts.neural_pricing import REFRESH_STEPS
from drafts.proposal import Price
from drafts.regret import PROBE_EVERY
from tests.drafts.mixture_rig import Clock, Oracle, Useless, serve

STEPS = 50


def price(node_ms: float) -> Price:
    return Price(1, lambda n: 5.0 + node_ms * n)


def text(seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(900) for _ in range(4000)]


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 1000),
    call_ms=st.floats(0.3, 20.0),
    node_ms=st.floats(0.5, 2.0),
    every=st.sampled_from([0, 2, 3, 5]),
    confidence=st.floats(0.3, 1.0),
)
def test_a_useless_neural_source_is_asked_once_in_refresh_steps(seed, call_ms, node_ms, every, confidence):
    clock, answer = Clock(), text(seed)
    head = Useless(clock, call_ms, confidence)
    mixture = Mixture({"good": Oracle(answer, 0.6, every), "useless": head}, clock=clock)
    serve(mixture, answer, STEPS, price(node_ms))
    before = head.calls
    proposals = serve(mixture, answer, 5 * REFRESH_STEPS, price(node_ms))
    calls = head.calls - before
    assert calls <= -(-len(proposals) // REFRESH_STEPS) + 1
    assert sum(any("useless" in name for name in p.sources) for p in proposals) <= calls


@settings(max_examples=25, deadline=None)
@given(call_ms=st.floats(1.0, 20.0), node_ms=st.floats(0.5, 2.0), confidence=st.floats(0.3, 1.0))
def test_a_useless_neural_source_alone_is_asked_no_more_either(call_ms, node_ms, confidence):
    clock, answer = Clock(), text(0)
    head = Useless(clock, call_ms, confidence)
    mixture = Mixture({"useless": head}, clock=clock)
    serve(mixture, answer, STEPS, price(node_ms))
    before = head.calls
    proposals = serve(mixture, answer, 5 * REFRESH_STEPS, price(node_ms))
    assert head.calls - before <= -(-len(proposals) // REFRESH_STEPS) + 1


@pytest.mark.parametrize("alone", [True, False])
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1000), node_ms=st.floats(0.5, 2.0), confidence=st.floats(0.1, 1.0))
def test_a_useless_cheap_source_is_in_no_tree(alone, seed, node_ms, confidence):
    answer = text(seed)
    sources = {"garbage": Oracle(answer, confidence, shift=1)}
    if not alone:
        sources["good"] = Oracle(answer, 0.6, every=5)
    mixture = Mixture(sources, clock=Clock())
    serve(mixture, answer, STEPS, price(node_ms))
    proposals = serve(mixture, answer, 200, price(node_ms))
    assert not any("garbage" in name.split("+") for proposal in proposals for name in proposal.sources)


class Counted(Oracle):
    """Counts how often it is asked."""

    asked = 0

    def guesses(self, row, path):
        self.asked += 1
        return super().guesses(row, path)


def test_a_useless_memory_is_not_even_asked_but_comes_back_when_it_is_right():
    answer = text(3)
    memory = Counted(answer, 0.6, shift=1)
    mixture = Mixture({"good": Oracle(answer, 0.6, every=3), "memory": memory}, clock=Clock())
    serve(mixture, answer, 100, price(0.5))
    assert mixture.regret.useless("math") == {"memory"}
    memory.asked = 0
    steps = len(serve(mixture, answer, 320, price(0.5)))
    assert memory.asked <= 8 * (steps // PROBE_EVERY + 1)
    memory.shift = 0
    serve(mixture, answer, 500, price(0.5))
    serve(mixture, answer, 500, price(0.5))
    assert mixture.regret.useless("math") == frozenset()
    assert any("memory" in name for p in serve(mixture, answer, 20, price(0.5)) for name in p.sources)


def test_a_fixed_k_asks_every_source():
    answer = text(3)
    mixture = Mixture({"memory": Oracle(answer, 0.6, shift=1)}, clock=Clock())
    serve(mixture, answer, 100, price(0.5))
    fixed = Price(1, lambda n: 5.0 + n, 2)
    assert [len(p) for p in serve(mixture, answer, 3, fixed)] == [2, 2, 2]
