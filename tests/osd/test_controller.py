"""Step costs: interpolated, refined slowly, robust against a slow minute."""

import pytest

from drafts.errors import InvalidValueError
from osd.serve.controller import StepCosts


def test_measured_counts_are_returned_as_measured_and_others_interpolated():
    costs = StepCosts({1: 20.0, 4: 32.0, 8: 50.0})
    assert costs.ms(1) == 20.0
    assert costs.ms(2) == pytest.approx(24.0)
    assert costs.ms(16) == pytest.approx(86.0)


def test_a_machine_ten_times_slower_changes_the_drift_and_not_the_shape():
    costs = StepCosts({1: 20.0, 2: 21.0, 4: 30.0})
    for _ in range(200):
        for tokens in (1, 2, 4):
            costs.record(tokens, 10 * {1: 20.0, 2: 21.0, 4: 30.0}[tokens])
    assert costs.drift == pytest.approx(5.0, rel=0.05)
    assert costs.ms(4) / costs.ms(1) == pytest.approx(1.5, rel=0.02)


def test_a_wrong_shape_is_learned_while_running():
    costs = StepCosts({1: 20.0, 4: 100.0})
    for _ in range(400):
        costs.record(1, 20.0)
        costs.record(4, 30.0)
    assert costs.ms(4) / costs.ms(1) < 2.0


@pytest.mark.parametrize("bad", [{}, {0: 1.0}, {1: 0.0}, {2: -1.0}])
def test_impossible_measurements_are_refused(bad):
    with pytest.raises(InvalidValueError, match="measured"):
        StepCosts(bad)
