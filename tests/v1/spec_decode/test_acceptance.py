"""Acceptance rates by source and match length, learned from guesses."""

import random

import pytest

from engine_v1.spec_decode.acceptance import ESTIMATED, MAX_MATCH, PRIOR, AcceptanceEstimator, estimate_grade


def test_it_starts_with_the_measured_rates():
    """Longer matches are better, and beyond the longest that is told apart all are alike."""
    acceptance = AcceptanceEstimator()
    rates = [acceptance.probability("ngram", length) for length in range(MAX_MATCH + 5)]
    assert rates[: len(PRIOR)] == pytest.approx(PRIOR)
    assert rates == sorted(rates)
    assert rates[-1] == rates[MAX_MATCH]


def test_a_prediction_is_trusted_more_than_a_lookup():
    """Before anything of it has matched, what the user expects is likelier than not."""
    acceptance = AcceptanceEstimator()
    assert acceptance.probability("prediction", 0) > 0.7 > acceptance.probability("ngram", 0)


def test_it_learns_the_rate_of_a_match_length():
    """500 guesses of which a tenth are right: the rate is near a tenth, that of other lengths is untouched."""
    acceptance, rng = AcceptanceEstimator(), random.Random(0)
    for _ in range(500):
        acceptance.observe("ngram", 3, 0.0, accepted=rng.random() < 0.1)
    assert acceptance.probability("ngram", 3) == pytest.approx(0.1, abs=0.05)
    assert acceptance.probability("ngram", 4) == pytest.approx(PRIOR[4])
    assert acceptance.probability("suffix", 3) == pytest.approx(PRIOR[3])


def test_it_forgets():
    """After 2000 guesses that were all wrong, 2000 that are all right count."""
    acceptance = AcceptanceEstimator()
    for accepted in (False, True):
        for _ in range(2000):
            acceptance.observe("ngram", 2, 0.0, accepted=accepted)
    assert acceptance.probability("ngram", 2) > 0.9


def test_a_request_has_its_own_log_odds():
    """Wrong guesses lower a request's log-odds, right ones raise them, within bounds."""
    acceptance, low, high = AcceptanceEstimator(), 0.0, 0.0
    for _ in range(300):
        low = acceptance.observe("a", 5, low, accepted=False)
        high = acceptance.observe("b", 1, high, accepted=True)
    assert -3.0 <= low < 0.0 < high <= 3.0
    assert acceptance.probability("c", 2, low) < acceptance.probability("c", 2) < acceptance.probability("c", 2, high)


def test_a_drafters_own_estimates_are_believed_until_they_prove_wrong():
    """0.72 is the fifteenth twentieth and taken as 0.725; a drafter that says so and is right half the time learns."""
    acceptance, rng = AcceptanceEstimator(), random.Random(0)
    assert [estimate_grade(estimate) for estimate in (0.0, 0.72, 1.0)] == [0, 14, 19]
    source = "suffix" + ESTIMATED
    assert acceptance.probability(source, 14) == pytest.approx(0.725)
    for _ in range(1000):
        acceptance.observe(source, 14, 0.0, accepted=rng.random() < 0.5)
    assert acceptance.probability(source, 14) == pytest.approx(0.5, abs=0.1)
    assert acceptance.probability("suffix", 14) == pytest.approx(PRIOR[-1])
