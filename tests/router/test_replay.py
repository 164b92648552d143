from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from drafts.errors import InvalidValueError, PolydraftError, UnknownNameError
from router.app.compare import block_size, parse_baselines, sample, split_blocks
from router.app.inflight import request_seed
from router.app.paired import mean_interval, median_interval
from router.app.replay import ReplaySettings, replay
from router.app.summary import WINDOW
from router.app.traffic import TrafficItem, parse_traffic
from router.app.verify_replay import spread
from tests.router.fake_engine import FakeEngine, default_answer, encode

TALLY = {
    "requests",
    "tokens",
    "seconds",
    "tokens_per_second",
    "target_passes",
    "proposed_tokens",
    "accepted_tokens",
    "acceptance_rate",
    "alpha",
    "mean_accepted_length",
}


def traffic(count: int) -> list[TrafficItem]:
    kinds = ("math", "code", "weather")
    lines = [
        json.dumps({"prompt": f"{kinds[i % 3]} {i}", "domain": f"L-{kinds[i % 3]}"}) for i in range(count)
    ]
    return parse_traffic(lines)


def run(engine: FakeEngine, count: int = 24, **settings: Any) -> dict[str, Any]:
    return replay(engine, traffic(count), ReplaySettings(max_tokens=40, **settings))


def test_the_result_has_every_key_of_the_contract_and_its_counts_add_up() -> None:
    result = run(FakeEngine(), concurrency=3)
    assert {"overall", "domains", "labels", "compare", "verify", "routing", "learning"} <= set(result)
    assert {"events", "timeline", "provenance"} <= set(result)
    assert set(result["overall"]) == TALLY
    for groups in (result["domains"], result["labels"]):
        assert all(set(row) == TALLY for row in groups.values())
        for key in ("requests", "tokens", "target_passes", "proposed_tokens", "accepted_tokens"):
            assert sum(row[key] for row in groups.values()) == result["overall"][key]
    overall = result["overall"]
    assert overall["requests"] == 24
    assert overall["tokens"] == 24 * 40
    assert overall["acceptance_rate"] == overall["accepted_tokens"] / overall["proposed_tokens"]
    assert overall["mean_accepted_length"] == overall["tokens"] / overall["target_passes"]
    assert overall["tokens_per_second"] == pytest.approx(overall["tokens"] / overall["seconds"])
    assert set(result["verify"]) >= {"checked", "mismatched", "ties"}
    assert result["compare"] == {}
    assert {"confusion", "share_of_latency"} <= set(result["routing"])


def test_confusion_counts_labels_by_domain_and_timelines_hold_ten_requests_a_window() -> None:
    result = run(FakeEngine(), count=36)
    assert result["routing"]["confusion"] == {
        "L-math": {"math": 12},
        "L-code": {"code": 12},
        "L-weather": {"base": 12},
    }
    assert [window["requests"] for window in result["timeline"]["math"]] == [WINDOW, 2]
    assert {"requests", "acceptance_rate", "mean_accepted_length"} <= set(result["timeline"]["math"][0])


def test_labels_never_reach_the_engine_and_requests_go_in_file_order() -> None:
    engine = FakeEngine(delay=0.001)
    run(engine, concurrency=4)
    assert "L-" not in json.dumps(engine.submitted)
    assert all(request["domain"] is None for request in engine.submitted)
    assert [request["text"] for request in engine.submitted] == [item.text for item in traffic(24)]
    assert engine.peak == 4


def test_every_request_has_its_own_seed_which_follows_from_the_runs_seed() -> None:
    first, again, other = FakeEngine(), FakeEngine(), FakeEngine()
    for engine, seed in ((first, 1), (again, 1), (other, 2)):
        run(engine, seed=seed, temperature=0.8)
    seeds = [[request["seed"] for request in engine.submitted] for engine in (first, again, other)]
    assert seeds[0] == seeds[1] == [request_seed(1, i) for i in range(24)]
    assert not set(seeds[0]) & set(seeds[2])
    assert len(set(seeds[0])) == 24


