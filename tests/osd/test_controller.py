"""Step costs: by rows and tokens, learned while running, robust against a slow minute."""

import math
import random

import pytest

from drafts.errors import InvalidValueError
from osd.serve.controller import LOOK_STEPS, StepCosts, why_silent

LOADED = {1: 20.0, 2: 21.0, 4: 30.0, 16: 70.0, 64: 200.0}


def ratio(costs: StepCosts, tokens: int = 4, rows: int = 1) -> float:
    return costs.ms(tokens, rows) / costs.ms(rows, rows)


def test_measured_counts_are_returned_as_measured_and_others_interpolated():
    costs = StepCosts({1: 20.0, 4: 32.0, 8: 50.0})
    assert costs.ms(1) == 20.0
    assert costs.ms(2) == pytest.approx(24.0)
    assert costs.ms(16) == pytest.approx(86.0)
    assert costs.as_dict() == {1: 20.0, 4: 32.0, 8: 50.0}


def test_a_machine_ten_times_slower_changes_the_drift_and_not_the_relative_costs():
    costs = StepCosts(LOADED)
    for step in range(60):
        costs.record(1, 4 if step % 2 else 1, 10 * (30.0 if step % 2 else 20.0))
        assert ratio(costs) == pytest.approx(1.5, rel=0.15)
    assert costs.drift == pytest.approx(10.0, rel=0.1)
    assert ratio(costs) == pytest.approx(1.5, rel=0.02)


def test_a_machine_that_slows_while_only_one_kind_of_pass_runs_is_not_mistaken_for_dear_passes():
    costs = StepCosts(LOADED)
    for slowness in (1.0, 10.0):
        for _ in range(100):
            costs.record(1, 4, slowness * 30.0)
    assert ratio(costs) == pytest.approx(1.5, rel=0.05)


def test_one_pass_ten_times_slower_hardly_changes_relative_costs():
    costs = StepCosts(LOADED)
    for step in range(40):
        costs.record(1, 4 if step % 2 else 1, 30.0 if step % 2 else 20.0)
    costs.record(1, 4, 300.0)
    for _ in range(5):
        costs.record(1, 1, 20.0)
        assert ratio(costs) == pytest.approx(1.5, rel=0.15)


def test_a_real_change_of_relative_cost_is_followed_within_twenty_steps():
    costs = StepCosts(LOADED)
    for step in range(40):
        costs.record(1, 4 if step % 2 else 1, 30.0 if step % 2 else 20.0)
    for step in range(20):
        costs.record(1, 4 if step % 2 else 1, 90.0 if step % 2 else 20.0)
    assert ratio(costs) > 3.0
    for step in range(20):
        costs.record(1, 4 if step % 2 else 1, 30.0 if step % 2 else 20.0)
    assert ratio(costs) < 2.25


def test_the_same_number_of_tokens_may_cost_differently_in_many_rows_and_in_one():
    costs = StepCosts({n: 20.0 + n for n in (1, 2, 4, 8, 16, 32, 64)})
    for _ in range(60):
        for rows, tokens, ms in ((1, 1, 21.0), (1, 8, 28.0), (8, 8, 28.0), (8, 16, 76.0)):
            costs.record(rows, tokens, ms)
    assert costs.ms(8, 1) / costs.ms(1, 1) == pytest.approx(28 / 21, rel=0.1)
    assert costs.ms(16, 8) / costs.ms(8, 8) == pytest.approx(76 / 28, rel=0.1)


def test_a_price_never_falls_with_more_tokens_and_noise_does_not_break_it():
    costs, dice = StepCosts(LOADED), random.Random(1)
    for _ in range(2000):
        rows = dice.choice((1, 3, 16, 40))
        tokens = rows * dice.randint(1, 6)
        costs.record(rows, tokens, (20.0 + tokens) * math.exp(dice.gauss(0, 0.5)))
    for rows in (1, 5, 16, 64):
        step_ms = costs.price(rows)
        row = [step_ms(tokens) for tokens in range(rows, 40 * rows)]
        assert row == sorted(row)
        assert all(0 < value < math.inf for value in row)
    assert costs.ms(4, 1) / costs.ms(1, 1) == pytest.approx(24 / 21, rel=0.5)


