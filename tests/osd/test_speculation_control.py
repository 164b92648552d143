"""k follows load and acceptance, on simulated costs and acceptance and without a clock."""

import random

import pytest

from tests.osd.pacing_rig import Sim


def bandwidth_bound(rows: int, tokens: int) -> float:
    return 20.0 + 0.5 * tokens


def loaded(rows: int, tokens: int) -> float:
    """Nodes are nearly free beside one row, and as dear as rows beside sixteen."""
    return 20.0 + tokens if rows <= 2 else 5.0 + 8.0 * tokens


def dear(rows: int, tokens: int) -> float:
    return 20.0 * tokens


def settled(acceptance: float, cost=bandwidth_bound, steps: int = 40, **changes) -> Sim:
    sim = Sim(cost, acceptance, **changes)
    sim.memory.confidence = 0.8
    sim.nodes(steps)
    return sim


def test_k_follows_the_load_within_twenty_steps():
    sim = settled(0.8, loaded, load=lambda n: 20.0 + n)
    assert sum(sim.nodes(10)) / 10 >= 4
    sim.nodes(20, rows=16)
    assert sum(sim.nodes(10, rows=16)) / 10 < 0.3
    assert sum(sim.nodes(20)[-5:]) / 5 >= 4


def test_k_falls_within_twenty_steps_once_drafts_turn_useless():
    sim = settled(0.85, lambda rows, tokens: 20.0 + 2.0 * tokens)
    before = sum(sim.nodes(10)) / 10
    sim.acceptance["d"] = 0.0
    after = sum(sim.nodes(20)[-3:]) / 3
    assert before >= 4
    assert after <= 1


def test_k_rises_within_twenty_steps_once_drafts_turn_good():
    sim = settled(0.0, lambda rows, tokens: 20.0 + 2.0 * tokens, steps=60)
    assert sum(sim.nodes(10)) / 10 <= 1
    sim.acceptance["d"] = 0.9
    assert sum(sim.nodes(25)[-5:]) / 5 >= 4


def test_high_acceptance_is_no_reason_to_speculate_where_nodes_are_dear():
    sim = settled(0.9, dear, steps=20)
    assert sum(sim.nodes(20)) == 0
    because = sim.mixture.speculation("d")["plain_because"]
    assert set(because) <= {"verifying does not pay", "asking does not pay"}


def test_low_acceptance_is_no_reason_against_it_where_passes_are_flat():
    sim = Sim(lambda rows, tokens: 20.0 + 0.01 * tokens, 0.15)
    sim.memory.confidence = 0.2
    assert min(sim.nodes(60)[20:]) >= 1


def test_where_nothing_pays_all_drafting_together_costs_less_than_one_percent():
    sim = settled(0.5, dear, head=True, steps=60)
    drafting = sim.clock.ms
    passes = sim.pass_ms
    sim.nodes(1000)
    assert sim.clock.ms - drafting <= 0.01 * (sim.pass_ms - passes)
    assert sim.memory.rows_asked > 60


def test_where_asking_is_dear_most_steps_ask_nobody():
    """Sixteen rows, of which the allowance covers one in a while; everyone has a turn."""
    sim = Sim(dear, 0.5)
    sim.memory.ask_ms = 10.0
    sim.nodes(20, rows=16)
    asked = sim.memory.rows_asked
    sim.nodes(300, rows=16)
    assert sim.memory.rows_asked - asked <= 16 * 300 * 0.01 * 20.0 / 10.0
    assert sim.memory.rows_asked > asked
    assert "asking does not pay" in sim.mixture.speculation("d")["plain_because"]


def test_a_domain_that_pays_is_asked_while_another_rests():
    sim = Sim(lambda rows, tokens: 20.0 + 5.0 * tokens, 0.9)
    sim.acceptance["bad"] = 0.0
    sim.memory.confidence, sim.memory.ask_ms = 0.8, 1.0
    for _ in range(80):
        sim.step(2, ["d", "bad"])
    good, bad = sim.mixture.speculation("d"), sim.mixture.speculation("bad")
    assert good["nodes"] > 2
    assert bad["nodes"] < 1
    assert bad["plain_because"]["asking does not pay"] > 0.5
    assert "asking does not pay" not in good["plain_because"]


@pytest.mark.parametrize("acceptance", [0.3, 0.6, 0.85])
def test_choices_come_close_to_the_best_fixed_chain(acceptance):
    def cost(rows: int, tokens: int) -> float:
        return 20.0 + 3.0 * tokens

    sim = Sim(cost, acceptance)
    sim.memory.confidence = acceptance
    sim.nodes(60)
    best = max(
        sum(acceptance**i for i in range(k + 1)) / (cost(1, 1 + k) + sim.memory.ask_ms * k) for k in range(9)
    )
    assert sim.rate(400) > 0.9 * best


def test_noise_of_the_machine_costs_no_more_than_speculation_gains():
    """Passes are now and then ten times slower, and the whole machine is for a while."""
    dice = random.Random(3)
    sim = Sim(
        lambda rows, tokens: 20.0 + 3.0 * tokens,
        0.8,
        noise=lambda: 10.0 if dice.random() < 0.05 else dice.uniform(1.0, 1.3),
    )
    sim.memory.confidence = 0.8
    sim.nodes(60)
    quiet = sum(sim.nodes(60)) / 60
    sim.noise = lambda: 10.0
    slow = sum(sim.nodes(60)) / 60
    assert quiet >= 3
    assert slow >= 3


def test_expected_and_realised_gain_agree_with_what_happened():
    sim = Sim(lambda rows, tokens: 20.0 + 2.0 * tokens, 0.8)
    sim.memory.confidence = 0.8
    sim.nodes(400)
    told = sim.mixture.speculation("d")
    truth = sim.tokens / sim.spent_ms * 22.0
    assert told["steps"] == 400
    assert told["realised"]["tokens_per_step"] == pytest.approx(sim.tokens / 400)
    assert told["realised"]["speedup"] == pytest.approx(truth, rel=0.05)
    assert told["expected"]["speedup"] == pytest.approx(truth, rel=0.1)
    assert told["k"] == told["nodes"] > 3
    assert sum(told["steps_by_nodes"].values()) == 400
    assert told["acceptance_by_depth_now"][0] == pytest.approx(0.8, abs=0.25)
