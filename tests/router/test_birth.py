"""Births: a new kind of traffic becomes a domain, once, and miscellany does not."""

from __future__ import annotations

import json

import numpy as np
import pytest

from router.app.resources import find_traffic
from router.config import BirthConfig, DomainConfig, RouterConfig, load_config
from router.mind.background import background_texts
from router.mind.birth import Birth, find_group
from router.mind.classify import Classifier
from router.mind.embed import Embedder, SentenceEncoder
from router.mind.naming import characteristic_terms, domain_name
from router.mind.router import Router
from tests.router.fakes import SUBJECTS, WordEncoder, prompts, record

KINDS = {"alpha": "multiply the numbers", "beta": "select from table"}
NEW = "bake a cake with butter"


def declared() -> list[DomainConfig]:
    return [DomainConfig(name=name, examples=tuple(prompts(words, 5))) for name, words in KINDS.items()]


def watched(domains: list[DomainConfig], config: RouterConfig | None = None) -> tuple[Router, list, list]:
    births: list[Birth] = []
    events: list = []
    router = Router(Embedder(WordEncoder()), config, domains, on_birth=births.append, on_event=events.append)
    return router, births, events


def feed(router: Router, texts: list[str]) -> list[str]:
    served = []
    for number, text in enumerate(texts):
        assignment = router.route(text)
        served.append(assignment.domain)
        router.take(record(text, assignment, request_id=f"r{number}"))
    router.flush()
    return served


def miscellany(count: int) -> list[str]:
    rng = np.random.default_rng(0)
    return [
        f"question{i} {' '.join(rng.choice(SUBJECTS, 2, replace=False))} about{i} and{i}"
        for i in range(count)
    ]


def test_dense_unknown_traffic_gives_birth_to_one_domain_that_serves_the_rest():
    router, births, events = watched(declared())
    mixed = [
        t for group in zip(prompts(NEW, 40), prompts(KINDS["alpha"], 40, 60), strict=True) for t in group
    ]
    served = feed(router, mixed)
    router.close()
    (birth,) = births
    assert served[0::2].index(birth.domain) <= 12
    assert set(served[0::2][12:]) == {birth.domain}
    assert set(served[1::2]) == {"alpha"}
    assert [event.kind for event in events] == ["birth"]
    assert router.names() == ["base", "alpha", "beta", birth.domain]


def test_a_birth_says_why_and_hands_over_its_founders_with_their_answers():
    router, births, _ = watched(declared())
    feed(router, prompts(NEW, 12))
    router.close()
    (birth,) = births
    assert set(birth.domain.split("-")) <= set(NEW.split())
    assert len(birth.members) >= 8
    assert all(item.output_ids == (4, 5) and item.prompt_ids == (1, 2, 3) for item in birth.members)
    assert set(birth.examples) <= set(prompts(NEW, 12))
    numbers = birth.event.numbers
    assert numbers["cohesion"] >= numbers["needed_cohesion"]
    assert numbers["size"] == len(birth.members)
    assert {"share", "nearest", "kinship", "terms", "examples"} <= set(numbers)
    json.dumps(numbers)


def test_miscellaneous_requests_give_no_birth():
    """Each prompt shares at most chance words; the stream is fixed, so this cannot fail by chance."""
    router, births, events = watched(declared())
    feed(router, miscellany(150))
    router.close()
    assert births == []
    assert events == []


def test_b20_the_same_prompt_a_hundred_times_is_one_birth():
    router, births, _ = watched([])
    feed(router, [f"{NEW} again"] * 100)
    router.close()
    assert len(births) == 1
    assert births[0].examples == (f"{NEW} again",)


@pytest.mark.parametrize("count", [0, 1, 2, 7])
def test_b20_too_few_requests_make_no_group(count):
    embedder = Embedder(WordEncoder())
    classifier = Classifier(embedder.embed_many(background_texts()))
    vectors = embedder.embed_many(prompts(NEW, count))
    assert find_group(vectors, classifier, BirthConfig()) is None


def test_the_fringe_of_a_domain_widens_it_and_is_no_birth():
    """Unknown only because the threshold is set high; akin to the domain all the same."""
    config = RouterConfig(unknown_threshold=0.999)
    router, births, events = watched(declared(), config)
    served = feed(router, prompts(KINDS["alpha"], 12, start=60))
    router.close()
    assert served[0] == "base"
    assert births == []
    assert events[0].kind == "widen"
    assert events[0].domain == "alpha"


def test_no_birth_beyond_max_domains_nor_where_births_are_off_nor_when_frozen():
    for config in (RouterConfig(max_domains=2), RouterConfig(birth=BirthConfig(enabled=False))):
        router, births, _ = watched(declared(), config)
        feed(router, prompts(NEW, 40))
        router.close()
        assert births == []
    frozen = Router(Embedder(WordEncoder()), None, declared(), learn=False, on_birth=births.append)
    feed(frozen, prompts(NEW, 40))
    frozen.close()
    assert births == []


def test_requests_that_may_not_be_stored_found_nothing():
    router, births, _ = watched(declared())
    for text in prompts(NEW, 30):
        router.take(record(text, router.route(text), store=False))
    router.flush()
    assert births == []
    assert router.state()["pool"] == []
    router.close()


def test_b24_a_name_is_never_given_twice():
    assert domain_name(["bake", "cake"], {"base", "bake-cake", "bake-cake-2"}) == "bake-cake-3"
    assert domain_name([], set()) == "topic"
    assert domain_name(["日本"], {"topic"}) == "topic-2"
    assert len(domain_name(["x" * 200, "y"], set())) <= 64


def test_names_come_from_what_sets_a_group_apart():
    terms = characteristic_terms(prompts(NEW, 10), [prompts("multiply the numbers", 10), background_texts()])
    assert set(terms[:2]) <= {"bake", "cake", "butter"}
    assert characteristic_terms(["12 34", "--"], []) == []


@pytest.mark.real_models
def test_recipes_are_born_from_the_demo_traffic_within_twenty_requests_and_nothing_else_is():
    """Measured: born at the 8th recipe; 8 requests of delay here, as with 8 slots."""
    births: list[Birth] = []
    config = load_config("demo", {})
    router = Router(Embedder(SentenceEncoder()), config.router, config.domains, on_birth=births.append)
    with open(find_traffic("mixed"), encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    recipes, born_at, pending = 0, None, []
    for row in rows:
        assignment = router.route(row["prompt"])
        recipes += row["domain"] == "recipes"
        pending.append(record(row["prompt"], assignment))
        if len(pending) > 8:
            router.take(pending.pop(0))
        router.flush()
        if births and born_at is None:
            born_at = recipes
    router.close()
    assert len(births) == 1
    assert born_at is not None
    assert born_at <= 20
    assert "recipe" in births[0].domain
