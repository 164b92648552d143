from __future__ import annotations

import pytest
import torch

from drafts.registry import Registry
from drafts.versions import VersionFollower
from osd.learn.budget import Budget
from osd.learn.config import BufferConfig, GuardConfig, LearnConfig
from osd.learn.domain import Agreement
from osd.learn.guard import Comparison, Scores, Watch
from osd.learn.scheduler import LearningScheduler
from osd.types import Event
from tests.drafts.head_rig import SHAPE
from tests.osd.learn_rig import finished, tiny_head


class Rig:
    def __init__(self, *domains: str, **options: object) -> None:
        self.head = tiny_head(*(domains or ("math",)))
        self.registry = Registry()
        self.follower = VersionFollower(self.registry, self.head.bank)
        self.events: list[Event] = []
        settings: dict[str, object] = {
            "rate": 1e-2,
            "steps": 40,
            "passes": 20.0,
            "inner_factor": 1.0,
            "bias_factor": 1.0,
            "guard": GuardConfig(min_positions=20),
            "buffer": BufferConfig(hold_back=4),
            **options,
        }
        self.now = 0.0
        self.learning = LearningScheduler(
            {"eagle": self.head},
            self.registry,
            LearnConfig(**settings),  # type: ignore[arg-type]
            self.events.append,
            self.clock,
        )

    def clock(self) -> float:
        self.now += 0.005
        return self.now

    def serve(self, seeds: range, domain: str = "math") -> None:
        for seed in seeds:
            self.learning.take(finished(seed, domain))
            self.drain()

    def drain(self) -> None:
        """Work until nothing is left, adopting new versions between slices as an engine does."""
        while self.learning.work(0.0, idle=True):
            self.follower.adopt()

    def kinds(self) -> list[str]:
        return [event.kind for event in self.events]


@pytest.mark.parametrize("learner", ["plain", "optimistic", "ensemble"])
def test_learning_while_serving_publishes_versions_that_agree_more(
    learner: str,
) -> None:
    rig = Rig(learner=learner)
    rig.serve(range(60))
    stats = rig.learning.stats()
    assert stats["published"] >= 2  # type: ignore[operator]
    assert stats["scored"] == 60
    live = rig.learning.domains["math"].live
    assert live[max(live)].mean > live[0].mean + 0.3
    current = rig.registry.current("math")
    assert current is not None
    assert torch.equal(rig.head.served("math")["down_b"], current.tensors["down_b"])


def test_a_record_is_scored_by_the_served_version_before_it_trains_anything() -> None:
    rig = Rig(update_every=8)
    rig.serve(range(20))
    domain = rig.learning.domains["math"]
    assert domain.live[0].records >= 8
    for record in domain.buffer.training:
        assert record.version in domain.live


def test_what_was_served_before_the_first_update_stays_reachable_as_version_0() -> None:
    rig = Rig()
    born = rig.head.served("math")
    rig.serve(range(12))
    kept = rig.registry.versions("math")
    assert [v.number for v in kept[:2]] == [0, 1]
    assert torch.equal(kept[0].tensors["output_b"], born["output_b"])
    assert kept[1].parent == 0


def test_a29_an_update_at_a_thousand_times_the_rate_is_never_published() -> None:
    rig = Rig(rate=1.0, clip=1e6)
    rig.serve(range(40))
    assert "update_rejected" in rig.kinds()
    current = rig.registry.current("math")
    if current is not None:
        assert all(torch.isfinite(t.float()).all() for t in current.tensors.values())


def test_a29_a_record_with_nan_is_dropped_with_an_event_and_learning_goes_on() -> None:
    rig = Rig()
    features = torch.randn(24, SHAPE.feature_width).half()
    features[22] = float("nan")
    rig.learning.take(finished(99, features=features))
    rig.drain()
    assert rig.kinds() == ["update_rejected"]
    assert rig.learning.stats()["rejected"] == 1
    rig.serve(range(30))
    assert "publish" in rig.kinds()


@pytest.mark.parametrize("learner", ["plain", "optimistic", "ensemble"])
def test_a29_a_nan_that_reaches_the_buffer_rejects_the_update_and_restores_the_learner(
    learner: str,
) -> None:
    rig = Rig(learner=learner)
    rig.serve(range(9))
    domain = rig.learning.domains["math"]
    for record in domain.buffer.training:
        record.hidden[:] = float("nan")
    published = rig.learning.counts["published"]
    domain.since_update = domain.positions_since_update = 99
    rig.drain()
    assert rig.kinds()[-1] == "update_rejected"
    assert "not finite" in rig.events[-1].reason
    assert rig.learning.counts["published"] == published
    assert domain.learner is not None
    assert domain.learner.is_finite


