"""A prediction follows the output: agreement, divergence, and where it goes on."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_v1.spec_decode.prediction import Prediction
from engine_v1.spec_decode.prediction_proposer import PredictionProposer
from engine_v1.spec_decode.proposer import Proposer
from tests.factories import make_request, make_scheduler, run_step

CAT = list(range(10, 20))  # ten different tokens


def after(output, token_ids=CAT):
    prediction = Prediction(token_ids)
    prediction.advance(output)
    return prediction


class TestAlignment:
    def test_the_start_is_predicted(self):
        """Before any output the draft is the prediction's beginning, and it counts as a match."""
        prediction = after([])
        assert (prediction.draft(3), prediction.match_length) == ([10, 11, 12], 3)
        assert (prediction.num_accepted, prediction.num_rejected) == (0, 10)

    def test_it_moves_with_the_output(self):
        """Four tokens came true: the next three are drafted, with a match of four and the start's three."""
        prediction = after([10, 11, 12, 13])
        assert (prediction.draft(3), prediction.match_length) == ([14, 15, 16], 7)
        assert (prediction.num_accepted, prediction.num_rejected) == (4, 6)

    def test_a_replaced_token(self):
        """11 became 99: it goes on behind it, at first without trust."""
        assert (after([10, 99]).draft(2), after([10, 99]).match_length) == ([12, 13], 0)
        assert (after([10, 99, 12]).draft(2), after([10, 99, 12]).match_length) == ([13, 14], 1)

    def test_three_replaced_tokens(self):
        """The cursor moves on with what replaces the prediction."""
        assert after([10, 97, 98, 99]).draft(1) == [14]

    def test_an_insertion(self):
        """Two tokens stand before 11: when 11 comes, it goes on there."""
        prediction = after([10, 97, 98, 11])
        assert (prediction.draft(2), prediction.match_length) == ([12, 13], 1)

    def test_a_deletion(self):
        """11 to 13 were left out: 14 is found ahead."""
        prediction = after([10, 14])
        assert (prediction.draft(2), prediction.match_length) == ([15, 16], 1)

    def test_a_moved_passage_is_found_behind(self):
        """After 15 16 the output goes back to 11 12."""
        assert after([15, 16, 11, 12]).draft(2) == [13, 14]

    def test_the_longest_run_wins_over_the_nearest(self):
        """5 6 7 stands late, 7 alone near: after 5 6 7 it goes on at the late place."""
        assert after([1, 9, 5, 6, 7], [1, 2, 7, 3, 4, 5, 6, 7, 8]).draft(1) == [8]

    def test_of_equal_runs_the_next_one_ahead_wins(self):
        """7 stands before the divergence, soon after it and later: soon after it."""
        token_ids = [7, 1, 2, 3, 4, 7, 5, 7, 6]
        assert after([0, 1, 2, 3, 9, 7], token_ids).draft(1) == [5]

    def test_a_single_token_far_away_is_no_place_to_go_on(self):
        """A token that agrees a hundred tokens on is taken for chance."""
        token_ids = [*range(100, 300)]
        assert after([100, 220], token_ids).draft(1) == [102]
        assert after([100, 220, 221], token_ids).draft(1) == [222]

    def test_the_end(self):
        """Behind the last token there is nothing to draft, whatever comes."""
        prediction = after([*CAT, 1, 2, 3])
        assert prediction.draft(4) == []
        assert (prediction.num_accepted, prediction.num_rejected) == (10, 0)

    def test_single_chance_agreements_do_not_count(self):
        """Of an unrelated output that shares two separate tokens nothing has been accepted."""
        assert after([99, 12, 98, 17, 97]).num_accepted == 0

    def test_an_edit_accepts_all_but_what_it_changed(self):
        """13 14 became 98 97 96: eight of ten came true."""
        prediction = after([10, 11, 12, 98, 97, 96, 15, 16, 17, 18, 19])
        assert (prediction.num_accepted, prediction.num_rejected) == (8, 2)

    @given(st.lists(st.integers(0, 5), max_size=30), st.lists(st.integers(0, 5), min_size=1, max_size=30), st.data())
    def test_it_does_not_depend_on_how_many_tokens_a_step_brought(self, output, token_ids, data):
        """One call per token or one for all: the same draft, match and counts, and counts within bounds."""
        whole, parts = after(output, token_ids), Prediction(token_ids)
        end = 0
        while end < len(output):
            end += data.draw(st.integers(1, len(output) - end))
            parts.advance(output[:end])
        for prediction in (whole, parts):
            assert 0 <= prediction.num_accepted <= len(token_ids)
            assert prediction.num_accepted + prediction.num_rejected == len(token_ids)
        assert (parts.draft(9), parts.match_length, parts.num_accepted) == (
            (whole.draft(9), whole.match_length, whole.num_accepted)
        )


class OneGuess(Proposer):
    """Drafts 77 for everyone, by a match of a given length."""

    def __init__(self, match_length):
        self.match_length = match_length

    def propose(self, requests):
        for request in requests:
            request._spec_token_ids = [77] if self.match_length else []
            request._spec_match_length = self.match_length
            request._spec_source = "ngram"


class TestProposer:
    @pytest.mark.parametrize(
        "match_length, expected",
        [(0, ([11, 12, 13], "prediction")), (4, ([11, 12, 13], "prediction")), (5, ([77], "ngram"))],
    )
    def test_the_longer_match_wins(self, match_length, expected):
        """One token came true, four count: a lookup needs five to be preferred."""
        scheduler = make_scheduler()
        request = make_request(prediction_token_ids=CAT)
        scheduler.add_request(request)
        run_step(scheduler, 10)
        PredictionProposer(OneGuess(match_length), num_speculative_tokens=3).propose(scheduler.running)
        assert (request._spec_token_ids, request._spec_source) == expected

    def test_drafts_are_no_longer_than_the_request_may_use(self):
        """Of four tokens two are left: one can be drafted. With the request's own bound of 0, none."""
        for own, expected in ((None, [11]), (0, [])):
            scheduler = make_scheduler()
            request = make_request(prediction_token_ids=CAT, max_tokens=3, num_speculative_tokens=own)
            scheduler.add_request(request)
            run_step(scheduler, 10)
            PredictionProposer(OneGuess(0), num_speculative_tokens=3).propose(scheduler.running)
            assert request._spec_token_ids == expected

    def test_others_are_passed_through(self):
        """Without a prediction the draft is what the other proposer says."""
        scheduler = make_scheduler()
        request = make_request()
        scheduler.add_request(request)
        run_step(scheduler, 10)
        PredictionProposer(OneGuess(1), num_speculative_tokens=3).propose([request])
        assert (request._spec_token_ids, request._spec_source) == ([77], "ngram")
