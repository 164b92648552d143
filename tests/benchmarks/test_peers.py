import json
import random
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
from peer_arms import process
from peer_arms.blocks import measure, shuffled
from peer_arms.in_engine import EngineArm
from peer_arms.in_transformers import Watch, generate, until
from peer_arms.measured import Answer, ArmUnavailableError, BlockRun, Prompt
from peer_arms.process import ProcessArm
from peer_arms.reference import Reference, equal_outputs, first_difference
from peer_arms.show import plot, table
from peer_arms.summary import Measurements, arm_figures, document, interval, ratios
from peer_arms.venv import ensure_venv, vllm_environment
from peers import parse_arguments, usable_prompts

from drafts.errors import InvalidValueError, UnknownNameError
from router.app.traffic import TrafficItem
from tests.router.fake_engine import FakeEngine


def prompt(index: int, label: str | None = "math") -> Prompt:
    text = f"{label} {index}"
    item = TrafficItem(index, index + 1, ({"role": "user", "content": text},), label=label)
    return Prompt(item, (index, index + 1))


def run(rates: dict[int, float], tokens: int = 10, passes: int | None = 5) -> BlockRun:
    """Answers of ``tokens`` tokens each, one after the other, at the given rates."""
    answers = {i: Answer(tuple(range(tokens)), tokens / rate, 0.1 * i, passes) for i, rate in rates.items()}
    return BlockRun(answers, sum(answer.seconds for answer in answers.values()))


def measured() -> Measurements:
    labels = {0: "math", 1: "sql", 2: "math", 3: "sql"}
    blocks = [
        {
            "generate": run({0: 10.0, 1: 10.0}),
            "vllm": run({0: 20.0, 1: 20.0}, passes=None),
            "polydraft_plain": run({0: 20.0, 1: 20.0}),
            "polydraft": run({0: 60.0, 1: 30.0}),
        },
        {
            "generate": run({2: 5.0, 3: 5.0}),
            "vllm": run({2: 10.0, 3: 10.0}, passes=None),
            "polydraft_plain": run({2: 10.0, 3: 10.0}),
            "polydraft": run({2: 30.0, 3: 15.0}),
        },
    ]
    return Measurements(labels, blocks, {"generate": "one by one"}, {"vllm_suffix": "not installed"})


class TestArguments:
    def test_defaults_name_every_arm(self) -> None:
        found = parse_arguments([])
        assert found.concurrency == [1, 4, 16]
        assert {"generate", "vllm_suffix", "flashspec", "polydraft_frozen"} <= set(found.arms)
        assert found.vllm_venv is not None

    def test_lists_keep_their_order_and_drop_duplicates(self) -> None:
        found = parse_arguments(["--concurrency", "4, 1,4", "--arms", "vllm,generate,vllm"])
        assert found.concurrency == [4, 1]
        assert found.arms == ["vllm", "generate"]

    def test_an_unknown_arm_is_refused_with_the_known_ones(self) -> None:
        with pytest.raises(UnknownNameError, match=r"sglang.*vllm_ngram"):
            parse_arguments(["--arms", "sglang"])

    @pytest.mark.parametrize(
        "arguments",
        [["--concurrency", "0"], ["--concurrency", "four"], ["--limit", "0"], ["--max-tokens", "-1"]],
    )
    def test_counts_are_positive(self, arguments: list[str]) -> None:
        with pytest.raises(InvalidValueError, match=arguments[0]):
            parse_arguments(arguments)


class TestOrder:
    def test_the_learning_engine_never_comes_before_the_frozen_one(self) -> None:
        order = random.Random(0)
        names = ["generate", "polydraft", "vllm", "polydraft_frozen"]
        seen = [shuffled(names, order) for _ in range(200)]
        assert all(one.index("polydraft_frozen") < one.index("polydraft") for one in seen)
        assert all(sorted(one) == sorted(names) for one in seen)
        assert {one[0] for one in seen} == {"generate", "vllm", "polydraft_frozen"}

    def test_it_depends_on_the_seed_alone(self) -> None:
        names = ["generate", "vllm", "polydraft_plain"]
        first, second = ([shuffled(names, random.Random(3)) for _ in range(1)] for _ in range(2))
        assert first == second


