"""Counts of drafted and accepted tokens."""

import pytest

from engine_v1.spec_decode.metrics import SpecDecodingStats

# drafts and returned tokens of one step -> drafts, draft tokens, accepted, accepted per position
CASES = [
    pytest.param([([1, 2, 3], [1, 2, 3, 4])], (1, 3, 3, [1, 1, 1]), id="all-accepted"),
    pytest.param([([1, 2, 3], [1, 5])], (1, 3, 1, [1, 0, 0]), id="one-of-three"),
    pytest.param([([1, 2], [1, 2, 5]), ([3], [3, 4])], (2, 3, 3, [2, 1]), id="ragged"),
    pytest.param([([1], [1, 2])], (1, 1, 1, [1]), id="single"),
    pytest.param([([], [5])], (0, 0, 0, []), id="no-draft"),
    pytest.param([([1, 2, 3], [1, 2, 7]), ([4, 5, 6], [4, 8])], (2, 6, 3, [2, 1, 0]), id="two-partial"),
]


@pytest.mark.parametrize("requests,expected", CASES)
def test_counts_of_one_step(requests, expected):
    """A step that returned t tokens for a draft accepted t - 1 of it."""
    stats = SpecDecodingStats.new(max(len(drafts) for drafts, _ in requests))
    for drafts, returned in requests:
        stats.observe_draft(len(drafts), len(returned) - 1)
    counts = (
        stats.num_drafts,
        stats.num_draft_tokens,
        stats.num_accepted_tokens,
        stats.num_accepted_tokens_per_pos,
    )
    assert counts == expected


def test_step_without_draft_counts_nothing():
    """A request that carried no draft is no drafted request-step."""
    stats = SpecDecodingStats.new(3)
    stats.observe_draft(3, 2)
    stats.observe_draft(0, 0)
    assert stats == SpecDecodingStats(3, 1, 3, 2, [1, 1, 0])


def test_ratios():
    """Rate is accepted over drafted; length is one sampled token more than the accepted ones per draft."""
    stats = SpecDecodingStats.new(3)
    for num_accepted in (3, 1, 0, 0):
        stats.observe_draft(3, num_accepted)
    assert stats.draft_acceptance_rate == 4 / 12
    assert stats.mean_acceptance_length == 2.0
    assert stats.acceptance_rate_per_pos == [0.5, 0.25, 0.25]


def test_ratios_are_numbers_before_anything_is_drafted():
    """Nothing drafted means a rate of 0 and one token a step, never NaN."""
    stats = SpecDecodingStats.new(2)
    assert stats.draft_acceptance_rate == 0.0
    assert stats.mean_acceptance_length == 1.0
    assert stats.acceptance_rate_per_pos == [0.0, 0.0]


def test_stats_of_different_runs_share_nothing():
    """Counting in one leaves another at zero."""
    first, second = SpecDecodingStats.new(2), SpecDecodingStats.new(2)
    first.observe_draft(2, 2)
    assert second == SpecDecodingStats.new(2)


@pytest.mark.parametrize("num_draft_tokens,num_accepted_tokens", [(2, 3), (4, 1), (1, -1)])
def test_impossible_counts_are_refused(num_draft_tokens, num_accepted_tokens):
    """More accepted than drafted, or drafted than allowed, is a fault of the engine."""
    with pytest.raises(AssertionError, match="drafted"):
        SpecDecodingStats.new(3).observe_draft(num_draft_tokens, num_accepted_tokens)
