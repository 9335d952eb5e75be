"""Quantising: rows to 8 bits while a step runs, weights to 8 bits once."""

import numpy as np
import numpy.typing as npt
import torch

from engine_v1.kernels.intrinsics import (
    absolute,
    finite_or_zero,
    float_view,
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
from engine_v1.kernels.quantized_tiles import BLOCK, ROW_TAIL

ZERO_POINT = 128  # of stored weights


@kernel_part(forceinline=True)
def byte_row_size(size):  # type: ignore[no-untyped-def]
    """Bytes of a quantised row of `size` values: the values, its scale, its sums; whole cache lines."""
    return (size + ROW_TAIL + size // BLOCK * 4 + 63) // 64 * 64


@kernel_part
def quantize_row(x, at, size, out):  # type: ignore[no-untyped-def]
    """Write a row as int8 with one scale, largest magnitude / 127, and the sums that products need.

    A row with a NaN or an infinity gets a NaN scale: whatever is computed of it is NaN.

    Args:
        x: act[...], a flat array, the row at `at`.
        size: a multiple of 32.
        out: byte address: int8[size], float32 scale, int32 sum, int32[size / 32] sums of blocks.
    """
    largest = splat(0.0)
    marks = splat(0.0)
    for i in range(0, size, 16):
        v = load(x, at + i)
        marks = where_nan(v - v, splat(1.0), marks)  # an infinity less itself is NaN
        largest = maximum(absolute(v), largest)
    top = reduce_max(largest)
    usable = reduce_max(marks) == 0.0
    inverse = np.float32(127.0) / top if usable and top > 0.0 else np.float32(0.0)
    scale = splat(inverse)
    sums = int32_view(out + size + 4, 1)
    total = np.int64(0)
    for block in range(size // BLOCK):
        i = block * BLOCK
        a = nearest_integer(finite_or_zero(load(x, at + i) * scale))
        b = nearest_integer(finite_or_zero(load(x, at + i + 16) * scale))
        store_int8(out + i, a)
        store_int8(out + i + 16, b)
        block_sum = np.int64(reduce_add(a + b))  # whole numbers, exact
        sums[1 + block] = np.int32(block_sum)
        total += block_sum
    sums[0] = np.int32(total)
    float_view(out + size, 1)[0] = top / np.float32(127.0) if usable else np.float32(np.nan)


def quantize_weight(weight: torch.Tensor) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float32]]:
    """Round each output's weights to 8 bits with one scale, the largest magnitude / 127.

    Args:
        weight: float[outputs, inputs].

    Returns:
        uint8[outputs, inputs], 128 standing for 0, and float32[outputs], the scales.
    """
    wide = weight.float()
    scales = wide.abs().amax(dim=1) / 127.0
    rounded = torch.round(wide / torch.where(scales > 0, scales, 1.0)[:, None])
    return (rounded + ZERO_POINT).to(torch.uint8).numpy(), scales.numpy()
