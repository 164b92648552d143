"""An ensemble of rates: charged before it learns, weighted by Hedge, served as a mean."""

from __future__ import annotations

import pytest
import torch

from osd.learn.buffer import DomainBuffer
from osd.learn.config import BufferConfig, LearnConfig
from osd.learn.distill import Batch
from osd.learn.domain import DomainLearning
from osd.learn.ensemble import SHARE, EnsembleLearner
from osd.learn.learner import ExpertLearner
from osd.learn.update import Update
from tests.osd.learn_rig import finished, tiny_head
from tests.osd.test_learn_learner import TO_DRAFT, all_rows, scored, spoilt

CONFIG = LearnConfig(learner="ensemble", rate=1e-3, ensemble_rates=(0.25, 1.0, 4.0), focus="all")


def made(config: LearnConfig = CONFIG) -> tuple[EnsembleLearner, list[Batch]]:
    head = tiny_head("math")
    batches = [all_rows([scored(head, finished(n))]) for n in range(6)]
    return EnsembleLearner(head, head.served("math"), config), batches


def test_every_learner_is_the_one_that_its_rate_alone_would_be() -> None:
    ensemble, batches = made()
    for factor, learner in zip(CONFIG.ensemble_rates, ensemble.learners, strict=True):
        alone = ExpertLearner(
            ensemble.head,
            ensemble.head.served("math"),
            CONFIG.model_copy(update={"rate": factor * CONFIG.rate}),
        )
        for batch in batches:
            alone.step(batch)
            learner.step(batch)
        for name, tensor in alone.candidate().items():
            assert torch.equal(learner.candidate()[name], tensor)


def test_what_is_served_is_the_weighted_mean_and_carries_what_travels_along() -> None:
    ensemble, batches = made()
    for batch in batches:
        ensemble.step(batch)
    ensemble.weights = [0.2, 0.3, 0.5]
    found = ensemble.candidate()
    for name, tensor in ensemble.head.served("math").items():
        if tensor.is_floating_point():
            parts = [learner.candidate()[name] for learner in ensemble.learners]
            torch.testing.assert_close(found[name], 0.2 * parts[0] + 0.3 * parts[1] + 0.5 * parts[2])
        else:
            assert torch.equal(found[name], tensor)


def test_the_rate_that_learns_the_traffic_best_gets_the_weight() -> None:
    ensemble, batches = made()
    for _ in range(10):
        for batch in batches:
            ensemble.charge(batch)
            ensemble.step(batch)
    assert ensemble.weights[2] == max(ensemble.weights) > 0.5
    assert sum(ensemble.weights) == pytest.approx(1.0)
    assert min(ensemble.weights) >= SHARE / 3
    figures = ensemble.figures()
    assert figures["ensemble_weights"]["4.0"] == ensemble.weights[2]
    assert figures["ensemble_regret"] == pytest.approx(
        (ensemble.mean_loss - min(ensemble.losses)) / ensemble.charges
    )


def test_a_learner_that_was_bad_for_long_comes_back_within_a_few_charges() -> None:
    ensemble, batches = made(CONFIG.model_copy(update={"ensemble_rates": (0.001, 30.0)}))
    for _ in range(30):
        for batch in batches:
            ensemble.step(batch)
    charged = batches[0]
    good, bad = ensemble.learners[1], ensemble.learners[0]
    for _ in range(200):
        ensemble.charge(charged)
    assert ensemble.weights[1] > 0.9
    ensemble.learners = [good, bad]
    for _ in range(8):
        ensemble.charge(charged)
    assert ensemble.weights[0] > 0.9


def test_charging_changes_no_weights_of_the_experts() -> None:
    ensemble, batches = made()
    ensemble.step(batches[0])
    before = [learner.candidate() for learner in ensemble.learners]
    ensemble.charge(batches[1])
    for learner, kept in zip(ensemble.learners, before, strict=True):
        for name, tensor in learner.candidate().items():
            assert torch.equal(tensor, kept[name])


def test_a29_a_batch_that_is_not_finite_neither_charges_nor_trains() -> None:
    ensemble, batches = made()
    ensemble.step(batches[0])
    ensemble.keep()
    before, weights = ensemble.candidate(), list(ensemble.weights)
    broken = spoilt(batches[1], float("nan"))
    ensemble.charge(broken)
    assert ensemble.step(broken) is None
    assert ensemble.weights == weights
    for name, tensor in ensemble.candidate().items():
        assert torch.equal(tensor, before[name])


def test_a29_one_learner_that_leaves_the_finite_brings_all_back() -> None:
    ensemble, batches = made()
    ensemble.step(batches[0])
    ensemble.keep()
    good = ensemble.candidate()
    for group in ensemble.learners[2].optimiser.param_groups:
        group["lr"] = float("inf")
    assert ensemble.step(batches[1]) is None
    for name, tensor in ensemble.candidate().items():
        torch.testing.assert_close(tensor, good[name])


class Watching(EnsembleLearner):
    """Notes what it is charged for and trained on, in order."""

    def charge(self, batch: Batch) -> None:
        self.log.append(("charged", batch.emitted.tolist()))
        super().charge(batch)

    def accumulate(self, batch: Batch, share: float = 1.0) -> float | None:
        self.log.append(("trained", batch.emitted.tolist()))
        return super().accumulate(batch, share)


def test_a_record_is_charged_before_anything_learns_from_it_and_once() -> None:
    head = tiny_head("math")
    domain = DomainLearning(DomainBuffer(BufferConfig(hold_back=1000)))
    config = CONFIG.model_copy(update={"positions_per_step": 8, "positions_per_slice": 8})
    learner = Watching(head, head.served("math"), config)
    learner.log = []
    domain.learner = learner

    def update(numbers: range) -> list[tuple[str, list[int]]]:
        for number in numbers:
            domain.observe(scored(head, finished(number), number))
        learner.log.clear()
        run = Update(head, "math", domain, head.served("math"), 0, config, TO_DRAFT)
        while run.advance():
            pass
        return list(learner.log)

    first, second = update(range(3)), update(range(3, 5))
    for log, fresh in ((first, range(3)), (second, range(3, 5))):
        kinds = [kind for kind, _ in log]
        assert kinds == sorted(kinds)
        charged = [tokens for kind, tokens in log if kind == "charged"]
        assert charged == [list(finished(n).output_ids) for n in fresh]


def test_a_record_that_comes_in_the_middle_of_an_update_is_not_charged_afterwards() -> None:
    head = tiny_head("math")
    domain = DomainLearning(DomainBuffer(BufferConfig(hold_back=1000)))
    for number in range(3):
        domain.observe(scored(head, finished(number), number))
    run = Update(head, "math", domain, head.served("math"), 0, CONFIG, TO_DRAFT)
    for _ in range(4):
        run.advance()
    domain.observe(scored(head, finished(3), 3))
    while run.advance():
        pass
    domain.observe(scored(head, finished(4), 4))
    assert [record.number for record in domain.fresh(8)] == [4]


@pytest.mark.parametrize("rates", [(1.0,), (0.0, 1.0), (-1.0, 1.0)])
def test_rates_that_make_no_ensemble_are_refused(rates: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="ensemble_rates"):
        LearnConfig(learner="ensemble", ensemble_rates=rates)
