"""Drafts for requests with a grammar: what it forces, and guesses as far as it allows them."""

from collections.abc import Sequence

from engine_v1.request import Request
from engine_v1.spec_decode.proposer import FORCED_SOURCE, WrappingProposer, draftable_requests


class GrammarProposer(WrappingProposer):
    """Passes the drafts of requests with a grammar through it; those of others are the inner proposer's.

    A forced token is the only one its mask leaves, so a draft of it is always accepted: it costs a row instead of a
    step. Such drafts have the source "grammar".
    """

    def propose(self, requests: Sequence[Request]) -> None:
        """See :class:`Proposer`."""
        super().propose(requests)
        with_grammar = (request for request in requests if request.grammar is not None)
        for request, cap in draftable_requests(with_grammar, self._num_speculative_tokens):
            assert request.grammar is not None, "it was asked for"
            request._spec_token_ids, num_forced = request.grammar.draft(request._spec_token_ids, cap)
            request._spec_probs = []
            if num_forced:
                request._spec_source, request._spec_match_length = FORCED_SOURCE, 0