def test_a27_noise_published_from_outside_is_rolled_back_on_live_traffic() -> None:
    rig = Rig()
    rig.serve(range(40))
    good = rig.registry.current("math")
    assert good is not None
    noise = {n: torch.randn_like(t) if t.is_floating_point() else t for n, t in good.tensors.items()}
    rig.registry.publish("math", noise, reason="a test of the guard")
    rig.follower.adopt()
    rig.serve(range(40, 47))
    rolled = [event for event in rig.events if event.kind == "rollback"]
    assert len(rolled) == 1
    assert rolled[0].numbers["gain"] < 0
    assert torch.equal(rig.head.served("math")["down_b"], good.tensors["down_b"])


def test_a27_publishing_an_exact_copy_is_not_rolled_back() -> None:
    rig = Rig(update_every=1000)
    rig.serve(range(10))
    for reason in ("birth", "copy"):
        rig.registry.publish("math", rig.head.served("math"), reason=reason)
    rig.follower.adopt()
    rig.serve(range(10, 50))
    assert "rollback" not in rig.kinds()
    assert rig.learning.domains["math"].watch is None


def test_learning_takes_at_most_its_share_of_busy_time() -> None:
    rig = Rig(budget_share=0.05, queue_records=1000)
    for seed in range(300):
        rig.learning.take(finished(seed))
        rig.learning.work(0.02, idle=False)
    assert 0.03 < rig.learning.budget.share <= 0.05
    assert rig.learning.counts["scored"] > 10


def test_without_budget_nothing_is_done_and_idle_time_is_free() -> None:
    rig = Rig()
    rig.learning.take(finished(1))
    assert not rig.learning.work(0.0, idle=False)
    assert rig.learning.work(0.0, idle=True)
    assert rig.learning.budget.share == 0.0


def test_saved_budget_is_capped() -> None:
    budget = Budget(0.05, cap=0.1)
    budget.earn(1e6)
    assert budget.balance == 0.1
    budget.spend(0.3)
    assert not budget.allows


def test_the_budget_lives_on_what_speculation_saves() -> None:
    budget = Budget(0.05)
    for saved, share in ((None, 0.05), (0.4, 0.05), (0.02, 0.01), (0.0, 0.005), (-0.3, 0.005), (None, 0.05)):
        budget.follow(saved)
        before = budget.balance
        budget.earn(1.0)
        assert budget.balance - before == pytest.approx(share)


def test_frozen_learning_takes_nothing() -> None:
    rig = Rig(enabled=False)
    rig.serve(range(10))
    assert rig.learning.counts["scored"] == 0
    assert not rig.learning.domains


def test_a_full_queue_drops_the_oldest() -> None:
    rig = Rig(queue_records=5)
    for seed in range(20):
        rig.learning.take(finished(seed))
    assert rig.learning.stats()["queued"] == 5


def test_a_domain_without_an_expert_is_ignored() -> None:
    rig = Rig("math")
    rig.serve(range(5), domain="poetry")
    assert rig.learning.counts["scored"] == 0


def test_domains_learn_apart_and_one_that_is_dropped_is_forgotten() -> None:
    rig = Rig("math", "code")
    for seed in range(30):
        rig.serve(range(seed, seed + 1), "math")
        rig.serve(range(seed + 100, seed + 101), "code")
    assert {e.domain for e in rig.events if e.kind == "publish"} == {"math", "code"}
    rig.learning.take(finished(500, "math"))
    rig.learning.drop_domain("math")
    rig.head.bank.drop("math")
    rig.drain()
    assert set(rig.learning.domains) == {"code"}


def test_a_child_domain_inherits_the_buffer() -> None:
    rig = Rig("math", "algebra")
    rig.serve(range(12))
    rig.learning.add_domain("algebra", parent="math")
    parent, child = rig.learning.domains["math"].buffer, rig.learning.domains["algebra"].buffer
    assert len(child.training) == len(parent.training) > 0


def test_buffers_survive_a_restart() -> None:
    rig = Rig()
    rig.serve(range(12))
    again = Rig()
    again.learning.load_state(rig.learning.state())
    assert len(again.learning.domains["math"].buffer.training) == len(
        rig.learning.domains["math"].buffer.training
    )
    again.serve(range(12, 40))
    assert "publish" in again.kinds()


