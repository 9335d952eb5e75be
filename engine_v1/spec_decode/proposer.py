"""The seam between the engine step and whatever drafts tokens."""

from collections.abc import Sequence
from typing import Protocol

from engine_v1.request import Request


class Proposer(Protocol):
    """Draft the next tokens of running requests.

    Called once per step, before the scheduler. What a proposer writes is a guess that the runner verifies: a
    wrong draft costs rows of compute and changes no output.
    """

    def propose(self, requests: Sequence[Request]) -> None:
        """Set ``_spec_token_ids`` of every request, to an empty list where there is nothing to draft.

        Contract: only a request all of whose known tokens but the last are computed gets a draft, of at most
        ``request.max_draft_tokens(...)`` tokens. Nothing else of a request is written.

        Args:
            requests: the running requests, each with its row in the token table.
        """
        ...
