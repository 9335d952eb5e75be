"""Quantising a step's rows to 8 bits."""

import math

import numpy as np

from engine_v1.kernels.intrinsics import (
    absolute,
    address,
    finite_or_zero,
    float_view,
    fma,
    int32_view,
    load,
    maximum,
    nearest_integer,
    reduce_add,
    reduce_max,
    splat,
    store_int8,
    where_nan,
)
from engine_v1.kernels.jit import kernel_part
from engine_v1.kernels.quantized_tiles import BLOCK
from engine_v1.kernels.schedule import claim, finish

ZERO_POINT = 128  # of stored weights


@kernel_part(forceinline=True)
def byte_row_size(size):  # type: ignore[no-untyped-def]
    """Bytes of a quantised row of `size` values: the values, then three facts per block; whole cache lines."""
    return (size + size // BLOCK * 12 + 63) // 64 * 64


@kernel_part
def quantize_row(x, at, size, out):  # type: ignore[no-untyped-def]
    """Write a row as int8 in blocks of 32 values with a scale each, its largest magnitude / 127.

    A block with a NaN or an infinity gets a NaN scale: whatever is computed of the row is NaN. Returns the row's norm,
    and that of what rounding took from it.

    Args:
        x: act[...], a flat array, the row at `at`.
        size: a multiple of 32.
        out: byte address: int8[size]; then, each [size / 32]: float32 scales, int32 -128 times the sums of the values,
            float32 sums times scales.
    """
    blocks = size // BLOCK
    squares = splat(0.0)
    lost = splat(0.0)
    scales = float_view(out + size, 1)
    zeros = int32_view(out + size + 4 * blocks, 1)
    sums = float_view(out + size + 8 * blocks, 1)
    for block in range(blocks):
        i = block * BLOCK
        a = load(x, at + i)
        b = load(x, at + i + 16)
        # An infinity less itself is NaN; maximum alone would pass over a NaN.
        marks = where_nan(b - b, splat(1.0), where_nan(a - a, splat(1.0), splat(0.0)))
        top = reduce_max(maximum(absolute(a), absolute(b)))
        usable = reduce_max(marks) == 0.0
        factor = splat(np.float32(127.0) / top if usable and top > 0.0 else np.float32(0.0))
        squares = fma(a, a, fma(b, b, squares))
        scale = top / np.float32(127.0) if usable else np.float32(np.nan)
        rest_a, rest_b = a, b
        a = nearest_integer(finite_or_zero(a * factor))
        b = nearest_integer(finite_or_zero(b * factor))
        rest_a = fma(a, splat(-scale), rest_a)
        rest_b = fma(b, splat(-scale), rest_b)
        lost = fma(rest_a, rest_a, fma(rest_b, rest_b, lost))
        store_int8(out + i, a)
        store_int8(out + i + 16, b)
        total = reduce_add(a + b)  # of whole numbers, exact
        zeros[block] = np.int32(total * np.float32(-ZERO_POINT))
        scales[block] = scale
        sums[block] = total * scale
    return math.sqrt(reduce_add(squares)), math.sqrt(reduce_add(lost))


@kernel_part
def quantize_rows(ctx, phase, rows, size, x, byte_rows):  # type: ignore[no-untyped-def]
    """Quantise rows of `size` values for the product that follows."""
    done = 0
    task = claim(ctx.sync, ctx.threads, phase, ctx.thread, rows)
    while task >= 0:
        quantize_row(x, task * size, size, byte_rows + task * byte_row_size(size))
        done += 1
        task = claim(ctx.sync, ctx.threads, phase, ctx.thread, rows)
    finish(ctx.sync, ctx.threads, phase, done, rows)


@kernel_part(forceinline=True)
def operands(m, x, size, byte_rows):  # type: ignore[no-untyped-def]
    """Where a product's rows start, the bytes from one to the next, and its steps along k.

    A `byte_rows` of 0 stands for rows that are not quantised; `m` has the weights' step_values.
    """
    pad = (size + 31) // 32 * 32
    if byte_rows != 0:
        return byte_rows, byte_row_size(pad), pad // m.step_values
    return address(x, 0), pad * x.itemsize, (size + m.step_values - 1) // m.step_values
