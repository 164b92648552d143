"""A request's life: it waits, enters, ends in time, leaves, fails; and no other request notices."""

import math
from concurrent.futures import Future

import pytest
import torch

from drafts.errors import ContextLengthError, IntegrityError, InvalidValueError
from osd.serve.intake import Intake
from osd.serve.row import Submission
from osd.types import Assignment, FinishReason, GenerationRequest, SamplingParams
from tests.osd.engine_rig import Client, Forced, greedy, make_engine, prompts, target
from tests.tiny import VOCAB

P = prompts(6, seed=50)


def finish(client: Client, name: str) -> FinishReason:
    return client.outcomes[name].record.finish


def check_exact(client: Client, names: str, count: int = 24) -> None:
    for name in names:
        assert client.outcomes[name].record.output_ids == tuple(greedy(P[int(name)], count, stop=()))


class Wrapped:
    """The tiny target with another forward."""

    def __init__(self, forward):
        self.forward = forward

    def __getattr__(self, name):
        return getattr(target(), name)


# Admission


def test_rows_enter_by_tokens_in_order_and_nobody_overtakes():
    client = Client(make_engine(max_tokens_in_flight=100, slots=4))
    for index, limit in enumerate((45, 60, 5, 5)):
        client.submit(str(index), P[index], max_tokens=limit, ignore_eos=True)
    client.engine.step()
    client.engine.check()
    assert [row.draft.request_id for row in client.engine.rows] == ["0"], "2 and 3 fit but wait behind 1"
    client.run()
    assert list(client.outcomes) == ["0", "2", "3", "1"]
    check_exact(client, "0", 45)
    check_exact(client, "1", 60)


def test_what_could_never_fit_is_refused_at_once_with_both_numbers():
    client = Client(make_engine(max_tokens_in_flight=20))
    with pytest.raises(InvalidValueError, match=r"max_tokens: got 16; .*5 tokens at most 15.* share 20"):
        client.submit("a", P[0], max_tokens=16)
    client.submit("b", P[0], max_tokens=15, ignore_eos=True)
    assert len(client.run()["b"]) == 15


def test_the_audit_sees_more_reserved_than_there_is():
    client = Client(make_engine())
    client.submit("0", P[0], ignore_eos=True)
    client.engine.step()
    client.engine.requests.admission.max_tokens = 20
    with pytest.raises(IntegrityError, match="1 rows reserve 29 tokens, allowed are 4 and 20"):
        client.engine.check()