def test_learning_counts_this_run_only_and_older_events_are_left_out() -> None:
    engine = FakeEngine()
    engine.events = [{"kind": "birth", "domain": "old", "reason": "before", "numbers": {}, "time": 1.0}]
    result = run(engine)
    assert result["events"] == []
    assert result["learning"]["updates"] == 0
    assert result["learning"]["share_of_busy_time"] == 0.01


def test_comparison_interleaves_arms_in_blocks_and_baselines_teach_nothing() -> None:
    engine = FakeEngine()
    result = run(engine, compare=("plain", "generate"), freeze=False, k=3, sources=("ngram",))
    ours = {"sources": ("ngram",), "learn": True, "k": 3}
    plain = {"sources": (), "learn": False, "k": None}
    assert Counter(map(str, engine.modes)) == {str(ours): 6, str(plain): 13}
    kept = [request["store"] for request in engine.submitted]
    assert kept.count(True) == kept.count(False) == 24
    assert kept[:24] != [True] * 24
    assert engine.model.generated == 25
    for name in ("plain", "generate"):
        compared = result["compare"][name]
        assert {"tokens_per_second", "speedup", "speedup_low"} <= set(compared)
        assert compared["speedup_low"] <= compared["speedup"] <= compared["speedup_high"]
        assert len(compared["ratios"]) == compared["blocks"] == 6
        assert compared["same_answers"] == compared["requests"] == 24
    assert result["overall"]["requests"] == 24


def test_comparison_on_a_sample_serves_every_prompt_once_and_the_sample_last() -> None:
    engine = FakeEngine()
    result = run(engine, compare=("plain",), compare_limit=8, seed=5)
    ours = [request["text"] for request in engine.submitted if request["store"]]
    assert sorted(ours) == sorted(item.text for item in traffic(24))
    outside, inside = sample(traffic(24), 8, seed=5)
    assert ours[:16] == [item.text for item in outside]
    assert {r["text"] for r in engine.submitted if not r["store"]} == {item.text for item in inside}
    assert result["compare"]["plain"]["requests"] == 8


def test_verification_passes_true_answers_and_counts_wrong_ones() -> None:
    assert run(FakeEngine(), verify=10)["verify"] | {"tokens": 0} == {
        "checked": 10,
        "mismatched": 0,
        "ties": 0,
        "borders": 0,
        "tokens": 0,
        "ties_share": 0.0,
        "mismatches": [],
        "branch_nodes": 0,
    }
    wrong = run(FakeEngine(wrong=[7]), verify=10)["verify"]
    assert (wrong["checked"], wrong["mismatched"], wrong["ties"]) == (10, 10, 0)
    assert wrong["mismatches"][0]["position"] == 7
    assert wrong["mismatches"][0]["token"] == encode("?")[0]


def test_a_token_within_a_thousandth_of_the_maximum_is_a_tie() -> None:
    engine = FakeEngine(wrong=[7])
    engine.model.gap = 9e-4
    close = run(engine, verify=4)["verify"]
    assert (close["mismatched"], close["ties"], close["ties_share"]) == (0, 4, 4 / 160)
    engine.model.gap = 2e-3
    assert run(engine, verify=4)["verify"]["mismatched"] == 4


def test_an_answer_that_goes_on_past_its_end_is_a_mismatch() -> None:
    engine = FakeEngine(answer=lambda prompt: "short" if "math" in prompt else default_answer(prompt))
    good = run(engine, count=6, verify=6)["verify"]
    assert (good["checked"], good["mismatched"]) == (6, 0)
    late = FakeEngine(answer=lambda prompt: "short")
    late.model.answer_ids = lambda ids: encode("sh")
    assert run(late, count=3, verify=3)["verify"]["mismatched"] == 3


def test_sampled_answers_are_checked_with_the_noise_of_their_seeds() -> None:
    engine = FakeEngine()
    engine.model.gap = 200.0
    sure = run(engine, verify=4, temperature=0.8)["verify"]
    assert (sure["checked"], sure["mismatched"], sure["ties"], sure["borders"]) == (4, 0, 0, 0)
    assert sure["tokens"] > 0
    engine.model.gap = 0.0
    chance = run(engine, verify=4, temperature=0.8)["verify"]
    assert chance["mismatched"] == 4
    assert chance["mismatches"][0]["reason"] == "not the sample of its seed"


