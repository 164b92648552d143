"""Optimistic updates: two sequences, hints, and the same care for what is not finite."""

from __future__ import annotations

import pytest
import torch

from osd.learn.config import LearnConfig
from osd.learn.distill import Batch
from osd.learn.head import EagleHead
from osd.learn.learner import ExpertLearner
from osd.learn.optimistic import HintError, OptimisticLearner
from tests.osd.learn_rig import finished, tiny_head
from tests.osd.test_learn_learner import all_rows, scored, spoilt


def made(rate: float = 1e-3) -> tuple[EagleHead, OptimisticLearner, list[Batch]]:
    head = tiny_head("math")
    batches = [all_rows([scored(head, finished(n))]) for n in range(6)]
    config = LearnConfig(learner="optimistic", rate=rate)
    return head, OptimisticLearner(head, head.served("math"), config), batches


def weights(learner: ExpertLearner) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in learner.masters.items()}


def test_the_first_step_is_a_plain_one_and_what_is_served_lies_as_far_ahead_again() -> None:
    head, learner, batches = made()
    plain = ExpertLearner(head, head.served("math"), LearnConfig(rate=1e-3))
    start = weights(plain)
    plain.step(batches[0])
    learner.step(batches[0])
    for name, tensor in weights(plain).items():
        torch.testing.assert_close(learner.masters[name].detach(), tensor)
        torch.testing.assert_close(learner.candidate()[name], 2 * tensor - start[name])


def test_the_gradient_is_taken_at_the_look_ahead_weights_and_applied_behind_them() -> None:
    _, learner, batches = made()
    learner.step(batches[0])
    behind, ahead = weights(learner), learner.candidate()
    learner.accumulate(batches[1])
    for name, tensor in learner.masters.items():
        torch.testing.assert_close(tensor.detach(), ahead[name])
    learner.apply()
    moved = learner.candidate()
    for name, tensor in learner.masters.items():
        torch.testing.assert_close(moved[name], 2 * tensor.detach() - behind[name])


def test_slices_of_a_step_look_ahead_once() -> None:
    _, whole, batches = made()
    _, cut, _ = made()
    for learner in (whole, cut):
        learner.step(batches[0])
    whole.step(batches[1])
    for _ in range(2):
        cut.accumulate(batches[1], 0.5)
    cut.apply()
    for name, tensor in whole.candidate().items():
        torch.testing.assert_close(cut.candidate()[name], tensor, atol=1e-6, rtol=1e-4)


def test_a_candidate_in_the_middle_of_a_step_is_that_of_its_start() -> None:
    _, learner, batches = made()
    learner.step(batches[0])
    before = learner.candidate()
    learner.accumulate(batches[1])
    for name, tensor in learner.candidate().items():
        assert torch.equal(tensor, before[name])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a29_a_batch_that_is_not_finite_changes_neither_weights_nor_hint(value: float) -> None:
    _, learner, batches = made()
    learner.step(batches[0])
    before = learner.candidate()
    assert learner.step(spoilt(batches[1], value)) is None
    for name, tensor in learner.candidate().items():
        assert torch.equal(tensor, before[name])


def test_a29_weights_that_leave_the_finite_come_back_with_their_hint() -> None:
    _, learner, batches = made()
    learner.step(batches[0])
    learner.step(batches[1])
    learner.keep()
    good = learner.candidate()
    for group in learner.optimiser.param_groups:
        group["lr"] = float("inf")
    assert learner.step(batches[2]) is None
    for name, tensor in learner.candidate().items():
        assert torch.equal(tensor, good[name])


def test_steps_that_repeat_are_hinted_well_and_steps_that_turn_are_not() -> None:
    _, same, batches = made(rate=1e-4)
    for _ in range(40):
        same.step(batches[0])
    assert same.hint_error.value is not None
    assert same.hint_error.value < 0.1
    _, turning, batches = made(rate=3e-2)
    for number in range(40):
        turning.step(batches[number % 6])
    assert turning.hint_error.value is not None
    assert turning.hint_error.value > 2 * same.hint_error.value


def test_nothing_moved_has_no_error() -> None:
    assert HintError().value is None
