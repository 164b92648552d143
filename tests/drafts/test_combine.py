"""The combiner: calibrated, additive evidence that follows what the verified text shows."""

import random

import pytest

from drafts.combine import Combiner, log_odds

SURE, UNSURE = log_odds(0.9), log_odds(0.3)


def test_a_surer_candidate_is_more_probable_and_siblings_share_one():
    first, second = Combiner([False, True]).probabilities("d", False, [[(0, SURE)], [(1, UNSURE)]])
    assert first + second < 1.0
    alone = Combiner([False]).probabilities("d", False, [[(0, UNSURE)]])[0]
    assert Combiner([False]).probabilities("d", False, [[(0, SURE)]])[0] > alone


def test_agreement_raises_and_contradiction_lowers():
    combiner = Combiner([False, True])
    alone = combiner.probabilities("d", False, [[(0, SURE)]])[0]
    agreed = combiner.probabilities("d", False, [[(0, SURE), (1, UNSURE)]])[0]
    contested = combiner.probabilities("d", False, [[(0, SURE)], [(1, UNSURE)]])[0]
    assert agreed > alone > contested


def test_probabilities_follow_what_was_observed():
    combiner, rng = Combiner([False]), random.Random(0)
    for _ in range(2000):
        sure = rng.random() < 0.5
        hit = rng.random() < (0.8 if sure else 0.2)
        combiner.learn("d", False, [[(0, SURE if sure else UNSURE)]], 0 if hit else None)
    assert combiner.probabilities("d", False, [[(0, SURE)]])[0] == pytest.approx(0.8, abs=0.08)
    assert combiner.probabilities("d", False, [[(0, UNSURE)]])[0] == pytest.approx(0.2, abs=0.08)


def test_a_domain_deviates_from_the_others_and_can_be_forgotten():
    combiner = Combiner([False])
    for _ in range(200):
        combiner.learn("good", False, [[(0, SURE)]], 0)
        combiner.learn("bad", False, [[(0, SURE)]], None)
    good, bad, new = (combiner.probabilities(d, False, [[(0, SURE)]])[0] for d in ("good", "bad", "new"))
    assert good > new > bad
    combiner.forget("bad")
    assert combiner.probabilities("bad", False, [[(0, SURE)]])[0] == new


def test_later_positions_have_a_score_of_their_own():
    combiner = Combiner([False])
    for _ in range(300):
        combiner.learn("d", False, [[(0, UNSURE)]], 0)
        combiner.learn("d", True, [[(0, UNSURE)]], None)
    first, later = (combiner.probabilities("d", deep, [[(0, UNSURE)]])[0] for deep in (False, True))
    assert first > later


@pytest.mark.parametrize("confidence", [0.0, 1.0, 1.5, -1.0, float("nan")])
def test_log_odds_are_bounded(confidence):
    assert abs(log_odds(confidence)) < 4.1
