"""Draft by copying: what followed the last few tokens when they occurred before."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import boolean, int32, int64

from engine_v1.core.token_table import TokenTable
from engine_v1.kernels.intrinsics import int32_view
from engine_v1.kernels.jit import jit, kernel_part, warmup
from engine_v1.request import Request
from engine_v1.spec_decode.hashing import mix, place
from engine_v1.spec_decode.proposer import Proposer, requests_to_look_up


def ngram_draft(
    tokens: Sequence[int], *, min_n: int, max_n: int, k: int, cap: int | None = None, tie: str = "latest"
) -> list[int]:
    """Return one request's draft by the rule itself: the definition and the oracle of ``propose_kernel``.

    n is the largest number in [min_n, max_n] such that the last n tokens also occur at some s < L - n; the
    two may overlap. The draft is what follows there, tokens[s + n : s + n + k], cut at L, then at ``cap``.
    Which s: "earliest" takes the smallest; "latest" the largest that has k tokens after its match, or, if
    none has, the largest.

    Args:
        tokens: the L known tokens: prompt and committed output.
        k: num_speculative_tokens; it decides which s is taken, and the cap does not.
        cap: the longest draft the request may have now; None for k.
    """
    length = len(tokens)
    for n in range(min(max_n, length - 1), min_n - 1, -1):
        suffix = list(tokens[length - n :])
        starts = [s for s in range(length - n) if list(tokens[s : s + n]) == suffix]
        if not starts:
            continue
        if tie == "earliest":
            start = starts[0]
        else:
            roomy = [s for s in starts if length - (s + n) >= k]
            start = (roomy or starts)[-1]
        return list(tokens[start + n : start + n + k])[:cap]
    return []


@kernel_part
def _find(tokens: Any, tables: Any, base: int, capacity: int, hashed: int, end: int, n: int) -> int:
    """Return the slot of the n-gram that ends before ``end``, or the free slot where it would go.

    Its table starts at ``base`` and has ``capacity`` slots, each with the end of an n-gram, 0 where free. What a slot
    means is read from the tokens themselves, so two n-grams of one hash are never taken for each other.
    """
    slot: int = place(hashed, capacity)
    while tables[base + slot] != 0:
        j = 1
        while j <= n and tokens[tables[base + slot] - j] == tokens[end - j]:
            j += 1
        if j > n:
            break
        slot = (slot + 1) & (capacity - 1)
    return base + slot


@kernel_part
def _index_ngrams(
    tokens: Any,
    tables: Any,
    capacity: int,
    start: int,
    limit: int,
    min_n: int,
    max_n: int,
    earliest: bool,  # noqa: FBT001
) -> None:
    """Note in each n's table the n-grams that end after ``start`` tokens and up to ``limit``."""
    for end in range(start + 1, limit + 1):
        hashed = 0
        for n in range(1, min(max_n, end) + 1):
            hashed = mix(hashed, tokens[end - n])
            if n >= min_n:
                slot = _find(tokens, tables, (n - min_n) * capacity, capacity, hashed, end, n)
                if tables[slot] == 0 or not earliest:
                    tables[slot] = end


@kernel_part
def _longest_match(
    tokens: Any, length: int, tables: Any, capacity: int, limit: int, min_n: int, max_n: int
) -> tuple[int, int]:
    """Return the n of the longest match of the last tokens, and where it ends; 0 and ``length`` without one."""
    best_n = 0
    best_end = length
    hashed = 0
    for n in range(1, min(max_n, length - 1) + 1):
        hashed = mix(hashed, tokens[length - n])
        if n >= min_n:
            end = tables[_find(tokens, tables, (n - min_n) * capacity, capacity, hashed, length, n)]
            if end == 0:
                break
            best_n = n
            best_end = end
    for end in range(length - 1, max(0, limit), -1):
        n = 0
        while n < max_n and n < end and tokens[end - 1 - n] == tokens[length - 1 - n]:
            n += 1
        if n > best_n and n >= min_n:
            best_n = n
            best_end = end
    return best_n, best_end


@jit
def propose_kernel(
    token_ids: Any,
    rows: Any,
    lengths: Any,
    caps: Any,
    min_n: int,
    max_n: int,
    k: int,
    earliest: bool,  # noqa: FBT001
    addresses: Any,
    capacities: Any,
    indexed: Any,
    drafts: Any,
    counts: Any,
    matches: Any,
) -> None:
    """Bring the index of every request of a batch up to date and write its draft, at its row.

    Args:
        token_ids: int32[num_rows, width], a request's tokens per row.
        rows: int32[num_requests], where each request's tokens stand and its draft goes.
        lengths: int32[num_requests], known tokens of each.
        caps: int32[num_requests], the longest draft each may have, 0..k.
        min_n: shortest n-gram that counts as a match.
        max_n: longest n-gram looked for.
        k: num_speculative_tokens.
        earliest: take the first of several matches; otherwise the last that has k tokens after it.
        addresses: int64[num_rows], where each row's tables lie: int32[max_n - min_n + 1, capacity].
        capacities: int64[num_rows], slots of a table: a power of two, greater than the request's length.
        indexed: int64[num_rows], up to which end a row's n-grams are in its tables; moved on here.
        drafts: int32[num_rows, k], written up to ``counts[row]``.
        counts: int32[num_rows], written at the rows of this batch only.
        matches: int32[num_rows], the n of each match, likewise; 0 where there is none.

    Cost: per new token one insertion for each n, per lookup at most one probe for each n, whatever the length.
    Nothing is allocated.
    """
    # A match that ends before position `end` has tokens[end:] to copy: 7 8 9 7 8, L = 5 -> end 2, n = 2, draft 9 7 8.
    # "earliest": all ends below L are in the tables, each n-gram with its first. "latest": only ends that have k tokens
    # after them are, each n-gram with its last; the fewer than k later ends are compared one by one and win only with a
    # longer match. A longer match is also a shorter one, so the first n that misses ends the search.
    for i in range(rows.shape[0]):
        row = rows[i]
        length = lengths[i]
        tokens = token_ids[row]
        capacity = capacities[row]
        tables = int32_view(addresses[row], (max_n - min_n + 1) * capacity)
        limit = length - 1 if earliest else length - k
        _index_ngrams(tokens, tables, capacity, indexed[row], limit, min_n, max_n, earliest)
        indexed[row] = max(indexed[row], limit)
        best_n, best_end = _longest_match(tokens, length, tables, capacity, limit, min_n, max_n)
        count = min(caps[i], length - best_end)
        for j in range(count):
            drafts[row, j] = tokens[best_end + j]
        counts[row] = count
        matches[row] = best_n


