"""Sampling from single rows of logits, in a fixed order of operations and without sorting them.

Logits are compared as unsigned keys in the same order (the bits of a float32, flipped so that they ascend). A count or
sum over the upper sixteen bits of the keys finds the bin in which a bound lies, one over the lower sixteen the bound
itself: two passes over the vocabulary, exact, whatever the distribution.
"""

import numpy as np
from numba import prange, types
from numba.np.ufunc.parallel import get_thread_id

from engine_v1.kernels.jit import jit

BINS = 1 << 16  # of sixteen bits of a key


@jit(cache=False)
def _key(value):  # type: ignore[no-untyped-def]
    """Return a float32's uint32 key: a < b exactly when key(a) < key(b)."""
    bits = np.float32(value).view(np.uint32)
    if bits == np.uint32(0x80000000):  # -0.0 equals 0.0
        bits = np.uint32(0)
    if bits & np.uint32(0x80000000):
        return np.uint32(~bits)
    return np.uint32(bits | np.uint32(0x80000000))


@jit(cache=False)
def _kth_largest(logits, k, bins):  # type: ignore[no-untyped-def]
    """Return the key of the k-th largest logit."""
    bins[:] = 0.0
    for i in range(logits.shape[0]):
        bins[_key(logits[i]) >> 16] += 1.0
    seen = 0.0
    high = BINS - 1
    while seen + bins[high] < k:
        seen += bins[high]
        high -= 1
    bins[:] = 0.0
    for i in range(logits.shape[0]):
        key = _key(logits[i])
        if key >> 16 == high:
            bins[key & np.uint32(0xFFFF)] += 1.0
    low = BINS - 1
    while seen + bins[low] < k:
        seen += bins[low]
        low -= 1
    return np.uint32((high << 16) | low)


@jit(cache=False)
def _top_p_bound(logits, weights, needed, bins):  # type: ignore[no-untyped-def]
    """Return the key of the smallest logit to keep: the largest bound above which the weights sum to `needed`."""
    bins[:] = 0.0
    for i in range(logits.shape[0]):
        bins[_key(logits[i]) >> 16] += weights[i]
    total = 0.0
    high = BINS - 1
    while high > 0 and total + bins[high] < needed:
        total += bins[high]
        high -= 1
    bins[:] = 0.0
    for i in range(logits.shape[0]):
        key = _key(logits[i])
        if key >> 16 == high:
            bins[key & np.uint32(0xFFFF)] += weights[i]
    low = BINS - 1
    while low > 0 and total + bins[low] < needed:
        total += bins[low]
        low -= 1
    return np.uint32((high << 16) | low)


@jit(cache=False)
def _argmax(logits):  # type: ignore[no-untyped-def]
    """Return the lowest index of the largest value, and that value; NaN where any is."""
    best = logits[0]
    index = 0
    for i in range(logits.shape[0]):
        value = logits[i]
        if np.isnan(value):
            return i, value
        if value > best:
            best = value
            index = i
    return index, best


@jit(cache=False)
def _draw(logits, best, temperature, top_k, top_p, number, weights, bins):  # type: ignore[no-untyped-def]
    """Return the token at `number` of the inverse CDF over the kept tokens, in the order of their ids."""
    size = logits.shape[0]
    bound = np.uint32(0)
    if 0 < top_k < size:
        bound = _kth_largest(logits, top_k, bins)
    total = 0.0
    for i in range(size):
        weight = 0.0
        if _key(logits[i]) >= bound:
            weight = np.exp((np.float64(logits[i]) - best) / temperature)
        weights[i] = weight
        total += weight
    if top_p < 1.0:
        bound = max(bound, _top_p_bound(logits, weights, top_p * total, bins))
        total = 0.0
        for i in range(size):
            if _key(logits[i]) < bound:
                weights[i] = 0.0
            total += weights[i]
    target = number * total
    reached = 0.0
    last = 0
    for i in range(size):
        if weights[i] > 0.0:
            reached += weights[i]
            last = i
            if reached > target:
                return i
    return last


@jit(cache=False)
def _copy_masked(logits, mask, out):  # type: ignore[no-untyped-def]
    """Copy a row, with minus infinity where the mask has no bit."""
    for i in range(logits.shape[0]):
        out[i] = logits[i] if (mask[i >> 5] >> np.uint32(i & 31)) & np.uint32(1) else np.float32(-np.inf)


@jit(parallel=True)
def sample_rows(  # type: ignore[no-untyped-def]
    logits, masks, mask_index, temperature, top_k, top_p, numbers, values, weights, bins, token_ids, status
):
    """Draw a token for each row, the arg-max where the temperature is 0.

    Args:
        logits: float32[num_rows, vocab_size].
        masks: uint32[num_masks, words].
        mask_index: int32[num_rows], -1 for none.
        temperature: float64[num_rows].
        top_k: int32[num_rows], 0 for all.
        top_p: float64[num_rows].
        numbers: float64[num_rows], one uniform number each.
        values: float32[threads, vocab_size], scratch.
        weights: float64[threads, vocab_size], scratch.
        bins: float64[threads, BINS], scratch.
        token_ids: int64[num_rows], written.
        status: int8[num_rows], written: 0, or 1 where the largest logit is not finite, 2 where the mask leaves none.
    """
    for row in prange(logits.shape[0]):
        thread = get_thread_id()
        row_values = values[thread]
        index, best = _argmax(logits[row])
        status[row] = 0 if np.isfinite(best) else 1
        if mask_index[row] >= 0:
            _copy_masked(logits[row], masks[mask_index[row]], row_values)
            if status[row] == 0:
                index, best = _argmax(row_values)
                status[row] = 0 if np.isfinite(best) else 2
        else:
            row_values = logits[row]
        if temperature[row] > 0.0 and status[row] == 0:
            index = _draw(
                row_values, np.float64(best), temperature[row], top_k[row], top_p[row], numbers[row],
                weights[thread], bins[thread],
            )  # fmt: skip
        token_ids[row] = index


def _array(dtype: types.Type, ndim: int) -> types.Array:
    return types.Array(dtype, ndim, "C")


f32, f64, i32, i64 = types.float32, types.float64, types.int32, types.int64
SAMPLE_ROWS = (
    types.Array(f32, 2, "A"), _array(types.uint32, 2), _array(i32, 1), _array(f64, 1), _array(i32, 1), _array(f64, 1),
    _array(f64, 1), types.Array(f32, 2, "A"), _array(f64, 2), _array(f64, 2), _array(i64, 1), _array(types.int8, 1),
)  # fmt: skip
