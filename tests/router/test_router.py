"""The router as the engine sees it: assignments, named domains, changes while serving, state."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from drafts.errors import InvalidValueError, UnknownNameError
from osd.types import Assignment, FinishReason, GenerationRequest, SamplingParams
from router.config import DomainConfig, RouterConfig
from router.mind.embed import Embedder
from router.mind.router import Router
from tests.router.fakes import WordEncoder, prompts, record

KINDS = {"alpha": "multiply the numbers", "beta": "select from table"}


def make(config: RouterConfig | None = None, **options) -> Router:
    domains = [DomainConfig(name=name, examples=tuple(prompts(words, 5))) for name, words in KINDS.items()]
    return Router(Embedder(WordEncoder()), config, domains, **options)


@pytest.fixture
def router():
    made = make()
    yield made
    made.close()


def request(text: str, domain: str | None = None) -> GenerationRequest:
    return GenerationRequest("r", (1,), SamplingParams(), text, domain=domain)


def same(one: Assignment, other: Assignment) -> bool:
    return (one.domain, one.runner_up, one.known) == (other.domain, other.runner_up, other.known) and abs(
        one.confidence - other.confidence
    ) < 1e-5


ODD = [
    "",
    "x",
    "\u200b",
    "word " * 20_000,
    "def f(x):\n    return x",
    "日本語のテキスト 🎉",
    "\x00\x01",
    "a" * 100_000,
]


def test_b15_the_decision_is_the_same_for_engine_and_command_line(router):
    texts = [
        *prompts(KINDS["alpha"], 80, 40),
        *prompts(KINDS["beta"], 80, 40),
        *prompts("paint my wall", 32),
        *ODD,
    ]
    for text in texts:
        assert same(router.assign(request(text)).result(), router.route(text))


def test_b17_the_decision_is_the_same_under_parallel_load(router):
    texts = prompts(KINDS["alpha"], 100, 40) + prompts("paint my wall", 100)
    alone = [router.route(text) for text in texts]
    with ThreadPoolExecutor(32) as threads:
        together = list(threads.map(lambda text: router.assign(request(text)).result(), texts))
    assert all(same(one, other) for one, other in zip(alone, together, strict=True))


@pytest.mark.parametrize("text", ["", " ", "\n", "\u200b"])
def test_b19_blank_text_goes_to_the_base_domain_and_teaches_nothing(router, text):
    assignment = router.route(text)
    assert (assignment.domain, assignment.known, assignment.confidence) == ("base", False, 1.0)
    router.take(record(text, assignment))
    router.flush()
    assert router.state()["pool"] == []


def test_b14_every_assignment_carries_a_score_between_zero_and_one(router):
    for text in [*prompts(KINDS["alpha"], 10, 40), *prompts("paint my wall", 10), *ODD]:
        assignment = router.route(text)
        assert 0.0 <= assignment.confidence <= 1.0
        assert assignment.known == (assignment.domain != "base")
        assert assignment.seconds >= 0.0


def test_unknown_requests_name_the_nearest_domain_as_runner_up(router):
    assignment = router.route("paint my wall with multiply")
    assert assignment.domain == "base"
    assert assignment.runner_up in KINDS


def test_a_named_domain_is_taken_as_it_is_and_an_unknown_one_lists_the_known(router):
    assignment = router.assign(request("select from table", domain="alpha")).result()
    assert (assignment.domain, assignment.confidence, assignment.known) == ("alpha", 1.0, True)
    assert router.assign(request("select from table", domain="base")).result().domain == "base"
    router.check_domain("base")
    with pytest.raises(UnknownNameError, match="alpha, base, beta"):
        router.check_domain("gamma")


def test_named_requests_do_not_found_or_widen_domains(router):
    before = router.state()
    for text in prompts("bake a cake with butter", 30):
        router.take(record(text, Assignment("alpha", 1.0, None, True), named="alpha"))
    router.flush()
    assert router.state() == before


def test_failed_and_cancelled_requests_teach_nothing(router):
    before = router.state()
    for finish in (FinishReason.ERROR, FinishReason.CANCELLED):
        router.take(record("paint my wall", Assignment(), finish=finish))
    router.flush()
    assert router.state() == before


def test_a_failing_embedder_sends_requests_to_base_and_never_raises(router):
    class Broken:
        dimension = 96

        def encode(self, texts):
            raise RuntimeError("Already borrowed")

    router.embedder.encoder = Broken()
    assert router.assign(request("never seen before")).result() == Assignment()
    router.take(record("never seen before either", Assignment()))
    router.flush()
    assert router.failures == 2


def test_after_close_requests_go_to_base():
    router = make()
    router.close()
    router.close()
    assert router.assign(request("multiply the numbers")).result() == Assignment()
    router.take(record("multiply the numbers"))


def test_b13_domains_come_and_go_while_serving(router):
    for name in KINDS:
        router.remove_domain(name)
    assert router.names() == ["base"]
    assert router.route("multiply the numbers").domain == "base"
    added = router.add_domain("gamma", description="paint the wall in a colour")
    assert added.origin == "registered"
    assert router.route("paint the wall in a colour").domain == "gamma"
    assert [domain.name for domain in router.domains()] == ["gamma"]


def test_bad_changes_of_domains_are_refused(router):
    for name in ("base", "Alpha", "", "a b", "x" * 65):
        with pytest.raises(InvalidValueError, match="name"):
            router.add_domain(name)
    with pytest.raises(InvalidValueError, match="yet"):
        router.add_domain("alpha")
    with pytest.raises(InvalidValueError, match="blank"):
        router.add_domain("gamma", examples=["fine", " "])
    with pytest.raises(InvalidValueError, match="always exists"):
        router.remove_domain("base")
    with pytest.raises(UnknownNameError):
        router.remove_domain("gamma")
    full = make(RouterConfig(max_domains=2))
    with pytest.raises(InvalidValueError, match="at most 2"):
        full.add_domain("gamma")
    full.close()


def test_confident_traffic_widens_a_domain_and_a_frozen_router_stays_as_it_is():
    for learn in (True, False):
        router = make(learn=learn)
        before = router.state()
        for text in prompts(KINDS["alpha"], 40, 100):
            router.take(record(text, router.route(text)))
        router.flush()
        assert (router.state() != before) == learn
        router.close()


def test_state_survives_a_restart_through_json():
    router = make()
    for text in [
        *prompts(KINDS["alpha"], 30, 100),
        *prompts("bake a cake with butter", 20),
        "a lonely question",
    ]:
        router.take(record(text, router.route(text)))
    router.add_domain("gamma", examples=["paint the wall"])
    state = json.loads(json.dumps(router.state()))
    texts = [
        *prompts(KINDS["alpha"], 20, 300),
        *prompts("bake a cake with butter", 20, 300),
        "paint the wall",
    ]
    answers = [router.route(text) for text in texts]
    names = router.names()
    router.close()
    assert len(names) == 5

    again = make()
    again.load_state(state)
    assert again.names() == [*names[:3], *sorted(names[3:], key=names.index)]
    assert all(same(one, again.route(text)) for one, text in zip(answers, texts, strict=True))
    assert again.state()["pool"] == state["pool"]
    again.close()


def test_state_of_a_declared_domain_that_the_config_no_longer_names_is_dropped():
    router = make()
    state = router.state()
    router.close()
    other = Router(
        Embedder(WordEncoder()), None, [DomainConfig(name="beta", examples=("select from table",))]
    )
    other.load_state(state)
    assert other.names() == ["base", "beta"]
    assert other.domains()[0].examples == ("select from table",)
    other.close()


def test_processor_time_is_counted(router):
    router.route("multiply the numbers of many things")
    assert router.processor_seconds > 0.0