# The one form in which the kernel is compiled; the arguments in order.
KERNEL_SIGNATURE = (
    int32[:, ::1],
    int32[::1],
    int32[::1],
    int32[::1],
    int64,
    int64,
    int64,
    boolean,
    int64[::1],
    int64[::1],
    int64[::1],
    int32[:, ::1],
    int32[::1],
    int32[::1],
)


class NgramProposer(Proposer):
    """Draft for every running request by the n-gram rule, one kernel call per step.

    A request has a hash table for each n, from n-grams to where they ended, which follows its committed tokens. It is
    made when the request is first drafted for and forgotten when it gives its row back.

    Args:
        token_table: the running requests' tokens, kept by the scheduler.
        num_speculative_tokens: longest draft.
        prompt_lookup_min: shortest n-gram that counts as a match.
        prompt_lookup_max: longest n-gram looked for.
        prompt_lookup_tie: "latest" or "earliest", which of several matches is copied.

    Cost: compiles the kernel, or loads it, at construction. A step's lookup does not depend on the context; the first
    one of a request reads all its tokens. Memory is 5 to 16 bytes per token and n.

    Source: vLLM's pull request "[V1][Spec Decode] Ngram Spec Decode"; prompt lookup decoding (A. Saxena, 2023).
    """

    def __init__(
        self,
        token_table: TokenTable,
        *,
        num_speculative_tokens: int,
        prompt_lookup_min: int,
        prompt_lookup_max: int,
        prompt_lookup_tie: str = "latest",
    ) -> None:
        num_rows, _ = token_table.token_ids.shape
        self._token_ids = token_table.token_ids
        self._num_speculative_tokens = num_speculative_tokens
        earliest = prompt_lookup_tie == "earliest"
        self._rule = (prompt_lookup_min, prompt_lookup_max, num_speculative_tokens, earliest)
        self._rows = np.zeros(num_rows, np.int32)
        self._lengths = np.zeros(num_rows, np.int32)
        self._caps = np.zeros(num_rows, np.int32)
        self._drafts = np.zeros((num_rows, num_speculative_tokens), np.int32)
        self._counts = np.zeros(num_rows, np.int32)
        self._matches = np.zeros(num_rows, np.int32)

        self._row_of: dict[str, int] = {}  # the requests that have tables
        self._tables: dict[int, npt.NDArray[np.int32]] = {}  # row -> [max_n - min_n + 1, capacity]
        self._addresses = np.zeros(num_rows, np.int64)
        self._capacities = np.zeros(num_rows, np.int64)
        self._indexed = np.zeros(num_rows, np.int64)
        warmup(propose_kernel, [KERNEL_SIGNATURE])

    def propose(self, requests: Sequence[Request]) -> None:
        """Set ``_spec_token_ids`` of every request; see ``Proposer``."""
        eligible: list[Request] = []
        for request, cap in requests_to_look_up(requests, self._num_speculative_tokens):
            row, num_tokens = request.row, request.num_tokens
            if request.request_id not in self._row_of:
                self._row_of[request.request_id] = row
                self._allot(row, num_tokens)
            elif 4 * num_tokens > 3 * self._capacities[row]:
                self._allot(row, num_tokens)
            index = len(eligible)
            self._rows[index] = row
            self._lengths[index] = num_tokens
            self._caps[index] = cap
            eligible.append(request)
        if not eligible:
            return
        self._lookup(len(eligible))
        for request in eligible:
            row = request.row
            request._spec_token_ids = self._drafts[row].tolist()[: self._counts[row]]
            request._spec_match_length = int(self._matches[row])
            request._spec_source = "ngram"

    def released(self, request: Request) -> None:
        """Forget a request's tables; see ``Proposer``."""
        row = self._row_of.pop(request.request_id, None)
        if row is not None:
            del self._tables[row]
            self._addresses[row] = 0

    def _allot(self, row: int, num_tokens: int) -> None:
        """Give a row empty tables, which the lookup then fills to a half at most; they grow at three quarters."""
        min_n, max_n, *_ = self._rule
        capacity = 1 << (2 * num_tokens + 63).bit_length()
        self._tables[row] = np.zeros((max_n - min_n + 1, capacity), np.int32)
        self._addresses[row] = self._tables[row].ctypes.data
        self._capacities[row] = capacity
        self._indexed[row] = 0

    def _lookup(self, num_requests: int) -> None:
        propose_kernel(
            self._token_ids,
            self._rows[:num_requests],
            self._lengths[:num_requests],
            self._caps[:num_requests],
            *self._rule,
            self._addresses,
            self._capacities,
            self._indexed,
            self._drafts,
            self._counts,
            self._matches,
        )
