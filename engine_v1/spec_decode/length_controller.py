"""Decides how much of each draft is worth its rows: the length between what was proposed and nothing."""

import math
from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heapreplace
from itertools import islice
from typing import NamedTuple, Protocol

from engine_v1.core.scheduler_output import SchedulerOutput
from engine_v1.request import Request
from engine_v1.sample.logits_rules import NO_RULES
from engine_v1.spec_decode.acceptance import ESTIMATED, AcceptanceEstimator, estimate_grade
from engine_v1.spec_decode.cost_model import CostModel, StepLoad
from engine_v1.spec_decode.proposer import FORCED_SOURCE

# A draft row must be worth this many times what it costs, since chances and costs are estimates.
SAFETY = 1.1
# The same while nobody waits. A request that ends early then leaves a shorter step, and no seat that another takes: a
# token that comes before its neighbours' saves a row, which is less than its share of a step.
SAFETY_ALONE = 1.4
# After so many steps in a row with drafts one has none, so that what drafts cost is seen and not only believed; then
# after twice as many, and so on up to the second number.
FIRST_PATIENCE, LAST_PATIENCE = 4, 512
# After so many steps in a row without a draft worth a row requests are looked up once in LOOKUP_EVERY tokens only, if
# a step has less than SMALL_SHARE_S for each: what the host does for a lookup, 15 to 20 us, is then 3 % of it or more.
# Not sooner: guesses that are not looked up are not scored, and a request that copies is known by its scores.
LOOKUP_PATIENCE, LOOKUP_EVERY = 8, 4
SMALL_SHARE_S = 0.5e-3


class LengthController(Protocol):
    """Shortens drafts between proposing and scheduling, and may let lookups pause (``Request._lookup_resumes_at``)."""

    def shorten(self, running: Sequence[Request], waiting: Iterable[Request]) -> None:
        """Cut ``_spec_token_ids`` of the running requests to what the next step should verify.

        Args:
            running: the requests that have been drafted for, or not.
            waiting: those that the step may admit, in order.
        """

    def observe(self, step: SchedulerOutput, seconds: float) -> None:
        """Learn from a step whose tokens have been committed.

        Args:
            step: what was computed.
            seconds: how long the model took.
        """


class BatchSizeTable(LengthController):
    """Bounds every draft by the number of running requests, from a table that the user wrote.

    Args:
        table: (first, last, tokens): drafts have at most so many tokens while first..last requests run. Between and
            beyond the entries the one before holds.
    """

    def __init__(self, table: Sequence[tuple[int, int, int]]) -> None:
        self._table = table

    def max_draft_tokens(self, num_running: int) -> int:
        """Return the bound for so many requests."""
        bound = self._table[0][2]
        for first, _, num_tokens in self._table:
            if num_running >= first:
                bound = num_tokens
        return bound

    def shorten(self, running: Sequence[Request], waiting: Iterable[Request]) -> None:  # noqa: ARG002
        """See :class:`LengthController`."""
        bound = self.max_draft_tokens(len(running))
        for request in running:
            if request._spec_source != FORCED_SOURCE:
                del request._spec_token_ids[bound:]

    def observe(self, step: SchedulerOutput, seconds: float) -> None:
        """Learn nothing: the table is fixed."""


class _RowState:
    """What is known about the guesses for the request in one row of the token table."""

    __slots__ = ("drawn", "log_odds", "match_length", "owner", "rest")

    def __init__(self) -> None:
        self.owner: Request | None = None
        self.drawn = False  # whether its logits are stored, and with them those of its step
        self.log_odds = 0.0
        self.match_length = 0  # tokens up to now that agreed with the guesses
        self.rest: list[int] = []  # what the last guess says comes next

    def take(self, request: Request) -> None:
        """Start anew for another request."""
        params = request.sampling_params
        self.owner = request
        plain = params.greedy and params.logprobs is None and request.grammar is None
        self.drawn = not plain or request.logits_rules is not NO_RULES
        self.log_odds = 0.0
        self.match_length = 0
        self.rest = []


class _Guess(NamedTuple):
    """A whole draft as proposed, to be compared with what the model says."""

    request: Request
    state: _RowState
    num_output_tokens: int
    source: str  # as the acceptance estimator knows it
    token_ids: list[int]
    match_length: int
    estimates: list[float]  # the drafter's own, or []

    def grade(self, position: int) -> int:
        """Return by what the token at a position of the draft is judged: a match length, or its estimate's place."""
        return estimate_grade(self.estimates[position]) if self.estimates else self.match_length + position


