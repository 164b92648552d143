"""The drafts benchmark: arms, their order, the arithmetic of figures, and the whole on a tiny target."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from draft_arms import figures, main, matrix
from draft_arms.domains import domain_costs, expert_forms
from draft_arms.engine import Ready, Served
from draft_arms.order import Asked, in_blocks, in_order
from draft_arms.plans import ARMS, WITH_TREES, make_plans, with_label_domains
from draft_arms.run import run_blocks
from draft_arms.show import show

from drafts.config import EagleConfig
from drafts.errors import InvalidValueError, UnknownNameError
from drafts.trunk import Trunk
from osd.serve.lend import head_shape
from osd.serve.load import build_target
from osd.types import Tally
from router.app.traffic import TrafficItem, parse_traffic
from router.config import PolydraftConfig
from router.mind.embed import Embedder
from router.mind.router import Router
from tests.drafts.head_rig import IDS, tiny_trunk
from tests.router.fakes import WordEncoder
from tests.router.tiny_engine import CONFIG, SPECIAL, byte_tokenizer
from tests.tiny import tiny_model


def items(count: int, text: str = "hello") -> list[TrafficItem]:
    return parse_traffic([json.dumps({"prompt": f"{text} {at}"}) for at in range(count)])


def served(
    index: int, label: str, tokens: int, passes: int, seconds: float, block: int = 0, place: int = 1
) -> Served:
    asked = Asked(index, label, place, False, items(1)[0])
    tally = Tally(1, tokens, seconds, passes, proposed_tokens=10, accepted_tokens=tokens - passes)
    return Served(asked, block, tally, (1,), label, most_nodes=3 + index)


class TestPlans:
    def test_arms_add_one_part_after_another(self) -> None:
        config = PolydraftConfig.model_validate(CONFIG)
        plans = {plan.arm: plan for plan in make_plans(ARMS, config, [1.0])}
        assert list(plans) == list(ARMS)
        assert [plans[name].sources for name in ("lookup", "memory", "trunk")] == [
            ("lookup",),
            ("lookup", "ngram"),
            ("lookup", "ngram", "eagle"),
        ]
        learns = {name for name, plan in plans.items() if plan.config.learn.enabled}
        trees = {name for name, plan in plans.items() if plan.config.drafts.trees}
        assert learns == {"experts", "trees", "shared"}
        assert trees == {"trees", "trees_frozen", "shared"}
        assert [name for name, plan in plans.items() if not plan.routed] == ["lookup", "shared"]

    def test_the_shared_draft_has_the_bytes_of_all_and_several_rates(self) -> None:
        config = PolydraftConfig.model_validate(CONFIG)
        plans = make_plans(["shared"], config, [0.5, 2.0])
        assert len({plan.name for plan in plans}) == 4
        for plan in plans:
            assert plan.config.domains == ()
            assert plan.config.drafts.ngram.max_bytes == 3 * config.drafts.ngram.max_bytes
            assert plan.config.learn.buffer.max_bytes == 3 * config.learn.buffer.max_bytes
            assert plan.config.learn.budget_share == config.learn.budget_share
        assert {plan.config.learn.rate for plan in plans} == {0.5 * config.learn.rate, 2 * config.learn.rate}
        rank = config.drafts.eagle.rank
        assert {plan.config.drafts.eagle.rank for plan in plans} == {rank, 3 * rank}

    def test_unknown_arms_and_rates_are_refused(self) -> None:
        config = PolydraftConfig.model_validate(CONFIG)
        with pytest.raises(UnknownNameError, match="forest"):
            make_plans(["forest"], config, [1.0])
        with pytest.raises(InvalidValueError, match="--shared-rates"):
            make_plans(["shared"], config, [0.0])
        with pytest.raises(InvalidValueError, match=r"--rates.*-1"):
            make_plans(["trees"], config, [1.0], routed_rates=[-1.0])

    def test_routed_arms_are_tried_with_rates_of_their_own(self) -> None:
        plans = make_plans(["trees", "trees_frozen"], PolydraftConfig(), [1.0], routed_rates=[1.0, 3.0])
        assert [plan.name for plan in plans] == ["trees (rate x 1)", "trees (rate x 3)", "trees_frozen"]
        rate = PolydraftConfig().learn.rate
        assert [plan.config.learn.rate for plan in plans] == pytest.approx([rate, 3 * rate, rate])

    def test_every_label_is_a_domain_and_what_declares_it_is_not_served(self) -> None:
        config = PolydraftConfig.model_validate(CONFIG)
        found, left = with_label_domains(config, {"boats": items(6), "qa": items(9)}, 5)
        assert [domain.name for domain in found.domains] == ["boats", "qa"]
        assert found.domains[1].examples == tuple(item.text for item in items(9)[:5])
        assert {label: [item.index for item in rest] for label, rest in left.items()} == {
            "boats": [0, 1, 2, 3, 4, 5],
            "qa": [5, 6, 7, 8],
        }
        with pytest.raises(InvalidValueError, match="label qa"):
            with_label_domains(config, {"qa": items(8)}, 5)

    def test_arguments_are_checked(self) -> None:
        assert main.parse_arguments([]).arms == list(ARMS)
        assert main.parse_arguments(["--labels", "a, b"]).labels == ["a", "b"]
        with pytest.raises(InvalidValueError, match="--block"):
            main.parse_arguments(["--block", "1"])
        with pytest.raises(InvalidValueError, match="--shared-rates"):
            main.parse_arguments(["--shared-rates", "fast"])


class TestOrder:
    def test_the_last_quarter_of_every_label_comes_last(self) -> None:
        asked = in_order({"many": items(40), "few": items(8)})
        assert [one.index for one in asked] == list(range(48))
        last = [one for one in asked if one.last]
        assert asked[-len(last) :] == last
        assert {label: sum(one.label == label for one in last) for label in ("many", "few")} == {
            "many": 10,
            "few": 2,
        }
        assert [one.place for one in asked if one.label == "few"] == list(range(1, 9))

    def test_labels_take_turns(self) -> None:
        asked = in_order({"a": items(40), "b": items(40)}, turn=10)
        labels = [one.label for one in asked]
        assert labels == [name for _ in range(4) for name in "ab" for _ in range(10)]
        assert [one.last for one in asked] == [False] * 60 + [True] * 20
        assert [one.place for one in asked if one.label == "b"] == list(range(1, 41))

    def test_a_memorys_bound_is_checked_and_shared_has_the_sum(self) -> None:
        config = main._bounded(PolydraftConfig(), 128 * 1024)
        assert config.drafts.ngram.max_bytes == 128 * 1024
        plan = make_plans(["shared"], config, [1.0])[0]
        assert plan.config.drafts.ngram.max_bytes == (len(config.domains) + 1) * 128 * 1024
        with pytest.raises(ValueError, match="max_bytes"):
            main._bounded(PolydraftConfig(), 1)

    def test_no_block_lies_on_both_sides_of_the_border(self) -> None:
        blocks = in_blocks(in_order({"a": items(9), "b": items(7)}), 4)
        assert sum(map(len, blocks)) == 16
        assert all(len({one.last for one in block}) == 1 for block in blocks)


class FakeArm:
    def __init__(self, arm: str, name: str, tokens: int, log: list[tuple[str, int]]) -> None:
        self.plan = SimpleNamespace(arm=arm, name=name)
        self.tokens, self.log = tokens, log

    def serve(self, ready: Ready, block: int) -> Served:
        self.log.append((self.plan.name, ready.asked.index))
        return Served(ready.asked, block, Tally(1, self.tokens, 1.0, 10), (), "base")


class TestRun:
    def run(self, pilot: int, turn: int = 1) -> tuple[dict[str, list[Served]], dict[str, float], list[Any]]:
        log: list[Any] = []
        arms = {
            name: FakeArm(arm, name, tokens, log)
            for name, arm, tokens in (("trees", "trees", 20), ("s1", "shared", 12), ("s2", "shared", 15))
        }
        asked = in_order({"a": items(8), "b": items(8)}, turn=turn)
        blocks = [[Ready(one, (), "") for one in block] for block in in_blocks(asked, 2)]
        found, tried = run_blocks(arms, blocks, pilot, on_border=lambda: log.append("border"))
        return found, tried, log

    def test_every_arm_serves_every_block_in_rotated_order(self) -> None:
        found, _, log = self.run(pilot=3)
        assert {name: [one.asked.index for one in group] for name, group in found.items()} == {
            "trees": list(range(16)),
            "shared": list(range(16)),
        }
        assert [log[at] for at in (0, 2, 4)] == [("trees", 0), ("s1", 0), ("s2", 0)]
        assert [log[at] for at in (6, 8, 10)] == [("s1", 2), ("s2", 2), ("trees", 2)]

    def test_only_the_best_variant_goes_on_after_the_pilot(self) -> None:
        _, tried, log = self.run(pilot=3)
        assert tried == {"s1": pytest.approx(1.2), "s2": pytest.approx(1.5)}
        assert max(entry[1] for entry in log if entry[0] == "s1") == 5
        _, _, late = self.run(pilot=100)
        assert max(entry[1] for entry in late if entry[0] == "s1") == 11

    def test_a_label_whose_turn_has_not_come_is_waited_for(self) -> None:
        _, _, log = self.run(pilot=2, turn=4)
        assert max(entry[1] for entry in log if entry[0] == "s1") == 5

    def test_drafts_are_copied_before_the_last_quarter(self) -> None:
        _, _, log = self.run(pilot=3)
        at = log.index("border")
        assert max(entry[1] for entry in log[:at]) == 11
        assert min(entry[1] for entry in log[at + 1 :]) == 12


class TestFigures:
    def test_figures_are_ratios_of_sums_by_label_and_stretch(self) -> None:
        group = [
            served(0, "math", 30, 10, 2.0, place=60),
            served(1, "math", 10, 10, 2.0, place=61),
            served(2, "sql", 20, 10, 1.0, place=1),
        ]
        found = figures.arm_figures(group)
        assert found["math"]["mean_accepted_length"] == pytest.approx(2.0)
        assert found["math"]["nodes_per_pass"] == pytest.approx(1.0)
        assert (found["math"]["most_nodes"], found["sql"]["most_nodes"]) == (4, 5)
        assert found["math"]["1-60"]["mean_accepted_length"] == pytest.approx(3.0)
        assert found["math"]["61-300"]["tokens_per_second"] == pytest.approx(5.0)
        assert found["all"]["tokens_per_second"] == pytest.approx(12.0)
        assert found["all"]["acceptance_rate"] == pytest.approx(1.0)
        assert "61-300" not in found["sql"]

    def test_speeds_are_paired_in_blocks(self) -> None:
        fast = [served(at, "math", 40, 10, 1.0 + at, block=at) for at in range(4)]
        slow = [served(at, "math", 10, 10, 1.0 + at, block=at) for at in range(4)]
        found = figures.ratios({"lookup": slow, "memory": slow, "trees": fast}, 0)
        assert set(found) == {"memory/lookup", "trees/memory", "trees/lookup"}
        assert found["trees/lookup"]["math"] == {"median": 4.0, "low": 4.0, "high": 4.0, "blocks": 4}

    def test_lengths_are_paired_by_request(self) -> None:
        routed = [served(at, "math", 30, 10 + at % 2, 1.0) for at in range(8)]
        shared = [served(at, "math", 30, 15 + at % 2, 1.0) for at in range(8)]
        found = figures.length_gains({"trees": routed, "shared": shared}, 0)
        row = found["math"]
        assert row["gain"] == pytest.approx(240 / 84 - 240 / 124)
        assert 0.8 < row["low"] <= row["gain"] <= row["high"] < 1.05
        assert row["requests"] == 8
        assert figures.length_gains({"trees": routed}, 0) == {}

    def test_answers_that_differ_are_counted_by_request(self) -> None:
        same = [served(0, "a", 2, 1, 1.0), served(1, "a", 2, 1, 1.0)]
        other = Served(same[1].asked, 0, same[1].tally, (9,), "a")
        assert figures.differing({"x": same, "y": [same[0], other]}) == 1


class TestMatrix:
    def test_a_diagonal_near_its_columns_best_is_own(self) -> None:
        table = {
            "base": {"a": 0.30, "b": 0.30, "c": 0.5},
            "a": {"a": 0.29, "b": 0.1, "c": 0.1},
            "b": {"a": 0.1, "b": 0.40, "c": 0.1},
            "c": {"a": 0.1, "b": 0.1, "c": 0.47},
        }
        found = matrix.own_best(table)
        assert (found["count"], found["of"], found["labels"]) == (2, 3, ["a", "b"])
        assert (found["strict"], found["strict_labels"]) == (1, ["b"])
        assert found["spread"] == pytest.approx({"a": 0.2, "b": 0.3, "c": 0.4})

    def test_drafts_that_are_all_alike_win_nothing_strictly(self) -> None:
        same = {name: {"a": 0.3, "b": 0.4} for name in ("base", "a", "b")}
        found = matrix.own_best(same)
        assert (found["count"], found["strict"]) == (2, 0)
        assert found["spread"] == {"a": 0.0, "b": 0.0}

    def test_acceptance_is_what_a_pass_gains_over_its_chain(self) -> None:
        assert matrix.acceptance({"a": {"x": 1.0, "y": 5.0}}) == {"a": {"x": 0.0, "y": 1.0}}


def test_domains_cost_is_measured_for_every_number_of_them() -> None:
    found = domain_costs(tiny_trunk(), {"low_rank": 2}, repeats=4, rows=3, counts=(2, 5), time_products=False)
    assert list(found) == ["2", "5"]
    pairs = (16, 48), (24, 16), (16, len(IDS))
    for entry in found.values():
        assert entry["step_ms"]["low_rank_library"] > 0.0
        assert entry["bytes_per_expert"]["low_rank"] == 4 * (sum(2 * (i + o) for i, o in pairs) + len(IDS))
        assert set(entry["ratio"]) == set(entry["step_ms"])


def test_experts_of_the_configs_rank_are_measured_first() -> None:
    assert next(iter(expert_forms(EagleConfig(rank=4)).items())) == ("low_rank", 4)


def test_all_arms_on_a_tiny_target(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = build_target(tiny_model("llama", vocab_size=len(SPECIAL) + 256), name="tiny")
    file = tmp_path / "trunk.safetensors"
    Trunk.fresh(head_shape(target), torch.arange(3, 259, 2)).save(file)
    drafts = {"eagle": {"trunk": str(file), "rank": 2}}
    config = PolydraftConfig.model_validate({**CONFIG, "drafts": drafts})
    router = Router(Embedder(WordEncoder(), cache_size=1), config.router, config.domains, learn=False)
    groups = {"boats": items(8, "boat sail harbour"), "trees": items(8, "tree leaf forest")}
    arguments = main.parse_arguments(
        ["--block", "2", "--pilot", "2", "--max-tokens", "8", "--shared-rates", "1", "--nodes", "3"]
    )
    try:
        result = main.serve_arms(arguments, config, groups, target, byte_tokenizer(), router)
    finally:
        router.close()
    assert list(result["arms"]) == list(ARMS)
    for arm in result["arms"].values():
        assert {row["requests"] for row in arm["labels"].values()} == {8, 16}
        assert set(arm["labels"]["boats"]) == {*figures.FIGURES, *figures.NODES, "1-60"}
        assert 0 < arm["labels"]["all"]["nodes_per_pass"] <= arm["labels"]["all"]["most_nodes"]
    assert result["most_nodes"] == 3
    assert max(result["arms"][name]["labels"]["all"]["most_nodes"] for name in WITH_TREES) <= 3
    assert result["routing"] == {"boats": {"boats": 8}, "trees": {"trees": 8}}
    assert result["arms"]["lookup"]["learning"]["memory_bytes"] == 0
    assert result["arms"]["memory"]["learning"]["memory_bytes"] > 0
    assert set(result["routed_minus_shared"]) == {"boats", "trees", "all"}
    assert len(result["tried"]) == 2
    assert set(result["matrix"]["experts"]) == {"base", "boats", "trees"}
    assert set(result["matrix"]["memories"]["boats"]) == {"boats", "trees"}
    assert result["matrix"]["answers"] == 4
    assert result["answers_that_differ"] == 0
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    show(result)
    shown = capsys.readouterr().out
    assert "strictly best of all" in shown
    assert "best minus worst" in shown
    assert "nodes_per_pass" in shown
