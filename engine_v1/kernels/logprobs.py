"""Log probabilities of many rows of logits at once: each row in pieces of fixed size, joined in their order.

A row's piece is always the same columns, whatever the number of rows or threads, so its sums are the same bits in any
batch, and a single row keeps every thread busy.
"""

import math

import numpy as np
from numba import prange, types
from numba.np.ufunc.parallel import get_thread_id

from engine_v1.kernels.elementwise import LOG2_E, exp2
from engine_v1.kernels.intrinsics import LANES, any_in_range, load, reduce_add_double, splat
from engine_v1.kernels.jit import jit, kernel_part
from engine_v1.kernels.sampling import COUNT, copy_row, measure

PIECE = 2048  # columns, a power of two: two buffers of that size fit the first-level cache

_LEAST = -700.0  # exp of less is nothing beside the 1 of the largest, and no normal float64


@kernel_part
def _count_at_least(piece, size, width, bound):  # type: ignore[no-untyped-def]
    if bound == -math.inf:  # what fills the end is not counted
        return size
    return np.int64(measure(piece, width, bound, COUNT))


@kernel_part
def _sum_of_exp(piece, width, best):  # type: ignore[no-untyped-def]
    """Sum exp(logit - best) over a piece: float32 exponentials, added in float64 and in a fixed order."""
    total = 0.0
    if best != -math.inf:
        top, factor = splat(best), splat(LOG2_E)
        for i in range(0, width, LANES):
            total += reduce_add_double(exp2((load(piece, i) - top) * factor))
    return total


@kernel_part
def _list_best(piece, size, start, count, ids, values):  # type: ignore[no-untyped-def]
    """Write a piece's `count` largest logits in descending order, equals in the order of ids; -1 where it has fewer."""
    found = 0
    infinite = splat(math.inf)
    for first in range(0, size, LANES):
        if found == count and not any_in_range(load(piece, first), splat(values[count - 1]), infinite):
            continue
        for i in range(first, min(size, first + LANES)):
            value = piece[i]
            if found == count:
                if not value > values[count - 1]:
                    continue
                at = count - 1
            else:
                at = found
                found += 1
            while at > 0 and value > values[at - 1]:
                values[at] = values[at - 1]
                ids[at] = ids[at - 1]
                at -= 1
            values[at] = value
            ids[at] = start + i
    for i in range(found, count):
        ids[i] = -1


@kernel_part
def _merge(count, token_id, piece_ids, piece_values, heads, ids, values, ranks):  # type: ignore[no-untyped-def]
    """Append the `count` best of all pieces behind the chosen token, which is not repeated; return the length."""
    heads[:] = 0
    length = 1
    for rank in range(1, count + 1):
        winner = -1
        for piece in range(piece_ids.shape[0]):
            head = heads[piece]
            if head == count or piece_ids[piece, head] < 0:
                continue
            if winner < 0 or piece_values[piece, head] > piece_values[winner, heads[winner]]:
                winner = piece
        if winner < 0:
            break
        candidate = piece_ids[winner, heads[winner]]
        if candidate != token_id:
            ids[length] = candidate
            values[length] = piece_values[winner, heads[winner]]
            ranks[length] = rank
            length += 1
        heads[winner] += 1
    return length


@kernel_part
def _log_total(sums, best):  # type: ignore[no-untyped-def]
    """Return the logarithm of a row's sum of exponentials, of its pieces' sums relative to their largest."""
    largest = np.float64(best[0])
    for piece in range(1, best.shape[0]):
        largest = max(largest, np.float64(best[piece]))
    total = 0.0
    for piece in range(best.shape[0]):
        total += sums[piece] * np.exp(max(np.float64(best[piece]) - largest, _LEAST))
    return largest + np.log(total)


@kernel_part
def _measure_piece(  # type: ignore[no-untyped-def]
    row, piece, logits, indices, token_ids, counts, sums, best, at_least, piece_ids, piece_values, copy
):  # fmt: skip
    """Do what :func:`logprob_rows` needs of one piece of a row."""
    line = logits[indices[row]]
    start = piece * PIECE
    size = min(PIECE, len(line) - start)
    width = (size + LANES - 1) // LANES * LANES
    best[row, piece] = copy_row(line[start : start + size], size, copy)
    sums[row, piece] = _sum_of_exp(copy, width, best[row, piece])
    at_least[row, piece] = _count_at_least(copy, size, width, line[token_ids[row]])
    if counts[row] > 0:
        _list_best(copy, size, start, counts[row], piece_ids[row, piece], piece_values[row, piece])


@jit(parallel=True)
def logprob_rows(  # type: ignore[no-untyped-def]
    logits, indices, token_ids, counts, sums, best, at_least, piece_ids, piece_values, heads, buffers,
    ids, values, ranks, lengths, log_totals,
):  # fmt: skip
    """List the chosen token and the largest logits of some rows, and the logarithm of their sums of exponentials.

    Args:
        logits: float32[any, vocab_size], each row contiguous.
        indices: int64[num_rows], which rows.
        token_ids: int64[num_rows], the chosen tokens.
        counts: int64[num_rows], how many of the largest follow each, at most the width of `piece_ids`.
        sums: float64[num_rows, num_pieces], scratch.
        best: float32[num_rows, num_pieces], scratch.
        at_least: int64[num_rows, num_pieces], scratch.
        piece_ids: int32[num_rows, num_pieces, most], scratch.
        piece_values: float32[num_rows, num_pieces, most], scratch.
        heads: int64[num_rows, num_pieces], scratch.
        buffers: float32[threads, PIECE], scratch.
        ids: int32[num_rows, most + 1], written: the chosen token, then the others.
        values: float32[num_rows, most + 1], written: their logits.
        ranks: int32[num_rows, most + 1], written.
        lengths: int64[num_rows], written: how many entries of a row are filled.
        log_totals: float64[num_rows], written.
    """
    num_rows, num_pieces = sums.shape
    for unit in prange(num_rows * num_pieces):
        _measure_piece(
            unit // num_pieces, unit % num_pieces, logits, indices, token_ids, counts, sums, best, at_least, piece_ids,
            piece_values, buffers[get_thread_id()],
        )  # fmt: skip
    for row in range(num_rows):
        log_totals[row] = _log_total(sums[row], best[row])
        ids[row, 0] = token_ids[row]
        values[row, 0] = logits[indices[row], token_ids[row]]
        ranks[row, 0] = 0
        for piece in range(num_pieces):
            ranks[row, 0] += at_least[row, piece]
        lengths[row] = _merge(
            counts[row], token_ids[row], piece_ids[row], piece_values[row], heads[row],
            ids[row], values[row], ranks[row],
        )  # fmt: skip


def _array(dtype: types.Type, ndim: int) -> types.Array:
    return types.Array(dtype, ndim, "C")


f32, f64, i32, i64 = types.float32, types.float64, types.int32, types.int64
LOGPROB_ROWS = (
    types.Array(f32, 2, "A"), _array(i64, 1), _array(i64, 1), _array(i64, 1), _array(f64, 2), _array(f32, 2),
    _array(i64, 2), _array(i32, 3), _array(f32, 3), _array(i64, 2), _array(f32, 2), _array(i32, 2), _array(f32, 2),
    _array(i32, 2), _array(i64, 1), _array(f64, 1),
)  # fmt: skip
