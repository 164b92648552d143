"""The base domain's expert learns from all, serves who has no better one, and keeps away from who has."""

from __future__ import annotations

import torch

from drafts.registry import Registry
from osd.learn.buffer import DomainBuffer
from osd.learn.config import BufferConfig
from osd.learn.generalist import Generalist, joined
from tests.osd.learn_rig import finished
from tests.osd.test_learn_buffer import record
from tests.osd.test_learn_scheduler import Rig

NAMES = ("base", "math", "sql")


def rig(**options: object) -> Rig:
    found = Rig(*NAMES, **options)
    for name in NAMES:
        found.registry.publish(name, found.head.bank.tensors(name), reason="born")
    found.follower.adopt()
    return found


def same(registry: Registry, one: str, other: str) -> bool:
    first, second = registry.current(one), registry.current(other)
    assert first is not None
    assert second is not None
    return all(torch.equal(tensor, second.tensors[name]) for name, tensor in first.tensors.items())


def serve(found: Rig, turns: int, shifts: dict[str, int], start: int = 0) -> None:
    for seed in range(start, start + turns):
        for domain, shift in shifts.items():
            found.learning.take(finished(seed, domain, shift=shift))
            found.drain()


def served_agreement(found: Rig, domain: str) -> float:
    live = found.learning.domain(domain).live
    return live[max(live)].mean


def test_a_domain_that_saw_nothing_is_served_with_what_others_taught() -> None:
    found = rig()
    serve(found, 24, {"math": 3})
    base, sql = found.registry.current("base"), found.registry.current("sql")
    assert base is not None
    assert sql is not None
    assert base.number > 0
    assert sql.number > 0
    assert same(found.registry, "base", "sql")
    assert sql.reason == f"version {base.number} of base, until its own is better on what it holds back"
    assert found.learning.domains["base"].buffer.arrived == 0
    found.serve(range(100, 101), "sql")
    assert served_agreement(found, "sql") > 0.5


def test_experts_that_are_better_at_home_are_kept() -> None:
    found = rig()
    serve(found, 48, {"math": 3, "sql": 11})
    for name, other in (("math", "sql"), ("sql", "math")):
        assert served_agreement(found, name) > 0.7
        assert not same(found.registry, name, other)
        assert not same(found.registry, name, "base")
    number = found.registry.current("math").number  # type: ignore[union-attr]
    found.learning._changed("base")
    found.drain()
    assert found.registry.current("math").number == number  # type: ignore[union-attr]


def test_a_generalist_that_grew_better_takes_over_from_an_own_expert_and_only_by_what_is_held_back() -> None:
    found = rig()
    serve(found, 12, {"math": 3})
    own = found.registry.current("math")
    assert own is not None
    found.registry.publish("math", {name: 0 * t for name, t in own.tensors.items()}, reason="spoilt by hand")
    found.learning.domain("math").challenged = True
    serve(found, 8, {"math": 3}, start=50)
    taken = found.registry.current("math")
    assert taken is not None
    assert found.learning.counts["followed"] >= 1
    assert served_agreement(found, "math") > 0.5


def test_a_version_that_somebody_else_published_is_not_replaced() -> None:
    found = rig()
    born = found.registry.current("sql")
    assert born is not None
    found.registry.publish("sql", born.tensors, reason="imported")
    serve(found, 24, {"math": 3})
    current = found.registry.current("sql")
    assert current is not None
    assert current.reason == "imported"


def test_without_a_generalist_everybody_learns_alone() -> None:
    found = rig(generalist=False)
    serve(found, 24, {"math": 3})
    assert found.registry.current("base").number == 0  # type: ignore[union-attr]
    assert found.registry.current("sql").number == 0  # type: ignore[union-attr]
    assert found.learning.counts["followed"] == 0


def test_what_a_domain_purges_teaches_the_generalist_no_more() -> None:
    found = rig()
    serve(found, 6, {"math": 3, "sql": 11})
    found.learning.purge("sql")
    read = joined(found.learning._read_by("base"))
    kept = found.learning.domains["math"].buffer
    assert len(read.training) + len(read.held) == len(kept.training) + len(kept.held) > 0


def test_followers_survive_a_restart() -> None:
    found = rig()
    serve(found, 24, {"math": 3})
    other = rig()
    other.learning.load_history(found.learning.history())
    assert other.learning.domains["sql"].followed == found.learning.domains["sql"].followed > 0


def test_a_joined_buffer_numbers_by_age_and_keeps_what_is_held_back_apart() -> None:
    config = BufferConfig(hold_back=2, held_records=3)
    buffers = [DomainBuffer(config), DomainBuffer(config)]
    for number in range(6):
        for side, buffer in enumerate(buffers):
            buffer.add(record(number, created=10.0 * number + side))
    found = joined(buffers)
    found.check()
    assert [r.created for r in found.training] == sorted(r.created for b in buffers for r in b.training)
    assert [r.created for r in found.held] == sorted(r.created for b in buffers for r in b.held)[-3:]
    assert [r.number for r in found.training] == list(range(len(found.training)))
    assert all(r.number < 6 for r in buffers[0].training)


def test_each_follower_is_told_once_and_a_gone_domain_not_at_all() -> None:
    generalist = Generalist("base")
    served = {"base": 2, "math": 0, "sql": 0, "law": 4, "base.model": 1, "math.model": 0}
    generalist.changed("base", served, {})
    generalist.changed("base", served, {})
    generalist.forget("math")
    assert [generalist.next_behind(), generalist.next_behind()] == ["sql", None]
