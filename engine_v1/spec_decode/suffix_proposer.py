"""Draft what is most likely to follow, by counts of what followed the last few tokens wherever they occurred."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numba import float64, int32, int64

from engine_v1.core.token_table import TokenTable
from engine_v1.kernels.intrinsics import int32_view
from engine_v1.kernels.jit import jit, kernel_part, warmup
from engine_v1.request import Request
from engine_v1.spec_decode.hashing import mix
from engine_v1.spec_decode.proposer import Proposer, requests_to_look_up
from engine_v1.spec_decode.shared_memory import SharedMemory
from engine_v1.spec_decode.successors import (
    COUNTS,
    ENTRY_SIZE,
    MAX_ORDER,
    NODE_SIZE,
    NUM_USED,
    ORDERS,
    SLOTS,
    TOKENS,
    SuccessorTable,
    count_token,
    find_node,
)

SOURCES = ("recycling", "corpus", "memory", "suffix")  # less to more trusted: for contexts of a length the last counts
RECYCLING, CORPUS, MEMORY, OWN = range(len(SOURCES))
RECYCLED_ORDER = 2  # adjacencies are of contexts up to this length
ROOM = 256  # tokens that a request may grow by before its table does
MAX_CANDIDATES = len(SOURCES) * len(ORDERS) * SLOTS

# Doubt: how many unseen occurrences weigh against each different successor of a context of 1, 2, 4, 8 tokens. Chosen so
# that the estimates meet the acceptance seen on 60 Spec-Bench outputs, and checked on 54 others.
OWN_DOUBT = (4.2, 2.4, 1.4, 1.26)
SHARED_DOUBT = (19.0, 5.8, 5.2, 1.0)


@kernel_part
def _estimate(
    context: Any,
    end: int,
    addresses: Any,
    capacities: Any,
    doubts: Any,
    candidates: Any,
    estimates: Any,
) -> int:
    """Fill in what may follow ``context[:end]`` and how likely each is; return how many candidates there are.

    ``candidates: int32[4, MAX_CANDIDATES]`` are tokens, when each was named last, in a context of which length, of
    which source.
    """
    num = 0
    named = 0
    hashed = 0
    num_mixed = 0
    for index in range(len(ORDERS)):
        order = ORDERS[index]
        if order > end:
            break
        while num_mixed < order:
            num_mixed += 1
            hashed = mix(hashed, context[end - num_mixed])
        for source in range(len(SOURCES)):
            doubt = doubts[source, index]
            if doubt == 0.0 or addresses[source] == 0:
                continue
            capacity = capacities[source]
            table = int32_view(addresses[source], ENTRY_SIZE * capacity)
            node = find_node(table, capacity, hashed)
            if node < 0:
                continue
            at = capacity + node * NODE_SIZE
            total = table[at]
            used = table[at + NUM_USED]
            num_named = 0
            for slot in range(used):
                num_named += table[at + COUNTS + slot]
            num_different = used + (1 if num_named < total else 0)
            rest = doubt * num_different
            for i in range(num):
                estimates[i] = estimates[i] * (rest / (total + rest))
            for slot in range(used - 1, -1, -1):
                token = table[at + TOKENS + slot]
                i = 0
                while i < num and candidates[0, i] != token:
                    i += 1
                if i == num:
                    candidates[0, i] = token
                    estimates[i] = 0.0
                    num += 1
                estimates[i] += table[at + COUNTS + slot] / (total + rest)
                named += 1
                candidates[1, i] = named
                candidates[2, i] = order
                candidates[3, i] = source
    return num


# Both halves of the kernel are inlined by force: as calls they cost a request 0.2 to 0.3 us more, of 3 (2-core EPYC,
# benchmarks/bench_proposer.py --methods suffix --batches 16).
@kernel_part(forceinline=True)
def _learn(
    token_ids: Any, row: int, prompt_length: int, length: int, addresses: Any, capacities: Any, counted: Any
) -> None:
    """Count what one request has committed: in its own table and, if it draws on them, in the adjacencies."""
    tokens = token_ids[row]
    capacity = capacities[row, OWN]
    table = int32_view(addresses[row, OWN], ENTRY_SIZE * capacity)
    for end in range(max(1, counted[row, 0]), length):
        count_token(tokens, 0, end, table, capacity, 1, MAX_ORDER, 1)
    counted[row, 0] = length
    if addresses[row, RECYCLING] != 0:
        capacity = capacities[row, RECYCLING]
        table = int32_view(addresses[row, RECYCLING], ENTRY_SIZE * capacity)
        for end in range(counted[row, 1], length):
            count_token(tokens, prompt_length, end, table, capacity, 1, RECYCLED_ORDER, 1)
        counted[row, 1] = length


@kernel_part(forceinline=True)
def _draft(
    token_ids: Any,
    row: int,
    length: int,
    cap: int,
    min_prob: float,
    doubts: Any,
    addresses: Any,
    capacities: Any,
    context: Any,
    candidates: Any,
    estimates: Any,
    drafts: Any,
    probs: Any,
    facts: Any,
) -> None:
    """Write the draft of one request, token by token, each the likeliest after those before it."""
    end = min(length, MAX_ORDER)
    for j in range(end):
        context[j] = token_ids[row, length - end + j]
    count = 0
    all_right = 1.0
    facts[row, 1] = 0
    facts[row, 2] = OWN
    while count < cap:
        num = _estimate(context, end, addresses[row], capacities[row], doubts, candidates, estimates)
        best = 0
        for j in range(1, num):
            if estimates[j] > estimates[best] or (
                estimates[j] == estimates[best] and candidates[1, j] > candidates[1, best]
            ):
                best = j
        if num == 0 or all_right * estimates[best] < min_prob:
            break
        all_right *= estimates[best]
        if count == 0:
            facts[row, 1] = candidates[2, best]
            facts[row, 2] = candidates[3, best]
        drafts[row, count] = candidates[0, best]
        probs[row, count] = estimates[best]
        context[end] = candidates[0, best]
        end += 1
        count += 1
    facts[row, 0] = count


@jit
def suffix_kernel(
    token_ids: Any,
    rows: Any,
    lengths: Any,
    prompt_lengths: Any,
    caps: Any,
    min_prob: float,
    doubts: Any,
    addresses: Any,
    capacities: Any,
    counted: Any,
    context: Any,
    candidates: Any,
    estimates: Any,
    drafts: Any,
    probs: Any,
    facts: Any,
) -> None:
    """Learn what the requests of a batch have committed, then write the draft of each, at its row.

    Args:
        token_ids: int32[num_rows, width], a request's tokens per row.
        rows: int32[num_requests], where each request's tokens stand and its draft goes.
        lengths: int32[num_requests], known tokens of each.
        prompt_lengths: int32[num_requests], how many of them are the prompt.
        caps: int32[num_requests], the longest draft each may have.
        min_prob: a draft goes on while all of it is at least so likely to be right.
        doubts: float64[num_sources, num_orders], see OWN_DOUBT; 0 where a source has no such contexts.
        addresses: int64[num_rows, num_sources], where the tables lie that each row draws on; 0 for none.
        capacities: int64[num_rows, num_sources], their nodes.
        counted: int64[num_rows, 2], tokens already counted in the row's own table and in the adjacencies; moved on.
        context: int32[MAX_ORDER + k], scratch, as are the next two.
        candidates: int32[4, MAX_CANDIDATES].
        estimates: float64[MAX_CANDIDATES].
        drafts: int32[num_rows, k], written up to the draft's length.
        probs: float64[num_rows, k], how likely each token is to be right where those before it are.
        facts: int32[num_rows, 3], the draft's length, and for its first token the length of the longest context that
            names it and the source of that.

    Cost: per new token one count for each order; per draft token one probe for each order and source.
    """
    for i in range(rows.shape[0]):
        _learn(token_ids, rows[i], prompt_lengths[i], lengths[i], addresses, capacities, counted)
    for i in range(rows.shape[0]):
        _draft(
            token_ids,
            rows[i],
            lengths[i],
            caps[i],
            min_prob,
            doubts,
            addresses,
            capacities,
            context,
            candidates,
            estimates,
            drafts,
            probs,
            facts,
        )


# The one form in which the kernel is compiled; the arguments in order.
KERNEL_SIGNATURE = (
    int32[:, ::1],
    int32[::1],
    int32[::1],
    int32[::1],
    int32[::1],
    float64,
    float64[:, ::1],
    int64[:, ::1],
    int64[:, ::1],
    int64[:, ::1],
    int32[::1],
    int32[:, ::1],
    float64[::1],
    int32[:, ::1],
    float64[:, ::1],
    int32[:, ::1],
)


class SuffixProposer(Proposer):
    """Draft for every running request what most likely follows, as far as it is likely enough.

    A token's estimate mixes what followed the last 1, 2, 4 and 8 tokens: in the request itself, and as far as they are
    given in outputs of earlier requests (``memory``), in all that is being generated (its adjacencies) and in reference
    texts (``corpus``). Longer contexts and the request's own text weigh more, by how often they were right; equal
    estimates are decided by what was seen last. The draft takes the likeliest token, then what likeliest follows that,
    while the product of the estimates stays at or above ``min_prob``: long where much of it was seen often, short or
    empty elsewhere.

    Args:
        token_table: the running requests' tokens, kept by the scheduler.
        num_speculative_tokens: longest draft.
        min_prob: in (0, 1).
        memory: earlier outputs; None to look at each request by itself.
        recycles: whether the memory's adjacencies are used; those of one and two tokens then replace the memory's.
        corpus: a table of reference texts.

    Cost: 144 to 288 bytes per token of a running request, in tables that double.

    Source: prediction by partial matching (Cleary and Witten, 1984) for the mixture; SuffixDecoding (arXiv 2411.04975)
    for outputs of earlier requests; Token Recycling (arXiv 2408.08696) for adjacencies.
    """

    def __init__(
        self,
        token_table: TokenTable,
        *,
        num_speculative_tokens: int,
        min_prob: float,
        memory: SharedMemory | None = None,
        recycles: bool = False,
        corpus: SuccessorTable | None = None,
    ) -> None:
        num_rows, _ = token_table.token_ids.shape
        num_sources, k = len(SOURCES), num_speculative_tokens
        self._token_ids = token_table.token_ids
        self._num_speculative_tokens = k
        self._min_prob = min_prob
        self._memory = memory
        self._corpus = corpus
        self._recycles = recycles
        self._doubts = np.array([SHARED_DOUBT, SHARED_DOUBT, SHARED_DOUBT, OWN_DOUBT])
        if recycles:
            self._doubts[MEMORY, np.array(ORDERS) <= RECYCLED_ORDER] = 0.0

        self._rows, self._lengths, self._prompt_lengths, self._caps = np.zeros((4, num_rows), np.int32)
        self._scratch = (
            np.zeros(MAX_ORDER + k, np.int32),
            np.zeros((4, MAX_CANDIDATES), np.int32),
            np.zeros(MAX_CANDIDATES, np.float64),
        )
        self._drafts = np.zeros((num_rows, k), np.int32)
        self._probs = np.zeros((num_rows, k), np.float64)
        self._facts = np.zeros((num_rows, 3), np.int32)
        self._row_of: dict[str, int] = {}  # the requests that have tables
        self._tables: dict[int, SuccessorTable] = {}  # by row
        # By row, a partition's table and adjacencies: what a kernel reads must not be freed meanwhile.
        self._shared: dict[int, tuple[SuccessorTable, SuccessorTable]] = {}
        self._addresses = np.zeros((num_rows, num_sources), np.int64)
        self._capacities = np.zeros((num_rows, num_sources), np.int64)
        self._counted = np.zeros((num_rows, 2), np.int64)
        warmup(suffix_kernel, [KERNEL_SIGNATURE])

    def propose(self, requests: Sequence[Request]) -> None:
        """Set ``_spec_token_ids`` of every request; see ``Proposer``."""
        eligible: list[Request] = []
        caps: list[int] = []
        for request, cap in requests_to_look_up(requests, self._num_speculative_tokens):
            self._attach(request)
            eligible.append(request)
            caps.append(cap)
        if not eligible:
            return
        count = len(eligible)
        self._rows[:count] = [request.row for request in eligible]
        self._lengths[:count] = [request.num_tokens for request in eligible]
        self._prompt_lengths[:count] = [request.num_prompt_tokens for request in eligible]
        self._caps[:count] = caps
        self._lookup(count)
        facts = self._facts[self._rows[:count]].tolist()
        for request, (num_drafts, match_length, source) in zip(eligible, facts, strict=True):
            request._spec_token_ids, request._spec_probs = [], []
            if num_drafts > 0:
                request._spec_token_ids = self._drafts[request.row, :num_drafts].tolist()
                request._spec_probs = self._probs[request.row, :num_drafts].tolist()
            request._spec_match_length = match_length
            request._spec_source = SOURCES[source]

    def released(self, request: Request) -> None:
        """Forget a request's own table; see ``Proposer``."""
        row = self._row_of.pop(request.request_id, None)
        if row is not None:
            del self._tables[row]
            self._shared.pop(row, None)
            self._addresses[row] = 0

    def finished(self, request: Request) -> None:
        """Let later requests of the same cache_salt draw on what this one generated; see ``Proposer``."""
        if self._memory is not None:
            self._memory.learn(request.cache_salt, request.output_token_ids)

    def _attach(self, request: Request) -> None:
        """Point a request's row at the tables it draws on."""
        row, num_tokens = request.row, request.num_tokens
        if request.request_id not in self._row_of:
            self._row_of[request.request_id] = row
            self._allot(row, num_tokens)
            self._counted[row, 1] = num_tokens
            if self._corpus is not None:
                self._point(row, CORPUS, self._corpus)
        elif len(ORDERS) * num_tokens > self._tables[row].capacity:
            self._allot(row, num_tokens)
        if self._memory is not None:
            partition = self._memory.partition(request.cache_salt)
            if self._shared.get(row, (None,))[0] is not partition.table:
                self._shared[row] = partition.table, partition.adjacency
                self._point(row, MEMORY, partition.table)
                if self._recycles:
                    self._point(row, RECYCLING, partition.adjacency)

    def _allot(self, row: int, num_tokens: int) -> None:
        """Give a row an empty table with room for all contexts of its tokens and some to come; the lookup fills it."""
        self._tables[row] = SuccessorTable(len(ORDERS) * (num_tokens + ROOM))
        self._point(row, OWN, self._tables[row])
        self._counted[row, 0] = 0

    def _point(self, row: int, source: int, table: SuccessorTable) -> None:
        self._addresses[row, source] = table.address
        self._capacities[row, source] = table.capacity

    def _lookup(self, num_requests: int) -> None:
        suffix_kernel(
            self._token_ids,
            self._rows[:num_requests],
            self._lengths[:num_requests],
            self._prompt_lengths[:num_requests],
            self._caps[:num_requests],
            self._min_prob,
            self._doubts,
            self._addresses,
            self._capacities,
            self._counted,
            *self._scratch,
            self._drafts,
            self._probs,
            self._facts,
        )
