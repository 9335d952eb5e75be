"""Tiles of 8-bit rows times quantised weights: exact integer sums of 32 products, added up in float32 with scales.

A row is quantised in blocks of 32 values along k, each with a scale of its own, as llama.cpp does: one large value then
costs its neighbours their precision, not the whole row. Weights have a scale per output (int8) or per block (GGUF).
They are unsigned in the products, as the instruction wants it, and what their zero point adds is taken off again. Sums
of integers depend on no order, and blocks are added k ascending: a row's result does not depend on the rows beside it.
"""

from typing import Any

from llvmlite import ir
from numba.core import cgutils

from engine_v1.kernels.intrinsics import (
    F32,
    HAS_F16,
    HAS_INT8_DOT,
    I16,
    I32,
    I64,
    LANES,
    VF,
    VI,
    broadcast,
    call,
    const,
    iconst,
)
from engine_v1.kernels.tiles import (
    FEW_ROWS,
    LINE_BYTES,
    Emit,
    accumulators,
    fetch_weights,
    load_at,
    offset_by,
    row_addresses,
    store_sums,
    tile_cases,
)

BLOCK = 32  # values along k that share a scale
HALF_BYTES = LANES * 2  # sixteen float16
# A block of a tile, in bytes: a line with four values each of outputs 0..15, one of outputs 16..31, and so on along k;
# in a GGUF's forms then 32 scales as float16, and for 4 bits 32 smallest values. Lines are read in the order in which
# they lie there: of two streams, one per half of the outputs, a CPU fetches a quarter less in the same time.
EIGHT_BIT_VALUES = BLOCK * 2 * LANES
FOUR_BIT_VALUES = EIGHT_BIT_VALUES // 2
EIGHT_BIT_STEP = EIGHT_BIT_VALUES + LINE_BYTES
FOUR_BIT_STEP = FOUR_BIT_VALUES + 2 * LINE_BYTES

_HALF = ir.VectorType(ir.HalfType(), LANES)
_HALF_BITS = ir.VectorType(I16, LANES)


def _dot(builder: Any, acc: Any, unsigned: Any, signed: Any) -> Any:
    """Add four products of bytes per lane to int32 sums."""
    if HAS_INT8_DOT:
        return call(builder, "llvm.x86.avx512.vpdpbusd.512", VI, [acc, unsigned, signed])
    for byte in range(4):
        u = builder.and_(builder.lshr(unsigned, iconst(8 * byte)), iconst(255))
        s = builder.ashr(builder.shl(signed, iconst(24 - 8 * byte)), iconst(24))
        acc = builder.add(acc, builder.mul(u, s))
    return acc


def _load_half(builder: Any, address: Any) -> Any:
    """Load sixteen float16 and widen them; finite ones, as scales are."""
    if HAS_F16:
        return builder.fpext(load_at(builder, address, _HALF, 2), VF)
    bits = builder.zext(load_at(builder, address, _HALF_BITS, 2), VI)
    # The exponents' biases differ by 112: shifted into place, the number is too small by 2**112.
    magnitude = builder.bitcast(builder.shl(builder.and_(bits, iconst(0x7FFF)), iconst(13)), VF)
    scaled = builder.bitcast(builder.fmul(magnitude, const(2.0**112)), VI)
    sign = builder.shl(builder.and_(bits, iconst(0x8000)), iconst(16))
    return builder.bitcast(builder.or_(scaled, sign), VF)


