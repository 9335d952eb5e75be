"""Log probabilities on the CPU: the definition of :mod:`engine_v1.sample.logprobs`, for many rows in one kernel."""

import numba
import numpy as np
import numpy.typing as npt

from engine_v1.core.scheduler_output import TokenLogprobs
from engine_v1.kernels.jit import warmup
from engine_v1.kernels.logprobs import LOGPROB_ROWS, PIECE, logprob_rows
from engine_v1.kernels.parallel import num_threads, parallel_entry

_MAX_SERIAL_ROWS = 2  # so few take one thread less time than it takes to wait for another that others use
_MAX_LISTED = 64  # beyond, sorting the row is quicker than keeping a list of its largest


class KernelLogprobs:
    """Computes log probabilities; a row's are the same bits whatever other rows are asked about.

    Args:
        normalise: give log probabilities; else the logits themselves.
    """

    def __init__(self, *, normalise: bool = True) -> None:
        warmup(logprob_rows, [LOGPROB_ROWS])
        self._normalise = normalise
        self._buffers = np.zeros((num_threads(), PIECE), np.float32)

    def compute(
        self,
        logits: npt.NDArray[np.float32],
        indices: npt.NDArray[np.int64],
        token_ids: npt.NDArray[np.int64],
        num_logprobs: npt.NDArray[np.int64],
    ) -> list[TokenLogprobs]:
        """Return what :func:`engine_v1.sample.logprobs.token_logprobs` does for each of some rows.

        Args:
            logits: float32[any, vocab_size], the largest of each row finite.
            indices: int64[num_rows], which rows.
            token_ids: int64[num_rows], the chosen tokens.
            num_logprobs: int64[num_rows], how many of the most likely follow each.

        Cost: one parallel region; a row of 49152 logits is about 20 us of one thread, plus a sort for each row that
        asks for more than 64.
        """
        num_rows, vocab_size = len(indices), logits.shape[1]
        num_pieces = -(-vocab_size // PIECE)
        counts = np.where(num_logprobs > _MAX_LISTED, 0, np.minimum(num_logprobs, vocab_size))
        most = int(counts.max(initial=0))
        pieces, lists, entries = (num_rows, num_pieces), (num_rows, num_pieces, most), (num_rows, most + 1)
        ids, values, ranks = np.empty(entries, np.int32), np.zeros(entries, np.float32), np.empty(entries, np.int32)
        lengths, log_totals = np.empty(num_rows, np.int64), np.empty(num_rows, np.float64)
        with parallel_entry:
            if num_rows <= _MAX_SERIAL_ROWS:
                numba.set_num_threads(1)  # until the next entry
            logprob_rows(
                logits, indices, token_ids, counts, np.empty(pieces), np.empty(pieces, np.float32),
                np.empty(pieces, np.int64), np.empty(lists, np.int32), np.empty(lists, np.float32),
                np.empty(pieces, np.int64), self._buffers, ids, values, ranks, lengths, log_totals,
            )  # fmt: skip
        if self._normalise:
            values = (values - log_totals[:, None]).astype(np.float32)
        found = []
        for row, length in enumerate(lengths.tolist()):
            entry = TokenLogprobs(ids[row, :length], values[row, :length], ranks[row, :length])
            if num_logprobs[row] > _MAX_LISTED:
                log_total = log_totals[row] if self._normalise else 0.0
                entry = _extend_by_sorting(entry, logits[indices[row]], int(num_logprobs[row]), log_total)
            found.append(entry)
        return found


def _extend_by_sorting(
    entry: TokenLogprobs, logits: npt.NDArray[np.float32], count: int, log_total: float
) -> TokenLogprobs:
    """Append the `count` largest of a row to the chosen token's entry."""
    # Descending in the logit, ascending in the id: a float's bits order like integers, negative ones backwards.
    bits = (logits + np.float32(0.0)).view(np.int32)  # adding 0 makes -0.0 the same bits as 0.0
    descending = np.where(bits < 0, bits & 0x7FFFFFFF, ~bits).astype(np.int64)
    order = np.sort(descending << 32 | np.arange(logits.size))[:count] & 0xFFFFFFFF
    rest = np.flatnonzero(order != entry.token_ids[0])
    ids = np.concatenate((entry.token_ids, order[rest].astype(np.int32)))
    values = np.concatenate((entry.logprobs, (logits[order[rest]] - log_total).astype(np.float32)))
    return TokenLogprobs(ids, values, np.concatenate((entry.ranks, (rest + 1).astype(np.int32))))
