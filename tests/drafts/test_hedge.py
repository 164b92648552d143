"""Hedge with sleeping experts: the best one awake is found, and sleeping costs nothing."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from drafts.hedge import SleepingHedge


def test_experts_start_equal():
    assert SleepingHedge().weights(["a", "b"]) == {"a": 0.5, "b": 0.5}


def test_the_best_expert_gets_nearly_all_weight():
    hedge = SleepingHedge(keep=1.0)
    rng = random.Random(0)
    for _ in range(300):
        hedge.see({"good": float(rng.random() < 0.7), "bad": float(rng.random() < 0.3)})
    assert hedge.weights(["good", "bad"])["good"] > 0.99


def test_an_expert_asleep_neither_gains_nor_loses():
    hedge = SleepingHedge()
    for _ in range(40):
        hedge.see({"a": 1.0, "b": 0.0, "sleeper": 0.6})
    before = hedge.state()["sleeper"]
    for _ in range(40):
        hedge.see({"a": 0.0, "b": 1.0})
    assert hedge.state()["sleeper"] == before


def test_an_expert_that_is_seldom_awake_but_then_right_is_trusted_when_awake():
    hedge = SleepingHedge(keep=1.0)
    for step in range(400):
        gains = {"usual": 0.4}
        if step % 8 == 0:
            gains["special"] = 0.9
        hedge.see(gains)
    assert hedge.weights(["usual", "special"])["special"] > 0.9


def test_a_shift_is_followed_in_fewer_rounds_than_came_before_it():
    hedge = SleepingHedge()
    for _ in range(1000):
        hedge.see({"old": 1.0, "new": 0.0})
    rounds = 0
    while hedge.weights(["old", "new"])["new"] < 0.5:
        hedge.see({"old": 0.0, "new": 1.0})
        rounds += 1
        assert rounds < 300


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.integers(2, 12))
def test_regret_against_every_expert_stays_of_the_order_of_the_root_of_its_rounds(seed: int, count: int):
    """Luo & Schapire, theorem 3: at most sqrt(3 C (ln N + ln B + …)); 6 sqrt(n) is generous for n = 400."""
    rng = random.Random(seed)
    hedge = SleepingHedge(keep=1.0)
    means = [rng.random() for _ in range(count)]
    regret, rounds = [0.0] * count, [0] * count
    for _ in range(400):
        awake = [i for i in range(count) if rng.random() < 0.7] or [0]
        weights = hedge.weights(awake)
        gains = {i: float(rng.random() < means[i]) for i in awake}
        mean = sum(weights[i] * gains[i] for i in awake)
        for i in awake:
            regret[i] += gains[i] - mean
            rounds[i] += 1
        hedge.see(gains)
    assert all(r <= 6.0 * n**0.5 for r, n in zip(regret, rounds, strict=True) if n)