def _emit_blocks(kind: str) -> Emit:
    """Return what emits a tile: "int8" with a scale per output behind the blocks, "q8_0" or "q4_1"."""
    four_bits = kind == "q4_1"
    few_rows = 1 if four_bits else FEW_ROWS
    values_bytes, step_bytes = (FOUR_BIT_VALUES, FOUR_BIT_STEP) if four_bits else (EIGHT_BIT_VALUES, EIGHT_BIT_STEP)
    if kind == "int8":
        step_bytes = values_bytes

    def emit(
        builder: Any, rows: int, vectors: int, x: Any, x_stride: Any, table: Any, table_stride: Any, ahead: Any,
        groups: Any, steps: Any, w_stride: Any, out: Any, out_stride: Any,
    ) -> None:  # fmt: skip
        del table_stride, ahead, groups  # weights are one piece along k
        acc = accumulators(builder, rows, vectors, VF, const(0.0))
        x_rows = row_addresses(builder, x, x_stride, rows)
        # Behind a row's values, for each of its blocks: float32 scale, int32 -128 times its sum, float32 sum * scale.
        scale_rows = [builder.add(row, builder.mul(steps, ir.Constant(I64, BLOCK))) for row in x_rows]
        zero_rows, sum_rows = (
            [builder.add(row, builder.mul(steps, ir.Constant(I64, 4 * n))) for row in scale_rows] for n in (1, 2)
        )
        starts = [load_at(builder, offset_by(builder, table, 8 * b), I64, 8) for b in range(vectors)]
        with cgutils.for_range(builder, steps) as loop:
            step = builder.mul(loop.index, w_stride)
            x_step = builder.mul(loop.index, ir.Constant(I64, BLOCK))
            fact_step = builder.mul(loop.index, ir.Constant(I64, 4))
            blocks = [builder.add(start, step) for start in starts]
            for line in range(0, step_bytes, LINE_BYTES):
                fetch_weights(builder, offset_by(builder, blocks[0], line), rows, few_rows)
            x_blocks = [builder.add(row, x_step) for row in x_rows]
            dots = [[iconst(0)] * vectors for _ in range(rows)]
            if not four_bits:
                for m in range(rows):
                    zero = load_at(builder, builder.add(zero_rows[m], fact_step), I32)
                    dots[m] = [broadcast(builder, zero, VI)] * vectors
            # All sums of a block stay in registers, and what is added to after it does not: that is touched less.
            for i in range(BLOCK // 4):
                w = [_values(builder, block, i, four_bits=four_bits) for block in blocks]
                for m in range(rows):
                    word = broadcast(builder, load_at(builder, offset_by(builder, x_blocks[m], 4 * i), I32), VI)
                    dots[m] = [_dot(builder, dot, values, word) for dot, values in zip(dots[m], w, strict=True)]
            w_scales, smallest = [None] * vectors, [None] * vectors
            if kind != "int8":
                places = [offset_by(builder, blocks[0], values_bytes + b * HALF_BYTES) for b in range(vectors)]
                w_scales = [_load_half(builder, place) for place in places]
                if four_bits:
                    smallest = [_load_half(builder, offset_by(builder, place, LINE_BYTES)) for place in places]
            for m in range(rows):
                x_scale = broadcast(builder, load_at(builder, builder.add(scale_rows[m], fact_step), F32), VF)
                x_sum = broadcast(builder, load_at(builder, builder.add(sum_rows[m], fact_step), F32), VF)
                for b in range(vectors):
                    scale = x_scale if w_scales[b] is None else builder.fmul(x_scale, w_scales[b])
                    total = _fma(builder, builder.sitofp(dots[m][b], VF), scale, builder.load(acc[m][b]))
                    if smallest[b] is not None:
                        total = _fma(builder, x_sum, smallest[b], total)
                    builder.store(total, acc[m][b])
        sums = [[builder.load(slot) for slot in row] for row in acc]
        if kind == "int8":
            end = builder.mul(steps, w_stride)
            for b in range(vectors):
                w_scale = load_at(builder, builder.add(starts[b], end), VF)
                for row in sums:
                    row[b] = builder.fmul(row[b], w_scale)
        store_sums(builder, sums, out, out_stride)

    return emit


def _fma(builder: Any, x: Any, y: Any, z: Any) -> Any:
    return call(builder, "llvm.fma.v16f32", VF, [x, y, z])


def _values(builder: Any, block: Any, word: int, *, four_bits: bool) -> Any:
    """Load four values of each output. A block's first half is in the low bits of its bytes, the second in the high."""
    if not four_bits:
        return load_at(builder, offset_by(builder, block, 2 * LINE_BYTES * word), VI)
    both = load_at(builder, offset_by(builder, block, 2 * LINE_BYTES * (word % 4)), VI)
    return builder.and_(builder.lshr(both, iconst(4)) if word >= 4 else both, iconst(0x0F0F0F0F))


_int8_cases, _q8_0_cases, _q4_1_cases = (
    tile_cases(_emit_blocks(kind), wide=False) for kind in ("int8", "q8_0", "q4_1")
)


def tile_int8(rows, vectors, x, x_stride, table, table_stride, ahead, groups, steps, w_stride, out, out_stride):  # type: ignore[no-untyped-def]
    """Compute a tile with one scale per output; one group only."""
    _int8_cases(rows, vectors, x, x_stride, table, table_stride, ahead, groups, steps, w_stride, out, out_stride)


def tile_q8_0(rows, vectors, x, x_stride, table, table_stride, ahead, groups, steps, w_stride, out, out_stride):  # type: ignore[no-untyped-def]
    """Compute a tile with blocks of 8-bit values; one group only."""
    _q8_0_cases(rows, vectors, x, x_stride, table, table_stride, ahead, groups, steps, w_stride, out, out_stride)


def tile_q4_1(rows, vectors, x, x_stride, table, table_stride, ahead, groups, steps, w_stride, out, out_stride):  # type: ignore[no-untyped-def]
    """Compute a tile with blocks of 4-bit values; one group only."""
    _q4_1_cases(rows, vectors, x, x_stride, table, table_stride, ahead, groups, steps, w_stride, out, out_stride)