class TestSummary:
    def test_throughput_is_the_median_over_blocks(self) -> None:
        figures = arm_figures(measured(), "generate")
        assert figures["tokens_per_second"] == pytest.approx(7.5)
        assert figures["mean_accepted_length"] == pytest.approx(2.0)
        assert figures["ttft"] == pytest.approx(0.15)
        assert figures["labels"]["math"] == {
            "tokens_per_second": pytest.approx(20 / 3),
            "mean_accepted_length": pytest.approx(2.0),
            "prompts": 2,
        }

    def test_an_arm_that_counts_no_passes_has_no_accepted_length(self) -> None:
        assert arm_figures(measured(), "vllm")["mean_accepted_length"] is None

    def test_ratios_are_paired_in_blocks_whatever_the_machine_does(self) -> None:
        found = ratios(measured(), 0)
        assert found["polydraft/generate"]["median"] == pytest.approx(4.0)
        assert found["polydraft/generate"]["low"] == pytest.approx(4.0)
        assert found["polydraft/generate"]["high"] == pytest.approx(4.0)
        assert found["polydraft/vllm"]["blocks"] == 2
        assert found["polydraft/polydraft_plain"]["labels"]["math"]["median"] == pytest.approx(3.0)
        assert found["polydraft/polydraft_plain"]["labels"]["sql"]["median"] == pytest.approx(1.5)

    def test_the_interval_holds_the_median_and_widens_with_the_spread(self) -> None:
        narrow = interval([2.0, 2.1, 1.9, 2.0, 2.05, 1.95], 1)
        wide = interval([1.0, 3.0, 0.5, 4.0, 2.0, 2.0], 1)
        for entry in (narrow, wide):
            assert entry["low"] <= entry["median"] <= entry["high"]
        assert wide["high"] - wide["low"] > narrow["high"] - narrow["low"]

    def test_no_ratio_without_measurements(self) -> None:
        assert interval([None, None], 0) == {"median": None, "low": None, "high": None, "blocks": 0}

    def test_the_document_is_json_with_arms_ratios_and_reasons(self) -> None:
        result = document({1: measured(), 4: measured()}, 0)
        assert result["best_peer"] == {"1": "vllm", "4": "vllm"}
        assert set(result["arms"]["polydraft"]) == {"1", "4"}
        assert result["ratios"]["polydraft/vllm"]["4"]["median"] == pytest.approx(2.0)
        assert result["skipped"] == {"vllm_suffix": {"1": "not installed", "4": "not installed"}}
        assert json.loads(json.dumps(result, allow_nan=False)) == result

    def test_an_arm_that_failed_in_one_block_has_no_figures(self) -> None:
        broken = measured()
        del broken.blocks[1]["vllm"]
        result = document({1: broken}, 0)
        assert "vllm" not in result["arms"]
        assert result["best_peer"]["1"] == "generate"

    def test_table_and_plot_show_every_arm(self, tmp_path: Path) -> None:
        result = document({1: measured()}, 0) | {"settings": {"model": "m", "dtype": "float32"}}
        text = table(result)
        for name in ("generate", "vllm", "polydraft_plain", "not installed", "4.00 (4.00–4.00)"):
            assert name in text
        plot(result, tmp_path / "plot.html")
        assert "polydraft_plain" in (tmp_path / "plot.html").read_text(encoding="utf-8")


class TestEqualOutputs:
    def test_first_difference(self) -> None:
        assert first_difference((1, 2, 3), (1, 2, 3)) is None
        assert first_difference((1, 2, 3), (1, 5, 3)) == 1
        assert first_difference((1, 2, 3), (1, 2)) == 2

    def test_near_ties_are_told_apart_from_other_differences(self) -> None:
        found = equal_outputs({0: None, 1: 1e-4, 2: 0.7, 3: float("inf")}, 1e-3)
        assert found["share"] == pytest.approx(0.25)
        assert (found["equal"], found["near_ties"], found["other_differences"]) == (1, 1, 2)
        assert found["largest_gap"] == pytest.approx(0.7)
        assert json.dumps(found, allow_nan=False)

    def test_an_answer_that_merely_ends_early_is_no_tie(self) -> None:
        reference = Reference(FakeEngine(), Path())
        reference.answers[0] = (1, 2, 3)
        assert reference.gap(prompt(0), (1, 2)) == float("inf")
        assert reference.gap(prompt(0), (1, 2, 3)) is None