def test_options_are_checked() -> None:
    for bad in (
        {"verify": -1},
        {"concurrency": 0},
        {"temperature": -1.0},
        {"compare_limit": 0},
        {"nodes": 0},
        {"nodes": 4, "k": 2},
    ):
        with pytest.raises(InvalidValueError):
            run(FakeEngine(), **bad)
    assert spread(3, 9) == [0, 3, 6]
    assert spread(9, 3) == [0, 1, 2]


def test_outputs_have_a_line_a_request(tmp_path: Path) -> None:
    file = tmp_path / "out.jsonl"
    run(FakeEngine(), count=5, outputs=file, concurrency=2)
    lines = sorted(
        (json.loads(line) for line in file.read_text().splitlines()), key=lambda line: line["index"]
    )
    assert [line["index"] for line in lines] == list(range(5))
    for line in lines:
        assert {"index", "seed", "token_ids", "domain", "versions", "rounds", "text", "label"} <= set(line)
        assert sum(item["emitted"] for item in line["rounds"]) == len(line["token_ids"])
        assert {"proposed", "accepted", "tested", "emitted", "source", "version"} == set(line["rounds"][0])


def test_a_refused_request_is_reported_by_line_and_the_run_goes_on() -> None:
    engine = FakeEngine(context=30)
    items = parse_traffic([json.dumps({"prompt": text}) for text in ("fine", "x" * 40, "also fine")])
    result = replay(engine, items, ReplaySettings(max_tokens=5, compare=("plain", "generate"), verify=3))
    assert [(item["line"], item["refused"]) for item in result["failed"]] == [(2, True)]
    assert result["overall"]["requests"] == result["verify"]["checked"] == 2
    assert result["compare"]["generate"]["requests"] == 2


def test_a_failing_request_is_reported_and_the_run_goes_on() -> None:
    engine = FakeEngine(fail=lambda prompt: PolydraftError("gone") if prompt == "math 3" else None)
    result = run(engine, concurrency=2)
    assert result["failed"] == [{"index": 3, "line": 4, "error": "gone", "refused": False}]
    assert result["overall"]["requests"] == 23


def test_blocks_keep_batches_full_and_cover_all_items() -> None:
    assert (block_size(400, 1), block_size(400, 8), block_size(40, 8)) == (4, 16, 8)
    items = traffic(22)
    blocks = split_blocks(items, 4)
    assert [item for block in blocks for item in block] == items
    assert min(map(len, blocks)) >= 2
    assert parse_baselines("generate, plain,plain") == ("generate", "plain")
    assert parse_baselines(None) == ()
    with pytest.raises(UnknownNameError, match="generate, plain"):
        parse_baselines("vllm")


def test_the_bootstrap_interval_covers_the_median_of_a_known_distribution() -> None:
    """95 % intervals of 200 samples of 40 draws: fewer than 178 hits has probability below 1e-3."""
    import numpy as np

    generator = np.random.default_rng(0)
    hits = 0
    for _ in range(200):
        _, low, high = median_interval(generator.normal(1.0, 0.3, 40).tolist())
        hits += low <= 1.0 <= high
    assert hits >= 178
    assert median_interval([2.0]) == (2.0, 2.0, 2.0)
    assert mean_interval([1.0, 3.0])[0] == 2.0


def test_learnings_share_leaves_out_the_time_spent_as_a_baseline() -> None:
    class Busy(FakeEngine):
        def stats(self) -> dict[str, Any]:
            report = super().stats()
            ours = sum(request["store"] for request in self.submitted)
            report["learning"]["seconds_by_part"] = {"experts": 0.03 * ours, "routing": 0.01 * ours}
            report["learning"]["busy_seconds"] = 1.0 * ours + 9.0 * (len(self.submitted) - ours)
            return report

    result = run(Busy(), compare=("plain",))
    assert result["learning"]["share_of_busy_time"] == pytest.approx(0.04)
    assert result["learning"]["busy_seconds"] == pytest.approx(24.0)
