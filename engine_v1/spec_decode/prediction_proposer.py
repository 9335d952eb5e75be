"""Drafts from predicted outputs, where requests have one."""

from collections.abc import Sequence

from engine_v1.request import Request
from engine_v1.spec_decode.proposer import WrappingProposer, draftable_requests


class PredictionProposer(WrappingProposer):
    """Drafts what a request's prediction says next, unless the inner proposer has found a longer match.

    Such drafts have the source "prediction". Requests without a prediction are the inner proposer's alone.

    Source: OpenAI's predicted outputs.
    """

    def propose(self, requests: Sequence[Request]) -> None:
        """See :class:`Proposer`."""
        super().propose(requests)
        with_prediction = (request for request in requests if request.prediction is not None)
        for request, cap in draftable_requests(with_prediction, self._num_speculative_tokens):
            prediction = request.prediction
            assert prediction is not None, "it was asked for"
            prediction.advance(request.output_token_ids)
            if request._spec_token_ids and request._spec_match_length > prediction.match_length:
                continue
            draft = prediction.draft(cap)
            if draft:
                request._spec_token_ids = draft
                request._spec_match_length = prediction.match_length
                request._spec_source, request._spec_probs = "prediction", []
