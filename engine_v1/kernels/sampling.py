"""Tokens from rows of logits: masks, rules, temperature, cuts and the draw, each row by itself, in a fixed order.

Nothing sorts the vocabulary. The k-th largest logit, and the weight above which the likeliest tokens hold top_p, are
found by looking at ever lower levels below the maximum until one must contain the bound, and halving that level until
the bound is left. What comes out for a row depends on its logits and parameters alone.
"""

import math
from collections.abc import Callable

import numpy as np
from numba import types

from engine_v1.kernels import parallel
from engine_v1.kernels.elementwise import LOG2_E, exp2
from engine_v1.kernels.intrinsics import (
    LANES,
    any_in_range,
    double_view,
    float_view,
    int8_view,
    int32_view,
    int64_view,
    load,
    maximum,
    order_key,
    order_value,
    reduce_add,
    reduce_add_double,
    reduce_max,
    splat,
    store,
    where_greater,
    where_nan,
)
from engine_v1.kernels.jit import kernel_part, native_function
from engine_v1.kernels.logits_rules import apply_mask, apply_rules
from engine_v1.kernels.schedule import claim, finish

# Tokens per remembered sum of the cumulative distribution.
CDF_BLOCK = 256
# So many values are not gathered one by one but looked at in whole rows, sixteen at a time.
MANY = 2048
OK, NOT_FINITE, NO_TOKEN = 0, 1, 2  # of RowStatus
# What the values above a bound come to: how many they are, or their sum.
COUNT, SUM = True, False

# Addresses and numbers that the kernel gets, in this order; the rules' arrays follow as FlatRules lists them.
(
    SYNC, NUM_ROWS, VOCAB, LOGITS, LOGITS_STRIDE, VALUES, CANDIDATES, COUNTS, WIDTH, SUMS, NUM_SUMS, MASKS, MASK_WORDS,
    MASK_INDEX, TEMPERATURE, MIN_P, TOP_K, TOP_P, NUMBERS, TOKEN_IDS, STATUS, TABLE_ROWS, TABLE, TABLE_COLUMNS,
    NUM_TOKENS, NUM_PROMPT_TOKENS, PROCESSED, PROCESSED_STRIDE, RULES,
) = range(29)  # fmt: skip


@kernel_part
def copy_row(logits, size, out):  # type: ignore[no-untyped-def]
    """Copy a row to whole vectors, the end filled with minus infinity; return its maximum, NaN if it holds one."""
    largest = splat(-math.inf)
    marks = splat(0.0)
    full = size // LANES * LANES
    for i in range(0, full, LANES):
        v = load(logits, i)
        store(out, i, v)
        largest = maximum(v, largest)
        marks = where_nan(v, v, marks)
    if full < size:
        store(out, full, splat(-math.inf))
        for i in range(full, size):
            out[i] = logits[i]
        v = load(out, full)
        largest = maximum(v, largest)
        marks = where_nan(v, v, marks)
    marked = reduce_add(marks)
    return marked if np.isnan(marked) else reduce_max(largest)


@kernel_part
def largest_of(values, width):  # type: ignore[no-untyped-def]
    """Return the largest of values without NaN."""
    largest = splat(-math.inf)
    for i in range(0, width, LANES):
        largest = maximum(load(values, i), largest)
    return reduce_max(largest)


@kernel_part
def first_equal(values, value):  # type: ignore[no-untyped-def]
    """Return the lowest index of a finite value, the largest there is."""
    i = 0
    low, high = splat(value), splat(math.inf)
    while not any_in_range(load(values, i), low, high):
        i += LANES
    while values[i] != value:
        i += 1
    return i


@kernel_part
def gather(values, width, low, high, out):  # type: ignore[no-untyped-def]
    """Write the values in [low, high), in their order; return how many, MANY where they are too many to write."""
    count = 0
    bound, limit = splat(low), splat(high)
    for i in range(0, width, LANES):
        if any_in_range(load(values, i), bound, limit):
            if count + LANES >= MANY:
                return MANY
            for j in range(i, i + LANES):
                value = values[j]
                out[count] = value
                count += 1 if low <= value < high else 0
    return count


@kernel_part
def measure(values, width, bound, counting):  # type: ignore[no-untyped-def]
    """Return how many values of a row are at least `bound`, or their sum."""
    b, zero, one = splat(bound), splat(0.0), splat(1.0)
    total = 0.0
    if counting:
        number = splat(0.0)
        for i in range(0, width, LANES):
            number = number + where_greater(b, load(values, i), zero, one)
        return np.float64(reduce_add(number))
    for i in range(0, width, LANES):
        v = load(values, i)
        total += reduce_add_double(where_greater(b, v, zero, v))
    return total