class FakeArm:
    note = "fake"

    def __init__(self, fail_at: int | None = None) -> None:
        self.fail_at, self.calls, self.closed = fail_at, 0, 0

    def run(self, block, max_tokens, **options) -> BlockRun:
        self.calls += 1
        if self.calls == self.fail_at:
            raise ArmUnavailableError("its process is gone")
        return run({p.index: 10.0 for p in block})

    def close(self) -> None:
        self.closed += 1


class TestMeasure:
    blocks = ((prompt(0), prompt(1)), (prompt(2), prompt(3)))

    def measure(self, arms: dict[str, FakeArm | ArmUnavailableError]) -> Measurements:
        def make(name: str) -> FakeArm:
            arm = arms[name]
            if isinstance(arm, ArmUnavailableError):
                raise arm
            return arm

        return measure(make, list(arms), self.blocks, [prompt(-1)], 8, 0, settle=0.0)

    def test_the_warm_up_does_not_count(self) -> None:
        arm = FakeArm()
        found = self.measure({"generate": arm})
        assert arm.calls == 3
        assert [sorted(block["generate"].answers) for block in found.blocks] == [[0, 1], [2, 3]]
        assert arm.closed

    def test_an_arm_that_cannot_start_is_skipped_with_its_reason(self) -> None:
        found = self.measure({"vllm": ArmUnavailableError("no such package"), "generate": FakeArm()})
        assert found.skipped == {"vllm": "no such package"}
        assert found.names() == ["generate"]

    @pytest.mark.parametrize("fail_at", [1, 2, 3])
    def test_an_arm_that_fails_is_closed_and_left_out(self, fail_at: int) -> None:
        broken, other = FakeArm(fail_at), FakeArm()
        found = self.measure({"vllm": broken, "generate": other})
        assert found.skipped == {"vllm": "its process is gone"}
        assert found.names() == ["generate"]
        assert broken.closed
        assert broken.calls == fail_at
        assert other.calls == 3

    def test_all_arms_are_closed_after_an_error(self) -> None:
        class Interrupted(FakeArm):
            def run(self, block, max_tokens, **options):
                raise KeyboardInterrupt

        first, second = FakeArm(), Interrupted()
        with pytest.raises(KeyboardInterrupt):
            self.measure({"generate": first, "vllm": second})
        assert first.closed
        assert second.closed


class TestEngineArm:
    def test_every_mode_leaves_the_engine_at_rest(self) -> None:
        engine = FakeEngine()
        block = [prompt(0), prompt(1, "code")]
        results = {
            name: EngineArm(engine, name, 2).run(block, 6)
            for name in ("polydraft_plain", "polydraft_frozen", "polydraft")
        }
        rest = {"sources": (), "learn": False, "k": None}
        assert engine.modes[1::2] == [rest] * 3
        assert engine.modes[4] == {"sources": None, "learn": True, "k": None}
        assert [sent["store"] for sent in engine.submitted] == [False] * 4 + [True] * 2
        for result in results.values():
            assert sorted(result.answers) == [0, 1]
            assert result.answers[0].tokens == results["polydraft"].answers[0].tokens
            assert result.answers[0].ttft is not None
        assert results["polydraft_plain"].answers[0].passes == 6

    def test_prompts_that_do_not_fit_are_left_out(self) -> None:
        engine = FakeEngine(context=40)
        items = [prompt(0).item, TrafficItem(1, 2, ({"role": "user", "content": "x" * 100},))]
        assert [p.index for p in usable_prompts(engine, items, 16)] == [0]
        assert usable_prompts(engine, items, 36) == []