def test_prompts_read_in_the_same_pass_change_what_a_node_costs_and_teach_nothing():
    costs = StepCosts({1: 20.0, 2: 20.0, 100: 20.0, 200: 220.0})
    alone, beside = costs.price(1), costs.price(1, beside=150)
    assert alone(5) == pytest.approx(20.0)
    assert beside(1) == pytest.approx(20.0)
    assert beside(5) == pytest.approx(20.0 + 4 * 2.0)
    costs.record(1, 1, 500.0, beside=150)
    assert costs.drift == 1.0
    assert costs.last_ms is None


def test_the_last_pass_is_told_in_the_unit_of_prices_whatever_the_machine_does():
    costs = StepCosts(LOADED)
    for _ in range(50):
        costs.record(1, 4, 300.0)
    assert costs.last_ms == pytest.approx(costs.ms(4), rel=0.02)


@pytest.mark.parametrize("bad", [{}, {0: 1.0}, {1: 0.0}, {2: -1.0}, {1: math.nan}, {1: math.inf}])
def test_impossible_measurements_are_refused(bad):
    with pytest.raises(InvalidValueError, match="measured"):
        StepCosts(bad)


@pytest.mark.parametrize("ms", [0.0, -1.0, math.nan, math.inf])
def test_a_pass_without_a_time_teaches_nothing(ms):
    costs = StepCosts(LOADED)
    costs.record(1, 4, ms)
    assert costs.drift == 1.0


def test_a_silent_row_says_why():
    assert why_silent(0, 5, 5) == "request cap"
    assert why_silent(None, 1, 5) == "max_tokens left"
    assert why_silent(None, 5, 0) == "context left"
    assert why_silent(3, 5, 5) == ""


def serve(costs: StepCosts, true: dict[int, float], steps: int, rows: int = 1) -> int:
    """Passes as cheap as ``true`` says, with as many nodes as look cheap; how many held a proposal."""
    spoke = 0
    for _ in range(steps):
        price = costs.price(rows)
        tokens = max(n for n in (rows, 2 * rows, 4 * rows, 8 * rows) if price(n) < 1.5 * price(rows))
        spoke += tokens > rows
        costs.record(rows, tokens, true[tokens])
    return spoke


@pytest.mark.parametrize("wrong", [3.0, 70.0])
def test_a_shape_timed_at_a_bad_moment_does_not_keep_proposals_away_for_good(wrong: float):
    true = {1: 8.0, 2: 8.4, 4: 9.0, 8: 11.0}
    costs = StepCosts({count: ms * (wrong if count > 1 else 1.0) for count, ms in true.items()})
    assert serve(costs, true, LOOK_STEPS - 1) == 0
    serve(costs, true, 6 * LOOK_STEPS)
    assert serve(costs, true, 100) > 90
    assert costs.ms(8) == pytest.approx(11.0, rel=0.1)


def test_looking_costs_next_to_nothing_where_the_price_is_right():
    true = {1: 8.0, 2: 14.0, 4: 26.0, 8: 50.0}
    costs = StepCosts(true)
    assert serve(costs, true, 10 * LOOK_STEPS) <= 10
    assert costs.ms(2) == pytest.approx(14.0, rel=0.05)


def test_a_machine_that_grows_fast_at_once_is_not_mistaken_for_a_cheap_pass():
    true = {1: 8.0, 2: 14.0, 4: 26.0, 8: 50.0}
    costs = StepCosts(true)
    for _ in range(20):
        costs.record(1, 1, 8.0 * 60)
        costs.record(1, 4, 26.0 * 60)
    for _ in range(20):
        costs.record(1, 4, 26.0)
        costs.record(1, 1, 8.0)
    assert costs.as_dict() == true