@kernel_part
def sum_at_least(values, count, bound):  # type: ignore[no-untyped-def]
    """Sum those of `count` values that are at least `bound`, in float64 and always in one order."""
    a = b = c = d = 0.0
    whole = count // 4 * 4
    for i in range(0, whole, 4):
        a += values[i] if values[i] >= bound else 0.0
        b += values[i + 1] if values[i + 1] >= bound else 0.0
        c += values[i + 2] if values[i + 2] >= bound else 0.0
        d += values[i + 3] if values[i + 3] >= bound else 0.0
    for i in range(whole, count):
        a += values[i] if values[i] >= bound else 0.0
    return (a + b) + (c + d)


@kernel_part
def count_at_least(values, count, bound):  # type: ignore[no-untyped-def]
    """Count those of `count` values that are at least `bound`."""
    total = 0
    for i in range(count):
        total += 1 if values[i] >= bound else 0
    return np.float64(total)


@kernel_part
def keep_side(values, count, pivot, upper):  # type: ignore[no-untyped-def]
    """Move the values on one side of a pivot (at least it, or below it) to the front; return how many."""
    kept = 0
    for i in range(count):
        value = values[i]
        values[kept] = value
        kept += 1 if (value >= pivot) == upper else 0
    return kept


@kernel_part
def narrow(candidates, count, first, last, above, needed, counting):  # type: ignore[no-untyped-def]
    """Return the largest key in [first, last] that comes to `needed`, else first; `above` is what lies beyond last."""
    while first < last:
        middle = (first + last + 1) >> 1
        pivot = order_value(middle)
        part = count_at_least(candidates, count, pivot) if counting else sum_at_least(candidates, count, pivot)
        reached = above + part >= needed
        if reached:
            first = middle
        else:
            last = middle - 1
            above += part
        count = keep_side(candidates, count, pivot, reached)
    return first


@kernel_part
def bound_within(values, width, low, high, above, needed, counting, candidates):  # type: ignore[no-untyped-def]
    """Return the largest value t in [low, high) for which the values of at least t come to `needed`; else low.

    They come to their number where `counting`, else to their sum; `above` is what those of at least high come to.
    """
    first, last = order_key(low), order_key(high) - 1
    count = gather(values, width, low, high, candidates)
    while count == MANY and first < last:  # halve the range, over the whole row, until few are left in it
        middle = (first + last + 1) >> 1
        reach = measure(values, width, order_value(middle), counting)
        if reach >= needed:
            first = middle
        else:
            last = middle - 1
            above = reach
        count = gather(values, width, order_value(first), order_value(last + 1), candidates)
    return order_value(narrow(candidates, count, first, last, above, needed, counting))


@kernel_part
def kth_largest(values, width, largest, k, candidates):  # type: ignore[no-untyped-def]
    """Return the k-th largest value; `largest` is the first."""
    above = 0.0
    high = np.float32(math.inf)
    depth = 0.5
    while True:
        is_last = depth > 4096.0
        low = np.float32(-math.inf) if is_last else np.float32(largest - depth)
        reach = measure(values, width, low, COUNT)
        if reach >= k or is_last:
            return bound_within(values, width, low, high, above, np.float64(k), COUNT, candidates)
        above = reach
        high = low
        depth *= 2.0


@kernel_part
def nucleus_bound(weights, width, needed, candidates):  # type: ignore[no-untyped-def]
    """Return the largest t such that the weights of at least t come to `needed`; weights lie in [0, 1]."""
    above = 0.0
    high = np.float32(2.0)
    power = 2
    while True:
        low = np.float32(2.0**-power)
        count = gather(weights, width, low, high, candidates)
        few = count < MANY
        reach = above + sum_at_least(candidates, count, low) if few else measure(weights, width, low, SUM)
        if reach >= needed or power == 126:  # exp2 gives nothing below 2**-126 but 0
            return bound_within(weights, width, low, high, above, needed, SUM, candidates)
        above = reach
        high = low
        power = power + 2 if power < 16 else min(2 * power, 126)


@kernel_part
def to_weights(values, width, largest, factor, bound, smallest):  # type: ignore[no-untyped-def]
    """Replace logits by 2**((logit - largest) * factor), 0 below `bound` or if that is below `smallest`; sum them."""
    total = 0.0
    top, f, b, s, zero = splat(largest), splat(factor), splat(bound), splat(smallest), splat(0.0)
    for i in range(0, width, LANES):
        v = load(values, i)
        w = exp2((v - top) * f)
        w = where_greater(s, w, zero, where_greater(b, v, zero, w))
        store(values, i, w)
        total += reduce_add_double(w)
    return total


@kernel_part
def draw(weights, width, keep, number, sums):  # type: ignore[no-untyped-def]
    """Return the first token whose cumulative weight exceeds `number` of the total, of weights at least `keep`."""
    blocks = (width + CDF_BLOCK - 1) // CDF_BLOCK
    total = 0.0
    bound, zero = splat(keep), splat(0.0)
    for block in range(blocks):
        part = 0.0
        for i in range(block * CDF_BLOCK, min(width, (block + 1) * CDF_BLOCK), LANES):
            w = load(weights, i)
            w = where_greater(bound, w, zero, w)
            store(weights, i, w)
            part += reduce_add_double(w)
        sums[block] = part
        total += part
    target = number * total
    reached = 0.0
    block = 0
    while block < blocks - 1 and reached + sums[block] <= target:
        reached += sums[block]
        block += 1
    for i in range(block * CDF_BLOCK, width):
        reached += weights[i]
        if reached > target and weights[i] > 0.0:
            return i
    last = width - 1  # rounding left no token beyond the number
    while weights[last] == 0.0:
        last -= 1
    return last


