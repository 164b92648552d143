"""The engine emits the target's own tokens, whatever is proposed and whoever shares the batch."""

import itertools
import random

import pytest

from drafts.errors import BusyError
from osd.types import FinishReason
from tests.osd.engine_rig import (
    Client,
    Forced,
    check_counters,
    check_kept,
    greedy,
    make_engine,
    prompts,
    target,
)
from tests.tiny import VOCAB

KINDS = ["llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3"]


def pattern(truth: dict[tuple[int, ...], list[int]], marks: str):
    """Proposes right (R) and wrong (W) tokens in a cycling pattern; ``-`` ends a proposal."""
    cycle = itertools.cycle(marks.split())

    def script(row, limit):
        answer = truth[tuple(row.tokens[: row.prompt_length])]
        at, proposed = row.output_length, []
        for mark in next(cycle):
            if mark == "-" or at >= len(answer):
                break
            proposed.append(answer[at] if mark == "R" else (answer[at] + 1) % VOCAB)
            at += 1
        return proposed

    return script


@pytest.mark.parametrize("kind", KINDS)
def test_a10_a25_every_family_is_decoded_exactly_alone_and_in_a_batch(kind):
    asked = prompts(5, seed=3, lengths=(1, 2, 17, 40, 9))
    truth = {tuple(p): greedy(p, 16, kind) for p in asked}
    engine = make_engine(Forced(pattern(truth, "RRR RWR W RRRR -")), kind)
    client = Client(engine)
    for index, prompt in enumerate(asked):
        client.submit(str(index), prompt, max_tokens=16)
    assert client.run() == {str(i): tuple(truth[tuple(p)]) for i, p in enumerate(asked)}


@pytest.mark.parametrize("marks", ["RRR", "RRW", "RWR", "WWW", "RRRR", "-", "RRRR WWWW - RW"])
def test_a10_no_pattern_of_right_and_wrong_drafts_changes_the_text(marks):
    prompt = prompts(1, seed=11, lengths=(7,))[0]
    truth = {tuple(prompt): greedy(prompt, 64)}
    client = Client(make_engine(Forced(pattern(truth, marks))))
    client.submit("a", prompt, max_tokens=64)
    assert client.run()["a"] == tuple(truth[tuple(prompt)])


def test_a12_a25_rows_of_all_lengths_joining_and_leaving_do_not_mix():
    asked = prompts(16, seed=5, lengths=(1, 2, 17, 60, 110))
    truth = {tuple(p): greedy(p, 20) for p in asked}
    rng = random.Random(0)

    def script(row, limit):
        answer = truth[tuple(row.tokens[: row.prompt_length])]
        right = answer[row.output_length : row.output_length + rng.randrange(5)]
        return [t if rng.random() < 0.7 else rng.randrange(VOCAB) for t in right]

    client = Client(make_engine(Forced(script), slots=5, prefill_chunk=13))
    for index, prompt in enumerate(asked):
        client.submit(str(index), prompt, max_tokens=3 + index)
        client.engine.step()
        client.engine.check()
    got = client.run()
    assert got == {str(i): tuple(truth[tuple(p)][: 3 + i]) for i, p in enumerate(asked)}


