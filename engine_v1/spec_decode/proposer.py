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
        ``request.max_draft_tokens(...)`` tokens. With a draft come ``_spec_match_length``, how many tokens at the
        end of the text were found where it comes from (0 where that means nothing), ``_spec_source``, the
        kind of place, and where it can be estimated ``_spec_probs``, how likely each token is right if those before it
        are. Nothing else of a request is written.

        Args:
            requests: the running requests, each with its row in the token table.
        """
        ...

    def released(self, request: Request) -> None:
        """Forget what is kept for a request that has just given its row back: preempted, ended or aborted.

        It may come back in another row, with the same tokens; it may also never have been drafted for.
        """
        del request  # who keeps nothing has nothing to forget

    def finished(self, request: Request) -> None:
        """Learn from a request that has ended; called after :meth:`released`, once, its tokens final."""
        del request