def test_b11_prompts_at_the_context_are_refused_with_both_numbers_and_the_longest_one_gets_one_token():
    client = Client(make_engine(Forced(lambda row, limit: row.tokens[:4]), max_length=64))
    for length in (64, 65, 500):
        with pytest.raises(ContextLengthError, match=rf"{length} tokens.*at most 63.*share 64"):
            client.submit("over", list(range(3, 67)) * (length // 64) + [5] * (length % 64))
    with pytest.raises(InvalidValueError, match="at least one token"):
        client.submit("empty", [])
    prompt = prompts(1, seed=51, lengths=(63,))[0]
    client.submit("full", prompt, max_tokens=100, ignore_eos=True)
    client.submit("near", prompt[:59], max_tokens=100, ignore_eos=True)
    client.submit("0", P[0], ignore_eos=True)
    got = client.run()
    assert got["full"] == tuple(greedy(prompt, 1, stop=()))
    assert got["near"] == tuple(greedy(prompt[:59], 5, stop=()))
    assert finish(client, "full") is finish(client, "near") is FinishReason.LENGTH
    check_exact(client, "0")


# Deadlines


def test_a_deadline_ends_a_waiting_and_a_running_request_at_the_next_border():
    now = [100.0]
    client = Client(make_engine(slots=2, clock=lambda: now[0]))
    client.submit("0", P[0], arrived=100.0, timeout=5.0, ignore_eos=True)
    client.submit("1", P[1], arrived=100.0, ignore_eos=True)
    client.submit("2", P[2], arrived=100.0, timeout=4.0, ignore_eos=True)
    client.submit("3", P[3], arrived=100.0, timeout=60.0, ignore_eos=True)
    for _ in range(6):
        client.engine.step()
    now[0] = 104.0
    client.engine.step()
    assert finish(client, "2") is FinishReason.TIMEOUT
    assert client.outcomes["2"].record.output_ids == ()
    assert client.outcomes["2"].error is None
    now[0] = 105.0
    client.engine.step()
    client.engine.check()
    assert finish(client, "0") is FinishReason.TIMEOUT
    assert client.outcomes["0"].record.output_ids == tuple(greedy(P[0], 7, stop=()))
    assert client.texts["0"] == client.outcomes["0"].text
    assert [row.draft.request_id for row in client.engine.rows] == ["1", "3"], "the slot is taken at once"
    client.run()
    check_exact(client, "13")


def test_min_tokens_is_cut_with_max_tokens_where_a_slot_holds_less():
    client = Client(make_engine(max_length=16))
    client.submit("0", P[0], max_tokens=100, min_tokens=50, ignore_eos=True)
    client.run()
    assert client.outcomes["0"].record.request.sampling.min_tokens == 11
    check_exact(client, "0", 11)


def test_the_engines_own_time_limit_holds_where_a_request_sets_none():
    now = [100.0]
    client = Client(make_engine(request_timeout=10.0, clock=lambda: now[0], prefill_chunk=3))
    client.submit("0", P[0], arrived=100.0, ignore_eos=True)
    client.submit("1", P[1], arrived=100.0, timeout=20.0, ignore_eos=True)
    client.engine.step()
    now[0] = 110.0
    client.engine.step()
    assert finish(client, "0") is FinishReason.TIMEOUT
    assert client.outcomes["0"].record.rounds == (), "it ended in its prefill"
    client.run()
    check_exact(client, "1")


def test_the_intake_looks_for_late_submissions_only_when_one_can_be_late():
    intake = Intake(8)
    for name, timeout in (("a", 5.0), ("b", None), ("c", 2.0)):
        request = GenerationRequest(name, (1,), SamplingParams(timeout=timeout), arrived=10.0)
        intake.put(Submission(request, lambda *_: None, lambda *_: None))
    assert intake.take_expired(11.9) == []
    assert [item.request.request_id for item in intake.take_expired(12.0)] == ["c"]
    assert [item.request.request_id for item in intake.take_expired(1e9)] == ["a"]
    assert intake._first_deadline == math.inf
    assert len(intake) == 1


# Cancellation


def test_a_slot_freed_by_a_cancellation_is_taken_in_that_very_step():
    client = Client(make_engine(slots=1, prefill_chunk=3))
    for name in "01":
        client.submit(name, P[int(name)], ignore_eos=True)
    client.engine.step()
    assert not client.engine.rows[0].decoding, "still in its prefill"
    client.engine.intake.cancel("0")
    client.engine.intake.cancel("0")
    client.engine.intake.cancel("nobody")
    client.engine.step()
    client.engine.check()
    assert finish(client, "0") is FinishReason.CANCELLED
    assert [row.draft.request_id for row in client.engine.rows] == ["1"]
    assert client.engine.rows[0].processed == 3
    client.run()
    check_exact(client, "1")


def test_unknown_cancellations_are_forgotten_and_hit_no_later_request():
    client = Client(make_engine())
    for index in range(100):
        client.engine.intake.cancel(f"x{index}")
    client.engine.intake.cancel("0")
    client.engine.step()
    assert not client.engine.intake._cancelled
    client.submit("0", P[0], ignore_eos=True)
    client.engine.intake.cancel("1")
    client.submit("1", P[1], ignore_eos=True)
    client.run()
    check_exact(client, "0")
    assert finish(client, "1") is FinishReason.CANCELLED, "before the next border the order does not matter"


# Failures


def test_the_row_that_breaks_a_pass_ends_and_its_neighbours_go_on():
    def forward(cache, rows):
        if any(row.tokens[-1] == poison for row in rows):
            raise RuntimeError("bad row")
        return target().forward(cache, rows)

    poison = greedy(P[1], 6, stop=())[-1]
    assert all(poison not in greedy(P[i], 24, stop=())[:-1] and poison != P[i][-1] for i in (0, 2))
    events = []
    source = Forced(lambda row, limit: [])
    client = Client(make_engine(source, target=Wrapped(forward), on_event=events.append))
    for name in "012":
        client.submit(name, P[int(name)], ignore_eos=True)
    client.run()
    assert finish(client, "1") is FinishReason.ERROR
    assert "bad row" in str(client.outcomes["1"].error)
    check_exact(client, "02")
    assert [(event.kind, event.numbers) for event in events] == [("step_failed", {"rows": 3, "failed": 1})]


def test_a_pass_that_fails_once_costs_no_request_anything():
    passes = []

    def forward(cache, rows):
        passes.append(len(rows))
        if len(passes) in (1, 6):
            raise RuntimeError("a hiccup")
        return target().forward(cache, rows)

    right = {tuple(P[i]): greedy(P[i], 24, stop=()) for i in range(3)}
    source = Forced(lambda row, limit: right[tuple(row.tokens[:5])][row.output_length :][:2])
    client = Client(make_engine(source, target=Wrapped(forward)))
    for name in "012":
        client.submit(name, P[int(name)], ignore_eos=True)
    client.run()
    check_exact(client, "012")
    assert all(sum(item.accepted for item in client.outcomes[name].record.rounds) == 15 for name in "012")


@pytest.mark.parametrize("verification", ["invariant", "rejection"])
def test_a_row_that_cannot_be_verified_ends_alone(verification):
    penalised = Client(make_engine())
    penalised.submit("3", P[3], ignore_eos=True, repetition_penalty=1.1)
    expected = penalised.run()["3"]
    client = Client(make_engine())
    client.engine.settings.verification = verification
    for name in "0123":
        temperature = 0.8 if name == "1" else 0.0
        penalty = 1.1 if name in "13" else 1.0
        client.submit(
            name, P[int(name)], ignore_eos=True, temperature=temperature, seed=1, repetition_penalty=penalty
        )
    client.engine.step()

    class Noise:
        def __getattr__(self, name):
            raise ArithmeticError("no noise left")

    client.engine.rows[1].noise = Noise()
    client.run()
    assert finish(client, "1") is FinishReason.ERROR
    assert "no noise left" in str(client.outcomes["1"].error)
    check_exact(client, "02")
    assert client.outcomes["3"].record.output_ids == expected


def test_an_argmax_that_fails_spares_the_rows_that_need_none(monkeypatch):
    alone = Client(make_engine())
    alone.submit("1", P[1], ignore_eos=True, repetition_penalty=1.1)
    expected = alone.run()["1"]
    client = Client(make_engine())
    client.submit("0", P[0], ignore_eos=True)
    client.submit("1", P[1], ignore_eos=True, repetition_penalty=1.1)
    client.engine.step()

    def fail(logits, sampled):
        raise RuntimeError("no argmax")

    monkeypatch.setattr("osd.serve.verify._answers", fail)
    client.run()
    assert "no argmax" in str(client.outcomes["0"].error)
    assert client.outcomes["1"].record.output_ids == expected


@pytest.mark.parametrize("where", ["prune", "allowed"])
def test_a_grammar_that_raises_costs_others_nothing(where):
    client = Client(make_engine(Forced(lambda row, limit: [5, 6, 7])))
    for name in "01":
        client.submit(name, P[int(name)], ignore_eos=True, min_tokens=int(name == "1"))
    client.engine.step()

    class Broken:
        def prune(self, proposal):
            raise RuntimeError("no grammar left")

        def allowed(self):
            if where == "allowed":
                raise RuntimeError("no grammar left")
            return torch.ones(VOCAB, dtype=torch.bool), False

        def advance(self, token):
            pass

    client.engine.rows[1].processor.grammar = Broken()
    client.run()
    check_exact(client, "0" if where == "allowed" else "01")
    if where == "allowed":
        assert finish(client, "1") is FinishReason.ERROR
        assert "no grammar left" in str(client.outcomes["1"].error)


@pytest.mark.parametrize("where", ["on_tokens", "on_done", "tokenizer"])
def test_a_receiver_or_tokenizer_that_raises_ends_its_own_request_only(where):
    client = Client(make_engine())
    ended = []

    def fail(*_):
        raise RuntimeError("gone")

    request = GenerationRequest("bad", tuple(P[1]), SamplingParams(max_tokens=24, ignore_eos=True))
    on_tokens = fail if where == "on_tokens" else lambda *_: None
    on_done = fail if where == "on_done" else ended.append
    client.engine.intake.put(Submission(request, on_tokens, on_done))
    for name in "02":
        client.submit(name, P[int(name)], ignore_eos=True)
    client.engine.step()
    if where == "tokenizer":
        client.engine.rows[0].output.push = fail
    client.run()
    check_exact(client, "02")
    assert [outcome.record.finish for outcome in ended] == ([] if where == "on_done" else ["error"])


def test_a_draft_that_raises_anywhere_costs_no_token():
    class Broken:
        needs_features = False
        version = staticmethod(lambda domain: 0)

        def __getattr__(self, name):
            def fail(*_):
                raise RuntimeError(name)

            return fail

    class Short(Broken):
        propose = staticmethod(lambda rows, limits, price: [])

    for broken in (Broken(), Short()):
        client = Client(make_engine(drafter=broken))
        for name in "01":
            client.submit(name, P[int(name)], ignore_eos=True)
        client.run()
        check_exact(client, "01")


@pytest.mark.parametrize("how", ["raises", "fails", "is cancelled"])
def test_a_router_that_fails_leaves_the_request_to_the_base_domain(how):
    class Router:
        def assign(self, request):
            future: Future[Assignment] = Future()
            if how == "raises":
                raise RuntimeError("no router")
            future.set_exception(RuntimeError("no router")) if how == "fails" else future.cancel()
            return future

    client = Client(make_engine(assigner=Router()))
    client.submit("0", P[0], ignore_eos=True)
    client.run()
    check_exact(client, "0")
    assert client.outcomes["0"].record.domain == "base"


def test_an_observer_or_learner_that_raises_stops_no_request_and_the_other_observers_are_told():
    class Bad:
        def take(self, record):
            raise RuntimeError("disk full")

        def work(self, busy, idle):
            raise RuntimeError("learner")

    class Good:
        taken = 0

        def take(self, record):
            self.taken += 1

    good, events = Good(), []
    client = Client(make_engine(observers=[Bad(), good], worker=Bad(), on_event=events.append))
    for name in "01":
        client.submit(name, P[int(name)], ignore_eos=True)
    client.run()
    check_exact(client, "01")
    assert good.taken == 2
    assert [event.kind for event in events] == ["work_stopped"]


def test_a_request_that_cannot_start_is_answered_and_takes_no_slot():
    client = Client(make_engine())
    client.submit("bad", P[0], stop=("",))
    client.submit("1", P[1], ignore_eos=True)
    client.run()
    assert finish(client, "bad") is FinishReason.ERROR
    assert "stop[0]" in str(client.outcomes["bad"].error)
    check_exact(client, "1")
    assert client.engine.cache.free == 4