@pytest.mark.parametrize("at", range(1, 6))
def test_a01_an_end_token_anywhere_in_a_block_ends_the_answer(at):
    prompt = prompts(1, seed=20)[0]
    answer = greedy(prompt, 24, stop=())
    index = next(i for i in range(5, 20) if answer[i] not in answer[:i])
    end, start = answer[index], index - at + 1

    class Patched:
        def __getattr__(self, name):
            return frozenset({end}) if name == "eos_token_ids" else getattr(target(), name)

    def script(row, limit):
        count = 4 if row.output_length >= start else 0
        return answer[row.output_length : row.output_length + count]

    client = Client(make_engine(Forced(script), target=Patched()))
    client.submit("a", prompt)
    assert client.run()["a"] == tuple(answer[: index + 1])
    outcome = client.outcomes["a"]
    assert outcome.record.finish is FinishReason.STOP
    assert client.texts["a"] == outcome.text


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 5])
def test_a06_never_more_than_max_tokens(limit):
    prompt = prompts(1, seed=21)[0]
    truth = {tuple(prompt): greedy(prompt, 24, stop=())}
    client = Client(make_engine(Forced(pattern(truth, "RRRR"))))
    client.submit("a", prompt, max_tokens=limit, ignore_eos=True)
    assert client.run()["a"] == tuple(truth[tuple(prompt)][:limit])
    record = client.outcomes["a"].record
    assert record.finish is FinishReason.LENGTH
    assert sum(r.proposed for r in record.rounds) <= max(limit - 2, 0)


def test_a09_without_end_tokens_an_answer_runs_to_its_limit():
    prompt = prompts(1, seed=22)[0]
    client = Client(make_engine(Forced(lambda row, limit: row.tokens[:4])))
    client.submit("a", prompt, max_tokens=40, ignore_eos=True)
    assert client.run()["a"] == tuple(greedy(prompt, 40, stop=()))


@pytest.mark.parametrize("sampling", [{"temperature": 0.8}, {"temperature": 1.0, "top_p": 0.9, "top_k": 20}])
def test_a15_a_seed_gives_one_text_whatever_the_drafts_do_and_whoever_is_beside(sampling):
    prompt, *others = prompts(8, seed=30)
    alone = Client(make_engine())
    alone.submit("a", prompt, seed=42, **sampling)
    expected = alone.run()["a"]
    truth = {tuple(prompt): list(expected)}
    texts = set()
    for k, marks in itertools.product([0, 1, 2, 4], ["RRRR", "WWWW", "RW RRW -"]):
        script = pattern(truth, marks)
        source = Forced(
            lambda row, limit, script=script: script(row, limit) if row.request_id == "a" else [5, 6]
        )
        client = Client(make_engine(source, fixed_k=k))
        for index, other in enumerate(others):
            client.submit(f"o{index}", other, temperature=1.0, seed=index)
        client.submit("a", prompt, seed=42, **sampling)
        texts.add(client.run()["a"])
    assert texts == {expected}


def test_a15_unseeded_requests_differ():
    prompt = prompts(1, seed=31)[0]
    client = Client(make_engine())
    for index in range(20):
        client.submit(str(index), prompt, temperature=1.5)
    assert len(set(client.run().values())) >= 15


def test_cancelling_frees_the_slot_in_the_same_step_and_harms_no_neighbour():
    asked = prompts(5, seed=40)
    client = Client(make_engine(slots=4))
    for index, prompt in enumerate(asked):
        client.submit(str(index), prompt, max_tokens=30, ignore_eos=True)
    for _ in range(5):
        client.engine.step()
    client.engine.intake.cancel("1")
    client.engine.intake.cancel("4")
    client.engine.step()
    client.engine.check()
    assert client.outcomes["1"].record.finish is FinishReason.CANCELLED
    assert client.outcomes["4"].record.finish is FinishReason.CANCELLED
    assert len(client.engine.rows) == 3
    got = client.run()
    for index in (0, 2, 3):
        assert got[str(index)] == tuple(greedy(asked[index], 30, stop=()))


def test_a18_a_row_without_finite_logits_fails_alone():
    asked = prompts(3, seed=41)

    class Broken:
        passes = 0

        def __getattr__(self, name):
            return getattr(target(), name)

        def forward(self, cache, rows):
            output = target().forward(cache, rows)
            self.passes += 1
            if self.passes == 6:
                logits = output.logits.clone()
                logits[output.offsets[1]] = float("nan")
                output = type(output)(logits, output.offsets)
            return output

    client = Client(make_engine(target=Broken()))
    for index, prompt in enumerate(asked):
        client.submit(str(index), prompt, ignore_eos=True)
    got = client.run()
    assert client.outcomes["1"].record.finish is FinishReason.ERROR
    assert client.outcomes["1"].error.status == 500
    for index in (0, 2):
        assert got[str(index)] == tuple(greedy(asked[index], 24, stop=()))


