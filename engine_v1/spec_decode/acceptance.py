"""How likely a draft token is to be what the model says: learned from every guess, verified or not."""

import math

MAX_MATCH = 24  # longer matches count as this long
# Guesses that the prior counts for, and the share of what is known that each new one leaves: about 500 are remembered.
PRIOR_WEIGHT = 20.0
RETENTION = 0.998
# A request's own log-odds, added to everyone's: how fast they follow its guesses, and how far they may go.
REQUEST_RATE = 0.1
MAX_REQUEST_LOG_ODDS = 3.0
_MIN_RATE, _MAX_RATE = 0.005, 0.995

# Acceptance by match length 0, 1, 2, ... of copied text; the last value holds beyond. Position j of a draft counts as
# a match of j tokens more: it is looked at only if the j before it were right. Measured on 60 greedy Spec-Bench
# outputs, where acceptance at a match of n + j tokens is the same, within a few points, for every way to split it.
PRIOR = (0.2, 0.24, 0.5, 0.6, 0.7, 0.74, 0.8, 0.86, 0.87, 0.9, 0.91, 0.91, 0.92, 0.93)
# A prediction given by the user is meant to come true, also before anything of it has matched.
PREDICTION_PRIOR = (0.8, 0.8, 0.85, 0.9, 0.92, 0.94, 0.95)
PRIORS = {"prediction": PREDICTION_PRIOR}

# Drafters that estimate each token's chance get tables of their own, by the estimate in steps of a twentieth instead of
# by match length: how often such estimates come true. Their prior is that they are right.
ESTIMATED = " by estimate"
NUM_ESTIMATES = 20


def estimate_grade(estimate: float) -> int:
    """Return the place of a drafter's own estimate in the tables of its source with ``ESTIMATED`` behind its name."""
    return min(NUM_ESTIMATES - 1, int(estimate * NUM_ESTIMATES))


class AcceptanceEstimator:
    """Acceptance rates of draft tokens by source and match length, or by the source's own estimate, over all requests.

    A guess need not be verified to be scored: it is compared with what the model says anyway. So rates are as
    well known for drafts that were not worth a row as for those that were, and finding out that drafting pays
    again costs nothing.
    """

    def __init__(self) -> None:
        self._log_odds: dict[str, list[float]] = {}  # source -> [MAX_MATCH + 1]
        self._hits: dict[str, list[float]] = {}
        self._trials: dict[str, list[float]] = {}

    def probability(self, source: str, match_length: int, log_odds: float = 0.0) -> float:
        """Return how likely a guess is right that follows a match of so many tokens.

        Args:
            source: where it comes from; with ``ESTIMATED`` behind it where the next is no match length.
            match_length: tokens before it that agree with where it comes from, or :func:`estimate_grade`.
            log_odds: what the request's own guesses add.
        """
        table = self._log_odds.get(source) or self._start(source)
        return 1.0 / (1.0 + math.exp(-table[min(match_length, MAX_MATCH)] - log_odds))

    def observe(self, source: str, match_length: int, log_odds: float, *, accepted: bool) -> float:
        """Learn from one guess and return the request's log-odds after it."""
        expected = self.probability(source, match_length, log_odds)
        index = min(match_length, MAX_MATCH)
        hits, trials = self._hits[source], self._trials[source]
        hits[index] = hits[index] * RETENTION + accepted
        trials[index] = trials[index] * RETENTION + 1.0
        self._log_odds[source][index] = _logit(hits[index] / trials[index])
        moved = log_odds + REQUEST_RATE * (accepted - expected)
        return max(-MAX_REQUEST_LOG_ODDS, min(MAX_REQUEST_LOG_ODDS, moved))

    def _start(self, source: str) -> list[float]:
        prior: tuple[float, ...] = PRIORS.get(source, PRIOR)
        if source.endswith(ESTIMATED):
            prior = tuple((grade + 0.5) / NUM_ESTIMATES for grade in range(NUM_ESTIMATES))
        rates = [prior[min(length, len(prior) - 1)] for length in range(MAX_MATCH + 1)]
        self._hits[source] = [rate * PRIOR_WEIGHT for rate in rates]
        self._trials[source] = [PRIOR_WEIGHT] * len(rates)
        self._log_odds[source] = [_logit(rate) for rate in rates]
        return self._log_odds[source]


def _logit(rate: float) -> float:
    rate = max(_MIN_RATE, min(_MAX_RATE, rate))
    return math.log(rate / (1.0 - rate))
