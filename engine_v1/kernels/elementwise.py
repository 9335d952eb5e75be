"""Row arithmetic on vectors: exponentials, RMSNorm, softmax of a tile's row. Widths are multiples of 16."""

import math

from engine_v1.kernels.intrinsics import (
    exp2_split,
    finite_or_zero,
    first_lane,
    fma,
    keep_range,
    load,
    maximum,
    minimum,
    reduce_add,
    reduce_max,
    splat,
    store,
    where_greater,
)
from engine_v1.kernels.jit import kernel_part

LOG2_E = math.log2(math.e)
# 2**r on [-0.5, 0.5] as a polynomial, Chebyshev interpolation: relative error below 1e-8 before rounding.
_C0, _C1, _C2, _C3, _C4, _C5, _C6 = (
    1.0, 0.6931472067028329, 0.24022650922289554, 0.05550327226669895, 0.00961805667843204, 0.0013400428177711937,
    0.00015461444724808513,
)  # fmt: skip
_SMALLEST = -126.0


@kernel_part(forceinline=True)
def exp2(x):  # type: ignore[no-untyped-def]
    """Return 2**x per lane for x <= 127: exactly 0 below -126, NaN for NaN."""
    low = splat(_SMALLEST)
    n, scale = exp2_split(maximum(low, x))
    r = maximum(low, x) - n
    p = fma(splat(_C6), r, splat(_C5))
    p = fma(p, r, splat(_C4))
    p = fma(p, r, splat(_C3))
    p = fma(p, r, splat(_C2))
    p = fma(p, r, splat(_C1))
    p = fma(p, r, splat(_C0))
    return where_greater(low, x, splat(0.0), p * scale)


@kernel_part(forceinline=True)
def silu(x):  # type: ignore[no-untyped-def]
    """Return x / (1 + exp(-x)) per lane."""
    e = exp2(minimum(splat(126.0), maximum(splat(-126.0), x * splat(-LOG2_E))))
    return x / (splat(1.0) + e)


@kernel_part
def rms_norm(x, x_at, weight, weight_at, size, padded, eps, out, out_at):  # type: ignore[no-untyped-def]
    """Out = x / sqrt(mean(x^2) + eps) * weight over one row of `size` values in `padded` places."""
    total = splat(0.0)
    for i in range(0, padded, 16):
        v = load(x, x_at + i)
        total = fma(v, v, total)
    factor = splat(1.0 / math.sqrt(reduce_add(total) / size + eps))
    for i in range(0, padded, 16):
        store(out, out_at + i, load(x, x_at + i) * factor * load(weight, weight_at + i))


@kernel_part
def copy_finite(x, x_at, padded, out, out_at):  # type: ignore[no-untyped-def]
    """Copy a row, NaN and infinities as 0."""
    for i in range(0, padded, 16):
        store(out, out_at + i, finite_or_zero(load(x, x_at + i)))


@kernel_part
def softmax_span(scores, at, weights, weights_at, first, last, low, high, factor):  # type: ignore[no-untyped-def]
    """Turn a row's scores in [first, last) into weights 2**((score - largest) * factor); return (largest, sum).

    Only keys in [low, high) count; the others' weights are exactly 0. first and last are multiples of 16.
    """
    nothing = splat(-math.inf)
    largest = nothing
    for i in range(first, last, 16):
        v = load(scores, at + i)
        if i < low or i + 16 > high:
            v = keep_range(v, i, low, high, nothing)
            store(scores, at + i, v)
        largest = maximum(v, largest)
    top = reduce_max(largest)
    scale = splat(factor)
    offset = splat(-top) * scale
    total = splat(0.0)
    for i in range(first, last, 16):
        p = exp2(fma(load(scores, at + i), scale, offset))
        total = total + p
        store(weights, weights_at + i, p)
    return top, reduce_add(total)


@kernel_part
def merge_span(acc, acc_at, stats_at, part, part_at, top, total, padded, factor):  # type: ignore[no-untyped-def]
    """Add one span's result to a row's running result: sums at acc_at, (largest score, sum of weights) at stats_at.

    Spans are merged in ascending order, each computed from nothing: it makes no difference whether one thread went
    through them or several did and one merged.
    """
    old = acc[stats_at]
    new = max(old, top)
    keep = exp2(splat(old - new) * splat(factor))
    add = exp2(splat(top - new) * splat(factor))
    acc[stats_at] = new
    acc[stats_at + 1] = first_lane(splat(acc[stats_at + 1]) * keep + splat(total) * add)
    for i in range(0, padded, 16):
        store(acc, acc_at + i, load(acc, acc_at + i) * keep + load(part, part_at + i) * add)