@kernel_part
def sample_row(values, vocab, largest, temperature, min_p, top_k, top_p, number, candidates, sums):  # type: ignore[no-untyped-def]
    """Return the token of a row of processed logits, which are overwritten."""
    if temperature <= 0.0:
        return first_equal(values, largest)
    width = (vocab + LANES - 1) // LANES * LANES
    bound = np.float32(-math.inf)
    if 0 < top_k < vocab:
        bound = kth_largest(values, width, largest, top_k, candidates)
    total = to_weights(values, width, largest, LOG2_E / temperature, bound, np.float32(min_p))
    keep = np.float32(0.0)
    if top_p < 1.0:
        keep = nucleus_bound(values, width, top_p * total, candidates)
    return draw(values, width, keep, number, sums)


@kernel_part
def scale_kept(logits, vocab, weights, temperature):  # type: ignore[no-untyped-def]
    """Divide the logits by the temperature, those that the draw left no weight become minus infinity."""
    for i in range(vocab):
        logits[i] = np.float32(logits[i] / temperature) if weights[i] > 0.0 else np.float32(-math.inf)


def sample_entry(thread, threads, arguments):  # type: ignore[no-untyped-def]
    """Sample rows; :meth:`engine_v1.sample.kernel_sampler.KernelSampler.sample` describes it."""
    a = int64_view(arguments, 1)
    sync, vocab, width = int64_view(a[SYNC], 1), a[VOCAB], a[WIDTH]
    values = float_view(a[VALUES] + thread * width * 4, 1)
    candidates = float_view(a[CANDIDATES] + thread * MANY * 4, 1)
    counts = int32_view(a[COUNTS] + thread * width * 4, 1)
    sums = double_view(a[SUMS] + thread * a[NUM_SUMS] * 8, 1)
    mask_index, table_rows = int32_view(a[MASK_INDEX], 1), int32_view(a[TABLE_ROWS], 1)
    num_tokens, num_prompt = int64_view(a[NUM_TOKENS], 1), int64_view(a[NUM_PROMPT_TOKENS], 1)
    temperature, min_p, top_p = double_view(a[TEMPERATURE], 1), double_view(a[MIN_P], 1), double_view(a[TOP_P], 1)
    top_k, numbers = int32_view(a[TOP_K], 1), double_view(a[NUMBERS], 1)
    token_ids, status = int64_view(a[TOKEN_IDS], 1), int8_view(a[STATUS], 1)
    done = 0
    row = claim(sync, threads, 0, thread, a[NUM_ROWS])
    while row >= 0:
        largest = copy_row(float_view(a[LOGITS] + row * a[LOGITS_STRIDE], 1), vocab, values)
        state = OK if abs(largest) < math.inf else NOT_FINITE
        masked = mask_index[row] >= 0
        ruled = a[TABLE_ROWS] != 0 and table_rows[row] >= 0
        if state == OK and (masked or ruled):
            if masked:
                apply_mask(values, vocab, int32_view(a[MASKS] + mask_index[row] * a[MASK_WORDS] * 4, 1))
            if ruled:
                table_row = np.int64(table_rows[row])
                history = int32_view(a[TABLE] + table_row * a[TABLE_COLUMNS] * 4, 1)
                apply_rules(values, a, RULES, table_row, history, num_tokens[row], num_prompt[row], counts)
            largest = largest_of(values, (vocab + LANES - 1) // LANES * LANES)
            state = OK if abs(largest) < math.inf else (NO_TOKEN if largest < 0.0 else NOT_FINITE)
        token_ids[row] = 0
        processed = float_view(a[PROCESSED] + row * a[PROCESSED_STRIDE], 1)
        if state == OK and a[PROCESSED] != 0:
            for i in range(vocab):
                processed[i] = values[i]
        if state == OK:
            token_ids[row] = sample_row(
                values, vocab, largest, temperature[row], min_p[row], np.int64(top_k[row]), top_p[row], numbers[row],
                candidates, sums,
            )  # fmt: skip
            if a[PROCESSED] != 0 and temperature[row] > 0.0:
                scale_kept(processed, vocab, values, temperature[row])
        status[row] = state
        done += 1
        row = claim(sync, threads, 0, thread, a[NUM_ROWS])
    finish(sync, threads, 0, done, a[NUM_ROWS])


_SIGNATURE = types.void(types.int64, types.int64, types.int64)


def warm_up(*, progress: Callable[[str], None] | None = None) -> int:
    """Compile the kernel, or load it from disk; return its address."""
    parallel.warm_up(progress=progress)
    return native_function(sample_entry, _SIGNATURE, progress=progress)
