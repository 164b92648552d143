"""Other domains' experts are scored on what was scored anyway; a merge is judged on both domains' records."""

from __future__ import annotations

import json

import pytest
import torch

from drafts.errors import InvalidValueError, UnknownNameError
from osd.learn.config import BufferConfig
from osd.learn.merge import merge_domains
from tests.osd.learn_rig import finished
from tests.osd.test_learn_scheduler import Rig


def specialised() -> Rig:
    """Two domains, of which only math has learned; both are of one language."""
    rig = Rig("math", "code", "sql")
    for name in ("math", "code"):
        rig.registry.publish(name, rig.head.served(name), reason="born")
    rig.serve(range(60))
    return rig


def test_a_learned_expert_shows_on_the_other_domains_text_and_on_its_own() -> None:
    rig = specialised()
    rig.serve(range(100, 140), "code")
    figures = rig.learning.cross.matrix.figures()
    assert figures["math"]["math"]["agreement"] > figures["code"]["math"]["agreement"] + 0.3
    assert figures["math"]["code"]["agreement"] > 0.5
    assert set(figures) == {"math", "code"}


def test_one_other_expert_is_asked_at_a_few_positions_of_every_record() -> None:
    rig = Rig("math", "code", update_every=1000)
    for name in ("math", "code"):
        rig.registry.publish(name, rig.head.served(name), reason="born")
    rig.learning.take(finished(1, output=40))
    rig.drain()
    cells = rig.learning.cross.matrix.figures()
    assert cells["math"]["math"]["positions"] == 40
    assert cells["code"]["math"]["positions"] == 16
    assert cells["code"]["math"]["agreement"] == pytest.approx(cells["math"]["math"]["agreement"], abs=0.4)


def test_without_budget_nothing_is_compared() -> None:
    rig = Rig("math", "code")
    for name in ("math", "code"):
        rig.registry.publish(name, rig.head.served(name), reason="born")
    rig.learning.take(finished(1))
    for _ in range(10):
        rig.learning.work(0.0, idle=False)
    assert rig.learning.cross.matrix.figures() == {}


def test_the_matrix_survives_with_the_history_and_a_dropped_domain_leaves_it() -> None:
    rig = specialised()
    saved = json.loads(json.dumps(rig.learning.history()))
    again = Rig("math", "code")
    for name in ("math", "code"):
        again.registry.publish(name, again.head.served(name), reason="born")
    again.learning.load_history(saved)
    assert again.learning.cross.matrix.figures() == rig.learning.cross.matrix.figures()
    rig.learning.take(finished(500, "code"))
    rig.learning.work(0.0, idle=True)
    rig.learning.drop_domain("code")
    rig.drain()
    assert set(rig.learning.cross.matrix.figures()) == {"math"}


def test_a_merge_keeps_the_expert_that_is_better_on_both_and_joins_the_buffers() -> None:
    rig = specialised()
    rig.serve(range(100, 103), "code")
    better = rig.registry.current("math")
    assert better is not None
    buffers = [rig.learning.domain(name).buffer for name in ("code", "math")]
    held, training = (sum(len(getattr(b, side)) for b in buffers) for side in ("held", "training"))
    version = merge_domains(rig.learning, "code", "math")["eagle"]
    assert rig.registry.domains() == ["code"]
    assert torch.equal(version.tensors["down_b"], better.tensors["down_b"])
    event = rig.registry.events()[-1]
    assert event["acceptance"]["math"] > event["acceptance"]["code"] + 0.3
    buffer = rig.learning.domain("code").buffer
    buffer.check()
    assert len(buffer.training) == training
    assert len(buffer.held) == min(held, BufferConfig().held_records)
    assert sorted(r.number for r in buffer.training) == [r.number for r in buffer.training]
    assert buffer.arrived == 63
    assert set(rig.learning.domains) == {"code"}
    rig.serve(range(200, 230), "code")
    buffer.check()


def test_only_kinds_that_both_domains_have_are_merged() -> None:
    rig = specialised()
    rig.learning.heads["model"] = rig.head
    rig.registry.publish("math.model", {"lora_A": torch.ones(2)}, reason="born")
    assert set(merge_domains(rig.learning, "code", "math")) == {"eagle"}
    assert rig.registry.domains() == ["code", "math.model"]


def test_a_merge_without_records_or_with_itself_changes_nothing() -> None:
    rig = Rig("math", "code")
    for name in ("math", "code"):
        rig.registry.publish(name, rig.head.served(name), reason="born")
    with pytest.raises(InvalidValueError, match="held-back records"):
        merge_domains(rig.learning, "math", "code")
    rig.serve(range(10))
    with pytest.raises(InvalidValueError, match="a domain other than"):
        merge_domains(rig.learning, "math", "math")
    with pytest.raises(UnknownNameError):
        merge_domains(rig.learning, "math", "poems")
    assert set(rig.learning.domains) == {"math"}
    assert rig.registry.domains() == ["code", "math"]
