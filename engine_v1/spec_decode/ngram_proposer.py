"""Draft by copying: what followed the last few tokens when they occurred before."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numba import boolean, int32, int64

from engine_v1.core.token_table import TokenTable
from engine_v1.kernels.jit import jit, warmup
from engine_v1.request import Request
from engine_v1.spec_decode.proposer import Proposer


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
    drafts: Any,
    counts: Any,
    matches: Any,
) -> None:
    """Write the draft of every request of a batch, at its row.

    Args:
        token_ids: int32[num_rows, width], a request's tokens per row.
        rows: int32[num_requests], where each request's tokens stand and its draft goes.
        lengths: int32[num_requests], known tokens of each.
        caps: int32[num_requests], the longest draft each may have, 0..k.
        min_n: shortest n-gram that counts as a match.
        max_n: longest n-gram looked for.
        k: num_speculative_tokens.
        earliest: take the first of several matches; otherwise the last that has k tokens after it.
        drafts: int32[num_rows, k], written up to ``counts[row]``.
        counts: int32[num_rows], written at the rows of this batch only.
        matches: int32[num_rows], the n of each match, likewise; 0 where there is none.

    Cost: one pass over a request's tokens, 0.6 to 0.9 ns each (AMD EPYC, ``benchmarks/bench_proposer.py``),
    less where a match of max_n tokens ends it early. Nothing is allocated.
    """
    # A match that ends before position `end` has tokens[end:] to copy, and the longest match wins:
    # tokens 7 8 9 7 8, L = 5 -> end 2, n = 2, draft 9 7 8. "earliest" goes forwards and keeps the first of
    # its n. "latest" goes backwards and keeps the first too, unless that has less than k tokens to copy and
    # one further back has enough.
    for i in range(rows.shape[0]):
        row = rows[i]
        length = lengths[i]
        tokens = token_ids[row]
        last = tokens[length - 1]
        best_n = min_n - 1
        best_end = length
        for distance in range(1, length):
            end = distance if earliest else length - distance
            if tokens[end - 1] != last:
                continue
            n = 1
            while n < max_n and n < end and tokens[end - 1 - n] == tokens[length - 1 - n]:
                n += 1
            has_room = earliest or length - end >= k
            if n > best_n or (n == best_n and has_room and not earliest and 0 < length - best_end < k):
                best_n = n
                best_end = end
                if n == max_n and has_room:
                    break
        count = min(caps[i], length - best_end)
        for j in range(count):
            drafts[row, j] = tokens[best_end + j]
        counts[row] = count
        matches[row] = best_n if best_end < length else 0


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
    int32[:, ::1],
    int32[::1],
    int32[::1],
)


class NgramProposer(Proposer):
    """Draft for every running request by the n-gram rule, one kernel call per step.

    Args:
        token_table: the running requests' tokens, kept by the scheduler.
        num_speculative_tokens: longest draft.
        prompt_lookup_min: shortest n-gram that counts as a match.
        prompt_lookup_max: longest n-gram looked for.
        prompt_lookup_tie: "latest" or "earliest", which of several matches is copied.

    Cost: compiles the kernel, or loads it, at construction; later allocates the drafts' lists and nothing
    else.

    Source: vLLM's pull request "[V1][Spec Decode] Ngram Spec Decode"; prompt lookup decoding (A. Saxena,
    2023).
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
        num_rows, width = token_table.token_ids.shape
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

        # Compiled, then run once over a whole row: the first request waits for nothing.
        warmup(propose_kernel, [KERNEL_SIGNATURE])
        self._lengths[0] = width
        self._caps[0] = num_speculative_tokens
        self._lookup(1)

    def propose(self, requests: Sequence[Request]) -> None:
        """Set ``_spec_token_ids`` of every request; see ``Proposer``."""
        eligible: list[Request] = []
        for request in requests:
            request._spec_token_ids = []
            if request.num_pending_tokens != 1:
                continue  # a prompt not read to its end yet
            cap = request.max_draft_tokens(self._num_speculative_tokens)
            if cap == 0:
                continue
            index = len(eligible)
            self._rows[index] = request.row
            self._lengths[index] = request.num_tokens
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

    def _lookup(self, num_requests: int) -> None:
        propose_kernel(
            self._token_ids,
            self._rows[:num_requests],
            self._lengths[:num_requests],
            self._caps[:num_requests],
            *self._rule,
            self._drafts,
            self._counts,
            self._matches,
        )
