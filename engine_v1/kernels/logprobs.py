"""Log probabilities of many rows of logits at once: each row in pieces of fixed size, joined in their order.

A row's piece is always the same columns, whatever the number of rows or threads, so its sums are the same bits in any
batch, and a single row keeps every thread busy.
"""

import numpy as np
from numba import prange, types
from numba.np.ufunc.parallel import get_thread_id

from engine_v1.kernels.jit import jit, kernel_part

PIECE = 2048  # columns, a power of two: two buffers of that size fit the first-level cache

_LOG2_E = 1.4426950408889634
_LN2_HIGH = 0.693147180369123816490  # its product with any exponent of a float64 is exact
_LN2_LOW = 1.90821492927058770002e-10
_ROUND = 6755399441055744.0  # 1.5 * 2**52: adding it leaves the nearest integer in the low bits
_LEAST = -700.0  # exp of less is nothing beside the 1 of the largest, and no normal float64


@kernel_part
def _exp(x):  # type: ignore[no-untyped-def]
    """Return exp(x) for x <= 0 to 1e-12 relative, without a branch or a call, so that a loop of it runs on vectors."""
    x = max(x, _LEAST)
    shifted = x * _LOG2_E + _ROUND
    n = shifted - _ROUND
    r = (x - n * _LN2_HIGH) - n * _LN2_LOW
    # Taylor's series on |r| <= ln(2) / 2: the first term left out is 2e-13.
    p = 1.0 / 39916800.0 * r + 1.0 / 3628800.0
    p = p * r + 1.0 / 362880.0
    p = p * r + 1.0 / 40320.0
    p = p * r + 1.0 / 5040.0
    p = p * r + 1.0 / 720.0
    p = p * r + 1.0 / 120.0
    p = p * r + 1.0 / 24.0
    p = p * r + 1.0 / 6.0
    p = p * r + 0.5
    p = p * r + 1.0
    p = p * r + 1.0
    exponent = (np.float64(shifted).view(np.int64) + np.int64(1023)) << np.int64(52)
    return p * np.int64(exponent).view(np.float64)


@kernel_part
def _largest(logits, start, stop):  # type: ignore[no-untyped-def]
    """Return the largest of a piece, NaN where one is a positive NaN: by integers, whose maximum runs on vectors."""
    best = np.int32(-0x80000000)
    for i in range(start, stop):
        bits = np.float32(logits[i]).view(np.int32)
        key = np.int32(bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))  # ascends with the float
        best = max(best, key)
    return np.int32(best ^ ((best >> np.int32(31)) & np.int32(0x7FFFFFFF))).view(np.float32)


@kernel_part
def _count_at_least(logits, start, stop, bound):  # type: ignore[no-untyped-def]
    count = 0
    for i in range(start, stop):
        count += logits[i] >= bound
    return count


@kernel_part
def _sum_of_exp(logits, start, stop, best, buffer):  # type: ignore[no-untyped-def]
    """Return the sum of exp(logit - best) over a piece, as a tree of fixed shape."""
    size = stop - start
    for i in range(size):
        buffer[i] = _exp(np.float64(logits[start + i]) - best)
    for i in range(size, PIECE):
        buffer[i] = 0.0
    half = PIECE // 2
    while half > 0:
        for i in range(half):
            buffer[i] += buffer[half + i]
        half //= 2
    return buffer[0]


@kernel_part
def _list_best(logits, start, stop, count, ids, values):  # type: ignore[no-untyped-def]
    """Write a piece's `count` largest logits in descending order, equals in the order of ids; -1 where it has fewer."""
    found = 0
    for i in range(start, stop):
        value = logits[i]
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
        ids[at] = i
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


@jit(parallel=True)
def logprob_rows(  # type: ignore[no-untyped-def]
    logits, indices, token_ids, counts, sums, best, at_least, piece_ids, piece_values, heads, buffers,
    ids, values, ranks, lengths, log_totals,
):  # fmt: skip
    """List the chosen token and the largest logits of some rows, and the logarithm of their sums of exponentials.

    Args:
        logits: float32[any, vocab_size].
        indices: int64[num_rows], which rows.
        token_ids: int64[num_rows], the chosen tokens.
        counts: int64[num_rows], how many of the largest follow each, at most the width of `piece_ids`.
        sums: float64[num_rows, num_pieces], scratch.
        best: float32[num_rows, num_pieces], scratch.
        at_least: int64[num_rows, num_pieces], scratch.
        piece_ids: int32[num_rows, num_pieces, most], scratch.
        piece_values: float32[num_rows, num_pieces, most], scratch.
        heads: int64[num_rows, num_pieces], scratch.
        buffers: float64[threads, PIECE], scratch.
        ids: int32[num_rows, most + 1], written: the chosen token, then the others.
        values: float32[num_rows, most + 1], written: their logits.
        ranks: int32[num_rows, most + 1], written.
        lengths: int64[num_rows], written: how many entries of a row are filled.
        log_totals: float64[num_rows], written.
    """
    num_rows, num_pieces = sums.shape
    vocab_size = logits.shape[1]
    for unit in prange(num_rows * num_pieces):
        row = unit // num_pieces
        piece = unit % num_pieces
        line = logits[indices[row]]
        start = piece * PIECE
        stop = min(start + PIECE, vocab_size)
        best[row, piece] = _largest(line, start, stop)
        sums[row, piece] = _sum_of_exp(line, start, stop, np.float64(best[row, piece]), buffers[get_thread_id()])
        at_least[row, piece] = _count_at_least(line, start, stop, line[token_ids[row]])
        count = counts[row]
        if count > 0:
            _list_best(line, start, stop, count, piece_ids[row, piece], piece_values[row, piece])
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
    _array(i64, 2), _array(i32, 3), _array(f32, 3), _array(i64, 2), _array(f64, 2), _array(i32, 2), _array(f32, 2),
    _array(i32, 2), _array(i64, 1), _array(f64, 1),
)  # fmt: skip
