"""Calibration: raw confidence becomes observed acceptance, domain by domain."""

import random

import pytest

from drafts.calibration import Calibrator


def test_before_any_observation_the_raw_confidence_is_believed():
    assert Calibrator().probability("math", 1, 0.6) == pytest.approx(0.6)


def test_an_overconfident_source_is_corrected():
    calibrator = Calibrator()
    rng = random.Random(0)
    for _ in range(300):
        calibrator.learn("math", 1, 0.95, rng.random() < 0.3)
    assert 0.15 < calibrator.probability("math", 1, 0.95) < 0.5


def test_a_new_domain_starts_from_what_the_source_earns_elsewhere():
    calibrator = Calibrator()
    for _ in range(200):
        calibrator.learn("math", 1, 0.9, False)
    assert calibrator.probability("fresh", 1, 0.9) < 0.4


def test_domains_are_told_apart():
    calibrator = Calibrator()
    for _ in range(200):
        calibrator.learn("good", 1, 0.5, True)
        calibrator.learn("bad", 1, 0.5, False)
    assert calibrator.probability("good", 1, 0.5) > 0.8
    assert calibrator.probability("bad", 1, 0.5) < 0.2


def test_old_evidence_is_forgotten():
    calibrator = Calibrator()
    for _ in range(300):
        calibrator.learn("d", 1, 0.5, True)
    for _ in range(100):
        calibrator.learn("d", 1, 0.5, False)
    assert calibrator.probability("d", 1, 0.5) < 0.35


def test_the_mean_of_an_unseen_domain_is_the_mean_elsewhere():
    calibrator = Calibrator()
    assert calibrator.mean("d", 1, 0.4) == pytest.approx(0.4)
    for _ in range(100):
        calibrator.learn("other", 1, 0.7, True)
    assert calibrator.mean("d", 1, 0.4) > 0.8
