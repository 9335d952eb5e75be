from engine_v1.spec_decode.grammar_proposer import GrammarProposer
from engine_v1.spec_decode.proposer import Proposer
from tests.factories import make_request
from tests.v1.structured_output.grammars import ids, make_grammar


class FixedProposer(Proposer):
    """Drafts the same for every request."""

    def __init__(self, drafts):
        self.drafts = drafts

    def propose(self, requests):
        for request in requests:
            request._spec_token_ids = list(self.drafts)
            request._spec_source, request._spec_match_length = "ngram", 3


def propose(guess, *, max_tokens=16, **form):
    """The drafts, source and match length of a request with one output token; k is 5."""
    request = make_request(max_tokens=max_tokens)
    request.grammar = make_grammar(**form) if form else None
    request.append_output_token(0)
    request.num_computed_tokens = request.num_tokens - 1
    GrammarProposer(FixedProposer(ids(guess)), num_speculative_tokens=5).propose([request])
    return request._spec_token_ids, request._spec_source, request._spec_match_length


def test_without_a_grammar_the_drafts_are_the_others():
    """A request that asks for no form is not looked at."""
    assert propose("abc") == (ids("abc"), "ngram", 3)


def test_a_guess_is_cut_where_the_grammar_ends_it():
    """The valid prefix stays, with where it comes from."""
    assert propose("abxd", regex="[a-d]+") == (ids("ab"), "ngram", 3)
    assert propose("xabd", regex="[a-d]+") == ([], "ngram", 3)


def test_forced_tokens_win_over_a_guess():
    """What must come is drafted whatever the guess, even without one, up to k."""
    for guess in ("", "zzz", "abx"):
        assert propose(guess, choice=["abcdefgh", "abcdefxy"]) == (ids("abcde"), "grammar", 0)


def test_a_guess_leads_on_to_forced_tokens():
    """Behind a guess that decides among several continuations, what it forces is drafted too."""
    assert propose("b", choice=["axyz", "bcde"]) == (ids("bcde."), "ngram", 3)


def test_drafts_keep_to_what_may_still_be_emitted():
    """max_tokens 3 with one token out leaves room for one draft beside the step's own token."""
    assert propose("", max_tokens=3, choice=["abcdefgh"]) == (ids("a"), "grammar", 0)
