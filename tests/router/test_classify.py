"""The classifier: few or no examples, unknown requests, thresholds, bounded refinement."""

from __future__ import annotations

import json

import numpy as np
import pytest

from drafts.errors import InvalidValueError, UnknownNameError
from router.app.resources import find_traffic
from router.config import load_config
from router.mind.background import background_texts
from router.mind.classify import NO_DOMAIN, Classifier
from router.mind.embed import Embedder, SentenceEncoder
from router.mind.prototype import Prototype, cohesion
from tests.router.fakes import DIMENSION, WordEncoder, prompts

EMBEDDER = Embedder(WordEncoder())
BACKGROUND = EMBEDDER.embed_many(background_texts())


def classifier(**options) -> Classifier:
    made = Classifier(BACKGROUND, **options)
    made.add("alpha", EMBEDDER.embed_many(prompts("multiply the numbers", 5)))
    made.add("beta", EMBEDDER.embed_many(prompts("select from table", 5)))
    return made


def test_requests_go_to_the_domain_of_their_kind_and_others_to_none():
    made = classifier()
    for text in prompts("multiply the numbers", 20, start=50):
        verdict = made.classify(EMBEDDER.embed(text))
        assert (verdict.domain, verdict.runner_up, verdict.known) == ("alpha", "beta", True)
    others = [f"paint my kitchen wall colour{i} today{i}" for i in range(20)]
    assert not any(made.classify(EMBEDDER.embed(text)).known for text in others)


def test_b13_no_domains_and_domains_without_examples_give_no_domain():
    empty = Classifier(BACKGROUND)
    vector = EMBEDDER.embed("anything")
    assert empty.classify(vector) == NO_DOMAIN
    empty.add("hollow", np.zeros((0, DIMENSION), dtype=np.float32))
    assert empty.classify(vector) == NO_DOMAIN
    empty.add("alpha", EMBEDDER.embed_many(["multiply the numbers"]))
    assert empty.classify(EMBEDDER.embed("multiply the numbers")).domain == "alpha"
    empty.remove("alpha")
    assert empty.classify(vector) == NO_DOMAIN
    with pytest.raises(UnknownNameError, match="hollow"):
        empty.remove("alpha")


def test_b14_confidence_is_compared_with_at_least_and_is_always_a_finite_number():
    vector = EMBEDDER.embed(prompts("multiply the numbers", 1, start=77)[0])
    score = classifier().classify(vector).confidence
    assert 0.5 < score < 1.0
    assert classifier(unknown_threshold=score).classify(vector).known
    above = float(np.nextafter(score, 1.0))
    refused = classifier(unknown_threshold=above).classify(vector)
    assert not refused.known
    assert refused.confidence == score
    assert classifier(unknown_threshold=0.0).classify(EMBEDDER.embed("paint my wall")).known


def test_b14_a_tie_goes_to_the_domain_registered_first():
    made = Classifier(BACKGROUND)
    anchors = EMBEDDER.embed_many(prompts("same words here", 4))
    made.add("one", anchors)
    made.add("two", anchors)
    verdict = made.classify(anchors[0])
    assert (verdict.domain, verdict.runner_up) == ("one", "two")


@pytest.mark.parametrize("value", [-1.0, 2.0, float("nan")])
def test_b18_thresholds_outside_zero_to_one_are_refused(value):
    with pytest.raises(InvalidValueError, match="unknown_threshold"):
        Classifier(BACKGROUND, unknown_threshold=value)


def test_thresholds_follow_the_data_a_tight_domain_asks_for_more_than_a_loose_one():
    made = Classifier(BACKGROUND)
    made.add("tight", EMBEDDER.embed_many(prompts("exactly these very same few words", 6)))
    made.add("loose", EMBEDDER.embed_many(prompts("red", 6)))
    tight, loose = made._thresholds
    assert tight > loose


def test_b21_bad_vectors_are_rejected_and_counted_and_change_nothing():
    made = classifier()
    before = {name: p.mean.copy() for name, p in made.prototypes.items()}
    for bad in (np.full(DIMENSION, np.nan), np.full(DIMENSION, np.inf), np.zeros(DIMENSION)):
        made.refine("alpha", bad.astype(np.float32))
        assert made.classify(bad.astype(np.float32)) == NO_DOMAIN
    assert made.rejected_vectors == 3
    for name, prototype in made.prototypes.items():
        np.testing.assert_array_equal(prototype.mean, before[name])
    made.add("gamma", np.full((2, DIMENSION), np.nan, dtype=np.float32))
    assert made.prototypes["gamma"].is_empty


def test_b21_a_domain_without_traffic_stays_bit_identical_while_others_move():
    made = classifier()
    quiet, moved = made.prototypes["beta"].mean.copy(), made.prototypes["alpha"].mean.copy()
    for vector in EMBEDDER.embed_many(prompts("multiply the numbers", 1000)):
        made.refine("alpha", vector)
    np.testing.assert_array_equal(made.prototypes["beta"].mean, quiet)
    assert not np.array_equal(made.prototypes["alpha"].mean, moved)
    assert all(np.isfinite(p.mean).all() for p in made.prototypes.values())


def test_traffic_can_move_a_prototype_only_so_far_from_its_examples():
    anchors = EMBEDDER.embed_many(prompts("multiply the numbers", 5))
    prototype = Prototype(anchors, traffic_weight=3.0)
    away = EMBEDDER.embed("something else altogether")
    for _ in range(10_000):
        prototype.add_traffic(away)
    np.testing.assert_allclose(prototype.mean, 0.25 * anchors.mean(axis=0) + 0.75 * away, atol=1e-4)


def test_cohesion_is_the_mean_similarity_of_pairs():
    vectors = EMBEDDER.embed_many(prompts("red", 7))
    similar = vectors @ vectors.T
    expected = (similar.sum() - np.trace(similar)) / 42
    assert np.isclose(cohesion(vectors), expected, atol=1e-5)
    assert cohesion(vectors[:1]) == 0.0


@pytest.mark.real_models
def test_demo_domains_recognise_the_demo_traffic_and_leave_recipes_alone():
    """Measured 224 of 225; five more may go astray before this fails."""
    embedder = Embedder(SentenceEncoder())
    made = Classifier(embedder.embed_many(background_texts()))
    for domain in load_config("demo", {}).domains:
        made.add(domain.name, embedder.embed_many(list(domain.examples)))
    with open(find_traffic("mixed"), encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    verdicts = [made.classify(v) for v in embedder.embed_many([row["prompt"] for row in rows])]
    served = [verdict.domain if verdict.known else "recipes" for verdict in verdicts]
    assert sum(row["domain"] == name for row, name in zip(rows, served, strict=True)) >= 219
