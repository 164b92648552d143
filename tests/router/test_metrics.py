from __future__ import annotations

from dataclasses import replace

from prometheus_client.parser import text_string_to_metric_families

from osd.types import FinishReason
from router.app.choices import Answers
from router.app.metrics import Metrics
from tests.router.fake_engine import FakeEngine


def samples(metrics: Metrics) -> dict[tuple[str, ...], float]:
    families = text_string_to_metric_families(metrics.page().decode())
    return {(s.name, *sorted(s.labels.values())): s.value for family in families for s in family.samples}


def test_counters_follow_completions_and_gauges_follow_the_engine() -> None:
    engine = FakeEngine()
    metrics = Metrics(engine)
    done = engine.submit("math please", max_tokens=10).result(10)
    metrics.take(Answers((done,)))
    metrics.take(Answers((replace(done, finish_reason=FinishReason.STOP, domain="code"),)))
    metrics.failed("busy")
    seen = samples(metrics)
    assert seen["polydraft:generation_tokens_total", "math"] == 10
    assert seen["polydraft:spec_decode_num_accepted_tokens_total", "math"] == done.accepted
    assert seen["polydraft:spec_decode_num_draft_tokens_total", "math"] == done.proposed
    assert seen["polydraft:spec_decode_num_drafts_total", "math"] == len(done.rounds)
    assert seen["polydraft:request_success_total", "length", "math"] == 1
    assert seen["polydraft:request_success_total", "code", "stop"] == 1
    assert seen["polydraft:request_failure_total", "busy"] == 1
    assert seen["polydraft:time_to_first_token_seconds_count", "math"] == 1
    assert seen["polydraft:draft_version", "math"] == 0
    assert seen["polydraft:draft_buffer", "math", "tokens"] == 12
    assert seen["polydraft:engine_ready",] == 1
    assert seen["polydraft:num_requests_running",] == seen["polydraft:num_requests_waiting",] == 0


def test_choices_are_counted_each_and_their_prompt_once() -> None:
    engine = FakeEngine()
    metrics = Metrics(engine)
    one, other = (engine.submit(prompt, max_tokens=4).result(10) for prompt in ("math", "more math"))
    metrics.take(Answers((one, one, other, other), per_prompt=2))
    seen = samples(metrics)
    assert seen["polydraft:prompt_tokens_total", "math"] == one.prompt_tokens + other.prompt_tokens
    assert seen["polydraft:generation_tokens_total", "math"] == 16
    assert seen["polydraft:request_success_total", "length", "math"] == 4


def test_a_removed_domain_loses_its_gauges_and_keeps_its_counters() -> None:
    engine = FakeEngine()
    metrics = Metrics(engine)
    metrics.take(Answers((engine.submit("math please", max_tokens=4).result(10),)))
    engine.remove_domain("math")
    seen = samples(metrics)
    assert ("polydraft:draft_version", "math") not in seen
    assert seen["polydraft:generation_tokens_total", "math"] == 4
