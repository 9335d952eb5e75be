"""What every proposer has in common: whom it may draft for, how much, and what one around another passes on."""

import pytest

from engine_v1.config import SPECULATIVE_METHODS, SpeculativeConfig
from engine_v1.core.token_table import TokenTable
from engine_v1.spec_decode.factory import make_proposer
from engine_v1.spec_decode.grammar_proposer import GrammarProposer
from engine_v1.spec_decode.prediction_proposer import PredictionProposer
from engine_v1.spec_decode.proposer import Proposer, WrappingProposer, draftable_requests
from engine_v1.spec_decode.replay import OracleProposer
from tests.factories import make_request
from tests.v1.structured_output.grammars import make_grammar

K = 4
PROMPT = [1, 2, 3, 1, 2, 3, 1, 2]
NEXT = [3, 1, 2, 3]
STALE = [9, 9, 9, 9, 9, 9]  # longer than any draft

# What keeps a request from having a draft.
NOT_DRAFTABLE = {
    "nothing computed": {"num_pending": len(PROMPT)},
    "two tokens pending": {"num_pending": 2},
    "one token to emit": {"max_tokens": 1},
    "drafts switched off": {"num_speculative_tokens": 0},
}


class Stubborn(Proposer):
    """Leaves every request the draft that it has, and notes what it is told."""

    def __init__(self):
        self.notes = []

    def propose(self, requests):
        self.notes.append(("propose", list(requests)))

    def released(self, request):
        self.notes.append(("released", request))

    def finished(self, request):
        self.notes.append(("finished", request))


def start(table, request_id="r0", *, num_pending=1, **options):
    """Return a request with a row, whose text goes on with NEXT by every rule, and which has an old draft."""
    request = make_request(request_id, PROMPT, prediction_token_ids=NEXT, **options)
    request.grammar = make_grammar(choice=["abcdef"])
    request.num_computed_tokens = request.num_tokens - num_pending
    request.row = table.acquire(request.all_token_ids)
    request._spec_token_ids = list(STALE)
    return request


def make(name, table):
    """Return a proposer; those that go around another one are alone responsible for what is drafted."""
    if name == "grammar":
        return GrammarProposer(Stubborn(), num_speculative_tokens=K)
    if name == "prediction":
        return PredictionProposer(Stubborn(), num_speculative_tokens=K)
    if name == "oracle":
        return OracleProposer({f"r{i}": NEXT for i in range(3)}, num_speculative_tokens=K)
    return make_proposer(SpeculativeConfig.from_dict({"method": name, "num_speculative_tokens": K}), table)


class TestDraftableRequests:
    @pytest.mark.parametrize("options", NOT_DRAFTABLE.values(), ids=NOT_DRAFTABLE.keys())
    def test_others_are_passed_over_and_lose_their_drafts(self, options):
        """A request that may have no draft is not yielded, and its old draft is gone."""
        request = start(TokenTable(1, 32), **options)
        assert list(draftable_requests([request], K)) == []
        assert request._spec_token_ids == []

    @pytest.mark.parametrize(
        "options, cap", [({}, K), ({"max_tokens": 3}, 2), ({"num_speculative_tokens": 1}, 1), ({"max_tokens": 2}, 1)]
    )
    def test_the_length_is_what_engine_and_request_allow(self, options, cap):
        """The least of the engine's bound, the request's own and what it may still emit beside the step's token."""
        request = start(TokenTable(1, 32), **options)
        assert list(draftable_requests([request], K)) == [(request, cap)]


class TestPausedLookups:
    @pytest.mark.parametrize("name", SPECULATIVE_METHODS)
    def test_nobody_looks_up_a_request_that_pauses(self, name):
        """It loses its old draft; its neighbour is drafted for, and so is it at the token at which lookups resume."""
        table = TokenTable(2, 32)
        paused, other = start(table, "r0"), start(table, "r1")
        paused._lookup_resumes_at = paused.num_output_tokens + 1
        proposer = make(name, table)
        proposer.propose([paused, other])
        assert paused._spec_token_ids == []
        assert other._spec_token_ids[:3] == NEXT[:3]
        paused._lookup_resumes_at = paused.num_output_tokens
        proposer.propose([paused, other])
        assert paused._spec_token_ids == other._spec_token_ids

    @pytest.mark.parametrize("name", ["prediction", "grammar"])
    def test_what_needs_no_lookup_goes_on(self, name):
        """A prediction and what a grammar forces cost nothing to find."""
        table = TokenTable(1, 32)
        request = start(table)
        request._lookup_resumes_at = request.num_output_tokens + 1
        make(name, table).propose([request])
        assert request._spec_token_ids


class TestEveryProposer:
    @pytest.mark.parametrize("options", NOT_DRAFTABLE.values(), ids=NOT_DRAFTABLE.keys())
    @pytest.mark.parametrize("name", [*SPECULATIVE_METHODS, "prediction", "grammar", "oracle"])
    def test_only_who_may_have_a_draft_gets_one(self, name, options):
        """Between two requests that are drafted for, the same text with nothing to gain loses its old draft."""
        table = TokenTable(3, 32)
        requests = [start(table, "r0"), start(table, "r1", **options), start(table, "r2", max_tokens=3)]
        make(name, table).propose(requests)
        whole, none, short = (request._spec_token_ids for request in requests)
        assert none == []
        assert 0 < len(whole) <= K
        assert (len(short), short) == (2, whole[:2])
        if name != "grammar":
            assert whole[:3] == NEXT[:3]


@pytest.mark.parametrize("wrapper", [WrappingProposer, PredictionProposer, GrammarProposer])
def test_the_inner_proposer_hears_of_everything(wrapper):
    """Requests to draft for, releases and ends are passed on as they come."""
    inner, request = Stubborn(), make_request()
    proposer = wrapper(inner, num_speculative_tokens=K)
    proposer.propose([request])
    proposer.released(request)
    proposer.finished(request)
    assert inner.notes == [("propose", [request]), ("released", request), ("finished", request)]
