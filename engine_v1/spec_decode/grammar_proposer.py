"""Drafts for requests with a grammar: what it forces, and guesses as far as it allows them."""

from collections.abc import Sequence

from engine_v1.request import Request
from engine_v1.spec_decode.proposer import Proposer


class GrammarProposer(Proposer):
    """Passes the drafts of requests with a grammar through it; those of others are another proposer's.

    A forced token is the only one its mask leaves, so a draft of it is always accepted: it costs a row instead of a
    step. Such drafts have the source "grammar".

    Args:
        inner: drafts for all requests.
        num_speculative_tokens: the longest draft.
    """

    def __init__(self, inner: Proposer, *, num_speculative_tokens: int) -> None:
        self._inner = inner
        self._num_speculative_tokens = num_speculative_tokens

    def propose(self, requests: Sequence[Request]) -> None:
        """See :class:`Proposer`."""
        self._inner.propose(requests)
        for request in requests:
            if request.grammar is None or request.num_pending_tokens != 1:
                continue
            drafts, num_forced = request.grammar.draft(
                request._spec_token_ids, request.max_draft_tokens(self._num_speculative_tokens)
            )
            request._spec_token_ids = drafts
            request._spec_probs = []
            if num_forced:
                request._spec_source, request._spec_match_length = "grammar", 0

    def released(self, request: Request) -> None:
        """See :class:`Proposer`."""
        self._inner.released(request)

    def finished(self, request: Request) -> None:
        """See :class:`Proposer`."""
        self._inner.finished(request)
