"""Drafts from predicted outputs, where requests have one."""

from collections.abc import Sequence

from engine_v1.request import Request
from engine_v1.spec_decode.proposer import Proposer


class PredictionProposer(Proposer):
    """Drafts what a request's prediction says next, unless another proposer has found a longer match.

    Such drafts have the source "prediction". Requests without a prediction are the other proposer's alone.

    Args:
        inner: drafts for all requests.
        num_speculative_tokens: the longest draft.

    Source: OpenAI's predicted outputs.
    """

    def __init__(self, inner: Proposer, *, num_speculative_tokens: int) -> None:
        self._inner = inner
        self._num_speculative_tokens = num_speculative_tokens

    def propose(self, requests: Sequence[Request]) -> None:
        """See :class:`Proposer`."""
        self._inner.propose(requests)
        for request in requests:
            prediction = request.prediction
            if prediction is None or request.num_pending_tokens != 1:
                continue
            prediction.advance(request.output_token_ids)
            if request._spec_token_ids and request._spec_match_length > prediction.match_length:
                continue
            draft = prediction.draft(request.max_draft_tokens(self._num_speculative_tokens))
            if draft:
                request._spec_token_ids = draft
                request._spec_match_length = prediction.match_length
                request._spec_source, request._spec_probs = "prediction", []

    def released(self, request: Request) -> None:
        """See :class:`Proposer`."""
        self._inner.released(request)

    def finished(self, request: Request) -> None:
        """See :class:`Proposer`."""
        self._inner.finished(request)
