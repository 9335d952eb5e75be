"""The seam between the engine step and whatever drafts tokens, and what all that do have in common."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from engine_v1.request import Request

FORCED_SOURCE = "grammar"  # the ``_spec_source`` of drafts that are certain to be accepted: nobody shortens them


class Proposer(Protocol):
    """Draft the next tokens of running requests.

    Called once per step, before the scheduler. What a proposer writes is a guess that the runner verifies: a
    wrong draft costs rows of compute and changes no output.
    """

    def propose(self, requests: Sequence[Request]) -> None:
        """Set ``_spec_token_ids`` of every request, to an empty list where there is nothing to draft.

        Contract: only :func:`draftable_requests` get a draft, no longer than these say. With a draft come
        ``_spec_match_length``, how many tokens at the end of the text were found where it comes from (0 where that
        means nothing), ``_spec_source``, the kind of place, and where it can be estimated ``_spec_probs``, how likely
        each token is right if those before it are. Nothing else of a request is written.

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


def draftable_requests(requests: Iterable[Request], num_speculative_tokens: int) -> Iterator[tuple[Request, int]]:
    """Yield the requests that may have a draft now, each with the length it may have; the others lose theirs.

    A request may have one when all its known tokens but the last are computed, so that the step goes on behind them,
    and when it may emit more than the one token that the step gives anyway.

    Args:
        requests: running requests.
        num_speculative_tokens: the engine's longest draft.
    """
    for request in requests:
        cap = request.max_draft_tokens(num_speculative_tokens) if request.num_pending_tokens == 1 else 0
        if cap > 0:
            yield request, cap
        else:
            request._spec_token_ids = []


def requests_to_look_up(requests: Iterable[Request], num_speculative_tokens: int) -> Iterator[tuple[Request, int]]:
    """Yield what :func:`draftable_requests` does, but for requests whose lookups pause; those have no draft either."""
    for request, cap in draftable_requests(requests, num_speculative_tokens):
        if request.lookup_pauses:
            request._spec_token_ids = []
        else:
            yield request, cap


class WrappingProposer(Proposer):
    """Passes everything on to another proposer; subclasses change what that has drafted.

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

    def released(self, request: Request) -> None:
        """See :class:`Proposer`."""
        self._inner.released(request)

    def finished(self, request: Request) -> None:
        """See :class:`Proposer`."""
        self._inner.finished(request)
