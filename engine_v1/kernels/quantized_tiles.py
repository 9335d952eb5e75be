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
    Emit,
    accumulators,
    load_at,
    prefetch,
    row_addresses,
    store_sums,
    tile_cases,
)

BLOCK = 32  # values along k that share a scale
LINE_BYTES = 64
HALF_BYTES = LANES * 2  # sixteen float16
# A block of a tile: values of outputs 0..15, values of outputs 16..31; in a GGUF's forms also 32 scales as float16, and
# for 4 bits 32 smallest values.
EIGHT_BIT_VALUES = BLOCK * LANES
FOUR_BIT_VALUES = BLOCK * LANES // 2

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


def _at(builder: Any, address: Any, offset: int) -> Any:
    return builder.add(address, ir.Constant(I64, offset))


def _emit_blocks(kind: str) -> Emit:
    """Return what emits a tile: "int8" with a scale per output behind the blocks, "q8_0" or "q4_1"."""
    four_bits = kind == "q4_1"
    values_bytes = FOUR_BIT_VALUES if four_bits else EIGHT_BIT_VALUES

    def emit(
        builder: Any, rows: int, vectors: int, x: Any, x_stride: Any, table: Any, table_stride: Any, ahead: Any,
        groups: Any, steps: Any, w_stride: Any, out: Any, out_stride: Any,
    ) -> None:  # fmt: skip
        del table_stride, groups  # weights are one piece along k
        acc = accumulators(builder, rows, vectors, VF, const(0.0))
        x_rows = row_addresses(builder, x, x_stride, rows)
        # Behind a row's values: float32 scales of its blocks, then int32 -128 times the sums of its blocks.
        scale_rows = [builder.add(row, builder.mul(steps, ir.Constant(I64, BLOCK))) for row in x_rows]
        zero_rows = [builder.add(row, builder.mul(steps, ir.Constant(I64, 4))) for row in scale_rows]
        starts = [load_at(builder, _at(builder, table, 8 * b), I64, 8) for b in range(vectors)]
        fetches = [load_at(builder, _at(builder, builder.add(table, ahead), 8 * b), I64, 8) for b in range(vectors)]
        with cgutils.for_range(builder, steps) as loop:
            step = builder.mul(loop.index, w_stride)
            x_step = builder.mul(loop.index, ir.Constant(I64, BLOCK))
            fact_step = builder.mul(loop.index, ir.Constant(I64, 4))
            for b in range(vectors):
                start, fetch = builder.add(starts[b], step), builder.add(fetches[b], step)
                for line in range(0, values_bytes + (0 if kind == "int8" else LINE_BYTES), LINE_BYTES):
                    prefetch(builder, _at(builder, fetch, line))
                w = _four_bit_values(builder, start) if four_bits else _eight_bit_values(builder, start)
                # Vectors come in pairs, the two halves of a tile.
                scales = _at(builder, start, 2 * values_bytes if b % 2 == 0 else values_bytes + HALF_BYTES)
                w_scale = None if kind == "int8" else _load_half(builder, scales)
                smallest = _load_half(builder, _at(builder, scales, LINE_BYTES)) if four_bits else None
                for m in range(rows):
                    x_scale = load_at(builder, builder.add(scale_rows[m], fact_step), F32)
                    zero = load_at(builder, builder.add(zero_rows[m], fact_step), I32)
                    dot = iconst(0) if four_bits else broadcast(builder, zero, VI)
                    for i, values in enumerate(w):
                        word = load_at(builder, _at(builder, builder.add(x_rows[m], x_step), 4 * i), I32)
                        dot = _dot(builder, dot, values, broadcast(builder, word, VI))
                    scale = broadcast(builder, x_scale, VF)
                    if w_scale is not None:
                        scale = builder.fmul(scale, w_scale)
                    total = _fma(builder, builder.sitofp(dot, VF), scale, builder.load(acc[m][b]))
                    if smallest is not None:
                        block_sum = builder.fmul(builder.sitofp(zero, F32), ir.Constant(F32, -1 / 128))
                        weight = broadcast(builder, builder.fmul(block_sum, x_scale), VF)
                        total = _fma(builder, weight, smallest, total)
                    builder.store(total, acc[m][b])
        sums = [[builder.load(slot) for slot in row] for row in acc]
        if kind == "int8":
            end = builder.mul(steps, w_stride)
            for b in range(vectors):
                # Behind the tile's blocks; a half's values start where the other's end.
                offset = 0 if b % 2 == 0 else LINE_BYTES - values_bytes
                w_scale = load_at(builder, _at(builder, builder.add(starts[b], end), offset), VF)
                for row in sums:
                    row[b] = builder.fmul(row[b], w_scale)
        store_sums(builder, sums, out, out_stride)

    return emit


def _fma(builder: Any, x: Any, y: Any, z: Any) -> Any:
    return call(builder, "llvm.fma.v16f32", VF, [x, y, z])


def _eight_bit_values(builder: Any, start: Any) -> list[Any]:
    return [load_at(builder, _at(builder, start, LINE_BYTES * i), VI) for i in range(BLOCK // 4)]


def _four_bit_values(builder: Any, start: Any) -> list[Any]:
    """The first half of a block is in the low bits of its bytes, the second in the high ones."""
    both = [load_at(builder, _at(builder, start, LINE_BYTES * i), VI) for i in range(BLOCK // 8)]
    low = [builder.and_(v, iconst(0x0F0F0F0F)) for v in both]
    return low + [builder.and_(builder.lshr(v, iconst(4)), iconst(0x0F0F0F0F)) for v in both]


_int8_cases, _q8_0_cases, _q4_1_cases = (tile_cases(_emit_blocks(kind)) for kind in ("int8", "q8_0", "q4_1"))


def tile_int8(rows, vectors, x, x_stride, table, table_stride, ahead, groups, steps, w_stride, out, out_stride):  # type: ignore[no-untyped-def]
    """Compute a tile with one scale per output; one group only."""
    _int8_cases(rows, vectors, x, x_stride, table, table_stride, ahead, groups, steps, w_stride, out, out_stride)


def tile_q8_0(rows, vectors, x, x_stride, table, table_stride, ahead, groups, steps, w_stride, out, out_stride):  # type: ignore[no-untyped-def]
    """Compute a tile with blocks of 8-bit values; one group only."""
    _q8_0_cases(rows, vectors, x, x_stride, table, table_stride, ahead, groups, steps, w_stride, out, out_stride)


def tile_q4_1(rows, vectors, x, x_stride, table, table_stride, ahead, groups, steps, w_stride, out, out_stride):  # type: ignore[no-untyped-def]
    """Compute a tile with blocks of 4-bit values; one group only."""
    _q4_1_cases(rows, vectors, x, x_stride, table, table_stride, ahead, groups, steps, w_stride, out, out_stride)
