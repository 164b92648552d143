"""Token trees: verified in one pass, the accepted path kept, the text the target's own."""

import pytest

from tests.osd.engine_rig import (
    Branching,
    Client,
    Forced,
    check_counters,
    check_kept,
    greedy,
    make_engine,
    prompts,
    target,
)
from tests.osd.test_engine import KINDS, pattern


def count_trees(engine) -> dict[str, int]:
    """Counts proposals that branch, and accepted paths that were not the first branch."""
    seen = {"verified": 0, "second": 0}
    propose, commit = engine.drafter.propose, engine.cache.commit_path

    def watched(rows, limits, price):
        found = propose(rows, limits, price)
        seen["verified"] += sum(not proposal.is_chain for proposal in found)
        return found

    def committed(row, start, kept):
        seen["second"] += kept != list(range(len(kept)))
        commit(row, start, kept)

    engine.drafter.propose, engine.cache.commit_path = watched, committed
    return seen


@pytest.mark.parametrize("kind", KINDS)
def test_a10_a25_trees_leave_every_family_exact_alone_and_in_a_batch(kind):
    asked = prompts(5, seed=3, lengths=(1, 2, 17, 40, 9))
    truth = {tuple(p): greedy(p, 24, kind) for p in asked}
    engine = make_engine(Branching(pattern(truth, "RRR RWR W RRRR -")), kind, fixed_k=None)
    client = Client(engine)
    trees = count_trees(engine)
    for index, prompt in enumerate(asked):
        client.submit(str(index), prompt, max_tokens=24)
    assert client.run() == {str(i): tuple(truth[tuple(p)]) for i, p in enumerate(asked)}
    assert trees["verified"] > 5
    assert trees["second"] > 0


@pytest.mark.parametrize("sampling", [{"temperature": 0.8}, {"temperature": 1.0, "top_p": 0.9, "top_k": 20}])
def test_a15_a_seed_gives_one_text_under_chains_and_trees(sampling):
    prompt, *others = prompts(6, seed=30)
    alone = Client(make_engine())
    alone.submit("a", prompt, seed=42, max_tokens=40, **sampling)
    expected = alone.run()["a"]
    truth = {tuple(prompt): list(expected)}
    for marks in ("RRRR", "RW RRW -", "WWWW"):
        script = pattern(truth, marks)
        source = Branching(
            lambda row, limit, script=script: script(row, limit) if row.request_id == "a" else [5, 6]
        )
        client = Client(make_engine(source, fixed_k=None))
        for index, other in enumerate(others):
            client.submit(f"o{index}", other, temperature=1.0, seed=index)
        client.submit("a", prompt, seed=42, max_tokens=40, **sampling)
        assert client.run()["a"] == expected


def test_features_and_evidence_follow_the_accepted_path():
    prompt = prompts(1, seed=44)[0]
    truth = {tuple(prompt): greedy(prompt, 24, stop=())}
    source = Branching(pattern(truth, "RRR RRRR RR"))
    source.needs_features = True
    records = []

    class Taker:
        def take(self, record):
            records.append(record)

    engine = make_engine(source, evidence_k=8, observers=[Taker()], fixed_k=None)
    trees = count_trees(engine)
    client = Client(engine)
    client.submit("a", prompt, max_tokens=24, ignore_eos=True)
    client.run()
    assert trees["second"] > 0
    check_kept(records[0], prompt)


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 5])
def test_a06_a_tree_never_emits_more_than_asked_nor_overruns_the_cache(limit):
    prompt = prompts(1, seed=21)[0]
    truth = {tuple(prompt): greedy(prompt, 24, stop=())}
    engine = make_engine(Branching(pattern(truth, "RRRR")), fixed_k=None, max_length=len(prompt) + limit)
    trees = count_trees(engine)
    client = Client(engine)
    client.submit("a", prompt, max_tokens=limit, ignore_eos=True)
    assert client.run()["a"] == tuple(truth[tuple(prompt)][:limit])
    assert (trees["verified"] > 0) == (limit > 2)


@pytest.mark.parametrize("source", [Forced, Branching])
def test_a_request_may_cap_its_depth_or_turn_speculation_off(source):
    prompt = prompts(1, seed=11, lengths=(7,))[0]
    truth = {tuple(prompt): greedy(prompt, 40, stop=())}
    for cap in (0, 1, 2):
        client = Client(make_engine(source(pattern(truth, "RRRR")), fixed_k=None))
        client.submit("a", prompt, max_tokens=40, ignore_eos=True, k=cap)
        assert client.run()["a"] == tuple(truth[tuple(prompt)])
        rounds = client.outcomes["a"].record.rounds
        assert max(r.accepted for r in rounds) == cap
        assert max(r.emitted for r in rounds) == cap + 1


def test_a05_counters_of_trees_agree_with_the_tokens():
    asked = prompts(6, seed=43, lengths=(4, 30))
    truth = {tuple(p): greedy(p, 24) for p in asked}
    client = Client(make_engine(Branching(pattern(truth, "RRWR RR W")), prefill_chunk=8, fixed_k=None))
    for index, prompt in enumerate(asked):
        client.submit(str(index), prompt)
    client.run()
    for outcome in client.outcomes.values():
        check_counters(outcome.record)


def test_a_failed_step_with_drafts_ends_its_requests_and_the_next_ones_are_served():
    prompt = prompts(1, seed=42)[0]
    truth = {tuple(prompt): greedy(prompt, 24)}

    class Failing:
        passes = 0

        def __getattr__(self, name):
            return getattr(target(), name)

        def forward(self, cache, rows):
            self.passes += 1
            if self.passes in (3, 4):  # the step, and then the row alone
                raise RuntimeError("out of memory")
            return target().forward(cache, rows)

    client = Client(make_engine(Branching(pattern(truth, "RR")), target=Failing(), fixed_k=None))
    client.submit("a", prompt)
    client.run()
    assert "out of memory" in str(client.outcomes["a"].error)
    client.submit("b", prompt)
    assert client.run()["b"] == tuple(truth[tuple(prompt)])


@pytest.mark.parametrize("harm", ["guesses", "finish", "token"])
def test_a_draft_that_fails_harms_no_answer(harm):
    asked = prompts(3, seed=8)
    truth = {tuple(p): greedy(p, 12, stop=()) for p in asked}

    class Harmful(Branching):
        def guesses(self, row, path):
            if row.request_id == "0" and harm == "guesses":
                raise ValueError("boom")
            if row.request_id == "0" and harm == "token":
                return [(10**9, 0.9)]
            return super().guesses(row, path)

        def finish(self, row):
            if harm == "finish":
                raise ValueError("boom")

    client = Client(make_engine(Harmful(pattern(truth, "RRR")), fixed_k=None))
    for index, prompt in enumerate(asked):
        client.submit(str(index), prompt, max_tokens=12, ignore_eos=True)
    assert client.run() == {str(i): tuple(truth[tuple(p)]) for i, p in enumerate(asked)}
    assert not client.engine.rows