def test_guard_compares_paired_means() -> None:
    comparison = Comparison()
    assert not comparison.verdict(0.0).accepted
    even, half = torch.tensor([1.0, 0.0] * 5), torch.full((10,), 0.5)
    comparison.add(Scores(even, half), Scores(1.0 - even, half + 0.1))
    assert comparison.verdict(0.1 - 1e-6).accepted
    assert not comparison.verdict(0.11).accepted
    comparison.add(Scores(even, half), Scores(torch.cat((torch.zeros(1), even[1:])), half + 0.1))
    assert comparison.verdict(0.0).accepted
    for _ in range(9):
        comparison.add(Scores(even, half), Scores(torch.zeros(10), half + 0.1))
    assert comparison.verdict(0.0).hopeless
    assert not comparison.verdict(0.0).accepted
    comparison.add(Scores(even, half), Scores(even, half * float("nan")))
    verdict = comparison.verdict(-1.0)
    assert verdict.hopeless
    assert not verdict.accepted


def test_guard_refuses_what_overlaps_less_even_if_it_agrees_as_often() -> None:
    comparison = Comparison()
    same, half = torch.ones(50), torch.full((50,), 0.5)
    comparison.add(Scores(same, half), Scores(same, half - 0.01))
    assert not comparison.verdict(0.0).accepted
    assert not comparison.verdict(0.0).hopeless


def test_a_watch_seldom_cries_wolf_and_soon_sees_a_real_fall() -> None:
    """2,000 watches of 24 records without a fall: false alarms in at most 10 % (2.5 errors, 19 looks)."""
    generator = torch.Generator().manual_seed(0)
    gains = torch.randn(2000, 24, generator=generator) * 0.1

    def alarm(values: list[float]) -> bool:
        watch = Watch(1, 0, {})
        for value in values:
            watch.gains.append(value)
            if watch.has_fallen(6, 2.5):
                return True
        return False

    false = sum(alarm(row) for row in gains.tolist()) / 2000
    seen = sum(alarm(row) for row in (gains[:200] - 0.15).tolist()) / 200
    assert false <= 0.10
    assert seen >= 0.99


def test_a_domain_learns_by_settings_of_its_own() -> None:
    rig = Rig("math", "code", update_every=1000)
    eager = rig.learning.config.model_copy(
        update={"update_every": 4, "buffer": BufferConfig(hold_back=2, window=16)}
    )
    rig.learning.overrides["code"] = eager
    rig.serve(range(12), "math")
    rig.serve(range(12), "code")
    assert rig.learning.domains["code"].figures()["held_back_records"] == 6
    assert rig.learning.domains["math"].figures()["held_back_records"] == 3
    assert {event.domain for event in rig.events} == {"code"}
    assert rig.learning.counts["updates"] >= 2


def test_a_domain_may_be_kept_from_learning() -> None:
    rig = Rig("math", "code")
    rig.learning.overrides["code"] = rig.learning.config.model_copy(update={"enabled": False})
    rig.serve(range(8), "code")
    assert "code" not in rig.learning.domains


def test_a_rollback_that_cannot_be_done_is_an_event_and_learning_goes_on() -> None:
    rig = Rig()
    rig.registry.keep = 1
    rig.serve(range(40))
    good = rig.registry.current("math")
    assert good is not None
    noise = {n: torch.randn_like(t) if t.is_floating_point() else t for n, t in good.tensors.items()}
    noisy = rig.registry.publish("math", noise, reason="a test of the guard")
    rig.follower.adopt()
    rig.serve(range(40, 60))
    failed = [event for event in rig.events if event.kind == "rollback_failed"]
    assert len(failed) == 1
    assert "earlier one still kept" in failed[0].reason
    assert rig.learning.counts["rolled_back"] == 0
    current = rig.registry.current("math")
    assert current is not None
    assert current.number > noisy.number


def test_statistics_may_be_read_while_a_domain_and_a_version_are_added() -> None:
    rig = Rig()
    domain = rig.learning.domain("math")

    class Meanwhile(Agreement):
        @property
        def mean(self) -> float:
            domain.live[1] = Agreement()
            rig.learning.domain("code")
            return 0.5

    domain.live = {0: Meanwhile()}
    assert rig.learning.stats()["domains"]["math"]["agreement_by_version"] == {0: 0.5}