def test_a_step_that_fails_answers_its_requests_and_the_engine_goes_on():
    prompt = prompts(1, seed=42)[0]

    class Failing:
        broken = True

        def __getattr__(self, name):
            return getattr(target(), name)

        def forward(self, cache, rows):
            if self.broken:
                raise RuntimeError("out of memory")
            return target().forward(cache, rows)

    events = []
    failing = Failing()
    client = Client(make_engine(target=failing, on_event=events.append))
    client.submit("a", prompt)
    client.run()
    assert client.outcomes["a"].record.finish is FinishReason.ERROR
    assert "out of memory" in str(client.outcomes["a"].error)
    assert [event.kind for event in events] == ["step_failed"]
    failing.broken = False
    client.submit("b", prompt)
    assert client.run()["b"] == tuple(greedy(prompt, 24))


def test_a_full_queue_says_busy():
    client = Client(make_engine(queue=2))
    for index in range(2):
        client.submit(str(index), [5, 6])
    with pytest.raises(BusyError, match="queue is full"):
        client.submit("2", [5, 6])
    assert len(client.run()) == 2


def test_a05_counters_agree_with_the_tokens():
    asked = prompts(6, seed=43, lengths=(4, 30))
    truth = {tuple(p): greedy(p, 24) for p in asked}
    client = Client(make_engine(Forced(pattern(truth, "RRWR RR W")), prefill_chunk=8))
    for index, prompt in enumerate(asked):
        client.submit(str(index), prompt)
    client.run()
    for outcome in client.outcomes.values():
        check_counters(outcome.record)
    assert sum(o.record.seconds for o in client.outcomes.values()) <= client.engine.busy_seconds


def test_evidence_and_features_are_the_targets_own():
    prompt = prompts(1, seed=44)[0]
    truth = {tuple(prompt): greedy(prompt, 16, stop=())}
    source = Forced(pattern(truth, "RRW RRRR W"))
    source.needs_features = True
    records = []

    class Taker:
        def take(self, record):
            records.append(record)

    client = Client(make_engine(source, evidence_k=8, observers=[Taker()]))
    client.submit("a", prompt, max_tokens=16, ignore_eos=True)
    client.run()
    check_kept(records[0], prompt)


def test_prefill_is_chunked_so_that_running_rows_go_on():
    short, long = prompts(2, seed=45, lengths=(3, 100))
    client = Client(make_engine(prefill_chunk=10))
    client.submit("short", short, max_tokens=30, ignore_eos=True)
    client.engine.step()
    client.submit("long", long, max_tokens=4, ignore_eos=True)
    before = client.engine.rows[0].draft.output_length
    for _ in range(5):
        client.engine.step()
        client.engine.check()
    assert client.engine.rows[0].draft.output_length == before + 5
    assert not client.engine.rows[1].decoding
    got = client.run()
    assert got["long"] == tuple(greedy(long, 4, stop=()))


def test_an_undecided_router_delays_nothing_and_the_base_domain_serves():
    from concurrent.futures import Future

    from osd.types import Assignment

    pending: Future[Assignment] = Future()

    class Slow:
        def assign(self, request):
            return pending

    seen = []
    source = Forced(lambda row, limit: seen.append(row.domain) or [])
    client = Client(make_engine(source, assigner=Slow()))
    client.submit("a", [5, 6, 7], ignore_eos=True)
    for _ in range(4):
        client.engine.step()
    assert set(seen) == {"base"}
    pending.set_result(Assignment("math", 0.9, None, True))
    client.run()
    assert seen[-1] == "math"
    record = client.outcomes["a"].record
    assert record.domain == "math"
    assert record.routing_wait > 0
