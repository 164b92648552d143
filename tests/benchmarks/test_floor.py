from __future__ import annotations

import json
from typing import Any, ClassVar
from unittest.mock import patch

import pytest
import torch
from floor import MODES
from floor_parts.machine import bandwidth, flops, readers, weight_bytes
from floor_parts.passes import CONTEXT, filled_cache, group_of
from floor_parts.served import GROUPS, SHAPES, compiled_groups, only, served_profile, shares
from floor_parts.steps import PARTS, Stopwatch, split, step_parts

from drafts.errors import InvalidValueError
from drafts.native.team import team
from osd.serve import native_entries as entry
from osd.serve.target import PassRow
from router.app.traffic import parse_traffic
from tests.osd.native_rig import fitting_model, native
from tests.router.tiny_engine import tiny_engine


def test_every_reader_touches_all_weights_and_gives_a_speed() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        weights = [torch.randn(64, 32).to(dtype), torch.randn(32, 64).to(dtype)]
        assert weight_bytes(weights) == 2 * 64 * 32 * weights[0].element_size()
        speeds = bandwidth(weights, seconds=0.0)
        assert set(speeds) == set(readers(weights))
        assert min(speeds.values()) > 0
    assert flops(torch.float32, size=64, repeats=1) > 0


@pytest.mark.parametrize(
    ("name", "shapes", "group"),
    [
        ("aten::mm", [[1, 8], [8, 24]], "product: qkv"),
        ("mkldnn::_linear_pointwise", [[4, 8], [24, 8], []], "product: qkv"),
        ("aten::bmm", [[3, 1, 8], [3, 8, 5]], "attention"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", [], "attention"),
        ("aten::_fused_rms_norm", [[1, 8]], "norms"),
        ("aten::addcmul_", [[1, 8]], "rope"),
        ("aten::silu", [[1, 8]], "activation"),
        ("aten::copy_", [[1, 8]], "copies"),
        ("aten::add", [[1, 8]], "elementwise"),
        ("aten::view", [[1, 8]], "views"),
        ("aten::empty", [], "rest"),
    ],
)
def test_operators_are_grouped_by_weight_and_name(name: str, shapes: list[list[int]], group: str) -> None:
    assert group_of(name, shapes, {frozenset((24, 8)): "qkv"}) == group


ALWAYS = {"border", "admit", "propose", "plan", "target pass", "verify", "commit", "evidence", "retire"}


@pytest.mark.parametrize("mode", list(MODES))
def test_every_part_of_a_real_engines_step_takes_time(mode: str) -> None:
    items = parse_traffic([json.dumps({"prompt": f"boat sail {i}"}) for i in range(3)])
    with tiny_engine(slots=2) as engine:
        found = step_parts(engine, items, 2, 6, MODES[mode])
    parts = {"plain": set(), "frozen": {"observe"}, "learning": {"observe"}}[mode]
    assert set(found["parts_ms"]) - {"learning"} == ALWAYS | parts | {"rest"}
    assert all(ms > 0 for name, ms in found["parts_ms"].items() if name not in ("rest", "learning"))
    assert found["parts_ms"]["rest"] > 0
    assert found["tokens"] == 18


def test_the_stopwatch_puts_methods_back_and_refuses_an_engine_without_them() -> None:
    with tiny_engine() as engine:
        core = engine.core
        before = {part: vars(owner(core, part)).get(PARTS[part][1]) for part in ALWAYS}
        watch = Stopwatch(core)
        assert all(PARTS[part][1] in vars(owner(core, part)) for part in ALWAYS)
        watch.release()
        assert {part: vars(owner(core, part)).get(PARTS[part][1]) for part in ALWAYS} == before
        with (
            patch.dict(PARTS, gone=("requests", "fetch")),
            pytest.raises(InvalidValueError, match=r"part gone: .*Lifecycle\.fetch"),
        ):
            Stopwatch(core)
        assert {part: vars(owner(core, part)).get(PARTS[part][1]) for part in ALWAYS} == before


def owner(core: Any, part: str) -> Any:
    return getattr(core, PARTS[part][0]) if PARTS[part][0] else core


def test_parts_of_a_step_add_up_to_it() -> None:
    parts = split({"commit": 0.3, "evidence": 0.1, "target pass": 0.5, "learning": 0.4}, busy=1.0, steps=10)
    assert parts == pytest.approx(
        {"commit": 20.0, "evidence": 10.0, "target pass": 50.0, "rest": 20.0, "learning": 40.0}
    )


class TestServedPass:
    pytestmark = pytest.mark.skipif(team() is None, reason="torch does not lend its threads here")
    WRITES: ClassVar[dict[str, set[int]]] = {
        "around": set(),
        "qkv": {entry.SHARED_QKV},
        "attention": {entry.SHARED_ATTENDED},
        "attn_out": {entry.SHARED_PROJECTED},
        "gate_up": {entry.SHARED_ACTIVE},
        "down": {entry.SHARED_DOWN},
        "output": set(),
    }

    @pytest.mark.parametrize("tokens", [1, 4, 9])
    def test_each_group_writes_what_it_writes_in_a_pass_and_nothing_else(self, tokens: int) -> None:
        target = native(fitting_model())
        cache, compiled = filled_cache(target, 1), compiled_groups()
        rows = [PassRow(0, CONTEXT, list(range(5, 5 + tokens)))]
        logits = target.forward(cache, rows).logits
        assert set(self.WRITES) == set(GROUPS)
        with only("output", compiled):
            assert torch.equal(target.forward(cache, rows).logits, logits)
        buffers = target._shared._buffers
        watched = {place: buffer for place, buffer in buffers.items() if place != entry.SHARED_X}
        for group, written in self.WRITES.items():
            for buffer in watched.values():
                buffer.fill_(0.5)
            with only(group, compiled):
                target.forward(cache, rows)
            assert {place for place, buffer in watched.items() if not (buffer == 0.5).all()} == written
        assert torch.equal(target.forward(cache, rows).logits, logits)

    def test_a_profile_has_every_group_and_what_is_left(self) -> None:
        target = native(fitting_model())
        found = served_profile(target, rounds=2)
        assert found is not None
        assert set(found) == set(SHAPES)
        for shape in found.values():
            assert set(shape["groups_ms"]) == {*GROUPS, "rest"}
            assert sum(shape["groups_ms"].values()) == pytest.approx(shape["pass_ms"])
        target.limit = 4
        assert set(served_profile(target, rounds=1) or ()) == set(SHAPES) - {"16 requests"}
        assert served_profile(object()) is None


def test_a_group_is_told_without_what_every_call_costs() -> None:
    found = shares({"around": 1.0, "qkv": 3.0, "down": 5.0}, whole=9.0)
    assert found == {"around": 1.0, "qkv": 2.0, "down": 4.0, "rest": 2.0}
