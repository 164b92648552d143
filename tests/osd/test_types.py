"""Tallies: rates are derived from counters, with the field's definitions."""

import pytest

from osd.types import Round, Tally


def test_rates_follow_their_definitions():
    tally = Tally(requests=1)
    tally.add_round(Round(4, 2, 3, 3, "ngram", 1), seconds=0.5)
    tally.add_round(Round(4, 4, 4, 5, "ngram", 1), seconds=0.5)
    assert tally.acceptance_rate == pytest.approx(6 / 8)
    assert tally.alpha == pytest.approx(6 / 7)
    assert tally.mean_accepted_length == pytest.approx(8 / 2)
    assert tally.tokens_per_second == pytest.approx(8.0)


def test_an_empty_tally_has_finite_rates():
    assert set(Tally().as_dict().values()) == {0}


def test_tallies_add_up():
    total = Tally()
    for _ in range(3):
        part = Tally(requests=1)
        part.add_round(Round(2, 1, 2, 2, "x", 0), seconds=0.1)
        total.add(part)
    assert (total.requests, total.tokens, total.proposed_tokens) == (3, 6, 6)


def test_a_tally_survives_its_dictionary() -> None:
    tally = Tally(2, 30, 1.5, 10, 40, 18, 25)
    assert Tally.from_dict({**tally.as_dict(), "name": "math"}) == tally
    assert Tally.from_dict({}) == Tally()