class TestGenerate:
    def test_the_end_token_belongs_to_the_answer_and_padding_does_not(self) -> None:
        assert until([5, 6, 2, 2, 2], [2]) == (5, 6, 2)
        assert until([5, 6], [2]) == (5, 6)

    def test_rows_of_a_batch_are_cut_apart_and_their_passes_counted(self) -> None:
        import torch

        class Model:
            def generate(self, ids, *, stopping_criteria, attention_mask, **options):
                assert attention_mask.tolist() == [[1, 1, 1], [0, 0, 1]]
                answers = torch.tensor([[7, 8, 9], [7, 2, 2]])
                for done in (1, 3):
                    stopping_criteria[0](torch.cat([ids, answers[:, :done]], 1), None)
                return torch.cat([ids, answers], 1)

        first, second = generate(Model(), [(1, 3, 4), (5,)], 3, [2], {})
        assert (first.tokens, first.passes) == ((7, 8, 9), 2)
        assert (second.tokens, second.passes) == ((7, 2), 2)
        assert first.ttft == second.ttft

    def test_watching_stops_nothing(self) -> None:
        import torch

        watch = Watch()
        assert not watch(torch.zeros(2, 5, dtype=torch.long), None).any()
        assert watch.steps[0][1] == 5


WORKER = """
import json, sys
options = json.loads(sys.argv[1])
if options.get("refuse"):
    print(json.dumps({"error": options["refuse"]}))
    sys.exit()
print(json.dumps({"ready": True, "version": "1.0"}), flush=True)
for line in sys.stdin:
    if options.get("die"):
        sys.exit(3)
    block = json.loads(line)
    answers = [{"tokens": ids, "ttft": 0.1, "seconds": 0.2, "passes": 1} for ids in block["prompts"]]
    print(json.dumps({"answers": answers, "seconds": 0.5}), flush=True)
"""


class TestProcessArm:
    @pytest.fixture
    def start(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        (tmp_path / "worker.py").write_text(textwrap.dedent(WORKER), encoding="utf-8")
        monkeypatch.setattr(process, "WORKERS", tmp_path)
        arms: list[ProcessArm] = []

        def begin(**options) -> ProcessArm:
            arm = ProcessArm(
                Path(sys.executable),
                "worker.py",
                options,
                {},
                tmp_path / "log",
                concurrency=2,
                eos=[2],
                note="a worker",
                start_seconds=60,
            )
            arms.append(arm)
            return arm

        yield begin
        for arm in arms:
            arm.close()

    def test_a_block_goes_there_and_back_and_closing_ends_the_process(self, start) -> None:
        arm = start()
        result = arm.run([prompt(3), prompt(4)], 8)
        assert result.answers[3] == Answer((3, 4), 0.2, 0.1, 1)
        assert result.seconds == 0.5
        assert arm.note == "a worker, version 1.0"
        arm.close()
        assert arm._process.poll() is not None
        arm.close()

    def test_a_worker_that_cannot_start_tells_why(self, start) -> None:
        with pytest.raises(ArmUnavailableError, match="needs a package"):
            start(refuse="needs a package")

    def test_a_worker_that_dies_is_noticed(self, start) -> None:
        arm = start(die=True)
        with pytest.raises(ArmUnavailableError, match=r"ended with status 3|gone"):
            arm.run([prompt(0)], 8)


class TestEnvironment:
    def test_an_installation_that_fails_is_a_reason_and_is_not_taken_for_whole(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        calls: list[list[str]] = []

        def fake(command, **options):
            calls.append(command)
            failed = "install" in command
            return SimpleNamespace(returncode=int(failed), stderr="no matching distribution\n")

        monkeypatch.setattr("peer_arms.venv.subprocess.run", fake)
        with pytest.raises(ArmUnavailableError, match="no matching distribution"):
            ensure_venv(tmp_path / "venv")
        assert not (tmp_path / "venv" / ".complete").exists()
        assert not any("index-url" in word for call in calls for word in call)

    def test_vllm_sleeps_soon_after_its_last_work_and_stays_in_one_process(self, tmp_path: Path) -> None:
        found = vllm_environment(tmp_path)
        assert int(found["KMP_BLOCKTIME"]) <= 10
        assert found["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
        assert found["VLLM_CPU_KVCACHE_SPACE"] == "1"