class AdaptiveLength(LengthController):
    """Verifies the draft tokens that make a step's tokens per second greatest, over all requests together.

    Every step commits one token of each decoding request. A draft token adds its chance of being committed, that
    is its own acceptance times that of those before it, and costs a row. Draft tokens of all requests are taken in
    order of what they add, while what they add per second of their rows is above what the step has per second so
    far. Chances only fall along a draft and rows only get dearer (:class:`RowCurve`), so the first that does not
    pay ends it, and the result is the best there is for this model of costs.

    Where the step also computes prompt tokens, their time buys no token of the decoding requests: a draft token
    then has to beat the rate that all requests together will decode at.

    Args:
        cost: predicts a step's seconds.
        num_rows: of the token table.
        max_num_batched_tokens: rows of a step, at most.

    Cost: about 1.5 µs per request that decodes and 2.5 µs per token scored, on the host.

    Source: draft lengths from goodput, "SmartSpec" (arXiv 2406.14066), with measured row costs, and with acceptance
    that is learned without drafting (:class:`AcceptanceEstimator`).
    """

    def __init__(self, cost: CostModel, *, num_rows: int, max_num_batched_tokens: int) -> None:
        self.cost = cost
        self.acceptance = AcceptanceEstimator()
        self._num_rows = num_rows
        self._max_num_batched_tokens = max_num_batched_tokens
        self._states = [_RowState() for _ in range(num_rows)]
        self._guesses: list[_Guess] = []
        self._drawn = False  # whether the step stores logits
        self._safety = SAFETY
        # By the bit length of the number of decoding requests: steps since the last one without drafts, and how many
        # there may be.
        self._drafted_steps = [0] * (num_rows.bit_length() + 1)
        self._patience = [FIRST_PATIENCE] * (num_rows.bit_length() + 1)
        self._token_s = math.inf  # what a token of the step costs without drafts
        self._draft_row_s = 0.0  # what its draft rows cost, on average
        self._num_fruitless = 0  # steps with lookups since one that found a draft worth a row

    def shorten(self, running: Sequence[Request], waiting: Iterable[Request]) -> None:
        """See :class:`LengthController`."""
        self._guesses = []
        self._drawn = False
        num_decoding = num_keys = num_forced = 0
        num_prompts = num_prompt_tokens = 0
        looked_up: list[Request] = []
        for request in running:
            if request.num_pending_tokens != 1:
                num_prompts += 1
                num_prompt_tokens += request.num_pending_tokens
                continue
            num_decoding += 1
            if not request.lookup_pauses:
                looked_up.append(request)
            num_keys += request.num_tokens
            state = self._states[request.row]
            if state.owner is not request:
                state.take(request)
            self._drawn |= state.drawn
            if request._spec_source == FORCED_SOURCE:
                num_forced += len(request._spec_token_ids)
            elif request._spec_token_ids:
                self._guesses.append(_guess(request, state))
        num_worth = 0
        if self._guesses:
            self._safety = SAFETY if any(True for _ in waiting) else SAFETY_ALONE
            for request in islice(waiting, self._num_rows - len(running)):
                num_prompts += 1
                num_prompt_tokens += request.num_tokens
            num_other = min(num_prompt_tokens, self._max_num_batched_tokens - num_decoding) + num_forced
            num_worth = self._choose(num_decoding, num_keys, num_prompts, num_other)
        if looked_up:
            self._num_fruitless = 0 if num_worth else self._num_fruitless + 1
        if self._num_fruitless >= LOOKUP_PATIENCE and self._token_s < SMALL_SHARE_S:
            for request in looked_up:
                request._lookup_resumes_at = request.num_output_tokens + LOOKUP_EVERY

    def _choose(self, num_decoding: int, num_keys: int, num_prompts: int, num_other: int) -> int:
        """Give every request its share of the draft rows that pay; return how many pay.

        Args:
            num_decoding: requests that commit a token for certain.
            num_keys: over these, the keys in context.
            num_prompts: requests whose prompts are, or will be, computed before they decode too.
            num_other: rows of the step that are neither these requests' newest tokens nor optional drafts.
        """
        cost, drawn = self.cost, self._drawn
        num_requests = num_decoding + num_prompts
        keys_per_request = num_keys / num_decoding
        seconds = cost.seconds(StepLoad(num_requests, round(num_requests * keys_per_request), drawn=drawn))
        rate = num_requests / seconds
        self._token_s = seconds / num_requests
        tokens = float(num_requests)
        num_rows = num_decoding + num_other
        key_cost = cost.row_key_seconds
        probability = self.acceptance.probability
        # (-value, index of the guess, chance of being committed, length up to it), the most valuable first. Attention
        # to a long context is taken off a token's value, so that the rest of a row costs the same for all.
        heap: list[tuple[float, int, float, int]] = []
        kept = [0] * len(self._guesses)
        for index, guess in enumerate(self._guesses):
            chance = probability(guess.source, guess.grade(0), guess.state.log_odds)
            heap.append((rate * key_cost * guess.request.num_tokens - chance, index, chance, 1))
        heapify(heap)
        first_s = seconds
        while heap:
            negated, index, chance, length = heap[0]
            row_s = cost.row_seconds(num_rows, drawn=drawn)
            if -negated <= rate * row_s * self._safety:
                break
            guess = self._guesses[index]
            kept[index] = length
            num_rows += 1
            key_s = key_cost * guess.request.num_tokens
            seconds += row_s + key_s
            if num_prompts == 0:
                tokens += chance
                rate = tokens / seconds
            if length == len(guess.token_ids):
                heappop(heap)
                continue
            chance *= probability(guess.source, guess.grade(length), guess.state.log_odds)
            heapreplace(heap, (rate * key_s - chance, index, chance, length + 1))
        num_drafts = sum(kept)
        is_check = num_drafts > 0 and num_prompts == 0 and self._is_check(num_decoding)
        self._draft_row_s = (seconds - first_s) / num_drafts if num_drafts else 0.0
        for guess, length in zip(self._guesses, kept, strict=True):
            guess.request._spec_token_ids = guess.token_ids[: 0 if is_check else length]
        return num_drafts

    def _is_check(self, num_decoding: int) -> bool:
        """Whether the drafts of a step are left out to see what it takes without them, which is rarer each time."""
        size = num_decoding.bit_length()
        if self._drafted_steps[size] < self._patience[size]:
            return False
        self._drafted_steps[size] = 0
        self._patience[size] = min(2 * self._patience[size], LAST_PATIENCE)
        return True

    def observe(self, step: SchedulerOutput, seconds: float) -> None:
        """See :class:`LengthController`."""
        for guess in self._guesses:
            self._score(guess)
        num_rows = num_keys = num_draft_keys = 0
        for share in step.scheduled:
            num_drafts = len(share.spec_token_ids)
            if not share.samples or share.num_scheduled_tokens != 1 + num_drafts:
                return  # prompt tokens: their time is no measure of decoding
            num_rows += 1 + num_drafts
            num_keys += share.num_computed_tokens + 1
            num_draft_keys += num_drafts * (share.num_computed_tokens + 1)
        size = len(step.scheduled).bit_length()
        self._drafted_steps[size] = self._drafted_steps[size] + 1 if num_rows > len(step.scheduled) else 0
        self.cost.observe(StepLoad(num_rows, num_keys, num_draft_keys, self._drawn), seconds)

    def _score(self, guess: _Guess) -> None:
        """Compare a draft, the part that was not verified included, with what has been committed."""
        request, state = guess.request, guess.state
        new_ids = request.output_token_ids[guess.num_output_tokens :]
        if not new_ids:
            return  # preempted, or failed
        observe, source = self.acceptance.observe, guess.source
        log_odds, num_right = state.log_odds, 0
        for draft_id, token_id in zip(guess.token_ids, new_ids, strict=False):
            accepted = draft_id == token_id
            log_odds = observe(source, guess.grade(num_right), log_odds, accepted=accepted)
            if not accepted:
                break
            num_right += 1
        state.log_odds = log_odds
        if num_right == min(len(new_ids), len(guess.token_ids)) and not request.lookup_pauses:
            state.match_length = guess.match_length + len(new_ids)
            state.rest = guess.token_ids[len(new_ids) :]
        else:
            state.match_length = 0
        if request.step_drafted[-1]:
            saved_s = request.step_accepted[-1] * self._token_s - request.step_drafted[-1] * self._draft_row_s
            request.spec_time_saved_s += saved_s


def _guess(request: Request, state: _RowState) -> _Guess:
    """Note a draft, and how many tokens before it agree with where it comes from."""
    draft, match_length = request._spec_token_ids, request._spec_match_length
    source, estimates = request._spec_source, request._spec_probs
    if estimates:
        source += ESTIMATED
    # A lookup of at most n tokens reports at most n. A draft that says what the last one said has matched all that the
    # last one has.
    goes_on = draft[: len(state.rest)] == state.rest if state.rest else match_length > 1
    if goes_on and state.match_length > match_length:
        match_length = state.match_length
    return _Guess(request, state, request.num_output_tokens, source, draft, match_length, estimates)
