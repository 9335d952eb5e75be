"""Tiles of 8-bit rows times quantised weights: exact integer sums, turned into float32 with the scales.

A row is int8[k] followed by its scale and sums (:data:`ROW_TAIL`). Weights are unsigned in the products, as the
instruction wants it; what their zero point adds is taken off by means of the row's sums. Integer sums depend on no
order, and the scales are applied in one order: a row's result does not depend on the rows beside it.
"""

from typing import Any

from llvmlite import ir
from numba.core import cgutils

from engine_v1.kernels.intrinsics import (
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
    accumulators,
    load_at,
    prefetch,
    row_addresses,
    store_sums,
    tile_cases,
)

BLOCK = 32  # values along k that share a scale in a GGUF
# After the k values of a row: float32 scale, int32 sum of all values, then int32 sums of each block.
ROW_TAIL = 8
LINE_BYTES = 64
HALF_BYTES = LANES * 2  # sixteen float16
# A block of a tile: values of outputs 0..15, values of outputs 16..31, 32 scales, and for 4 bits 32 smallest values.
Q8_0_VALUES = BLOCK * LANES
Q4_1_VALUES = BLOCK * LANES // 2

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


def _emit_int8(
    builder: Any, rows: int, vectors: int, x: Any, x_stride: Any, table: Any, table_stride: Any, ahead: Any,
    groups: Any, steps: Any, w_stride: Any, out: Any, out_stride: Any,
) -> None:  # fmt: skip
    """Steps of 4 values with one scale per output, which follows the tile's values."""
    acc = accumulators(builder, rows, vectors, VI, iconst(0))
    x_rows = row_addresses(builder, x, x_stride, rows)
    starts = [load_at(builder, _at(builder, table, 8 * b), I64, 8) for b in range(vectors)]
    fetches = [load_at(builder, _at(builder, builder.add(table, ahead), 8 * b), I64, 8) for b in range(vectors)]
    with cgutils.for_range(builder, steps) as loop:
        step = builder.mul(loop.index, w_stride)
        w = []
        for start, fetch in zip(starts, fetches, strict=True):
            w.append(load_at(builder, builder.add(start, step), VI))
            prefetch(builder, builder.add(fetch, step))
        offset = builder.mul(loop.index, ir.Constant(I64, 4))
        for m in range(rows):
            xs = broadcast(builder, load_at(builder, builder.add(x_rows[m], offset), I32), VI)
            for b in range(vectors):
                builder.store(_dot(builder, builder.load(acc[m][b]), w[b], xs), acc[m][b])
    scales = [load_at(builder, builder.add(start, builder.mul(steps, w_stride)), VF) for start in starts]
    tails = [builder.add(row, builder.mul(steps, ir.Constant(I64, 4))) for row in x_rows]
    sums = []
    for m in range(rows):
        zero_point = builder.shl(load_at(builder, _at(builder, tails[m], 4), I32), ir.Constant(I32, 7))
        x_scale = broadcast(builder, load_at(builder, tails[m], VF.element), VF)
        line = []
        for b in range(vectors):
            exact = builder.sub(builder.load(acc[m][b]), broadcast(builder, zero_point, VI))
            line.append(builder.fmul(builder.sitofp(exact, VF), builder.fmul(scales[b], x_scale)))
        sums.append(line)
    store_sums(builder, sums, out, out_stride)


def _emit_blocks(
    builder: Any, rows: int, vectors: int, x: Any, x_stride: Any, table: Any, ahead: Any, steps: Any, w_stride: Any,
    out: Any, out_stride: Any, *, four_bits: bool,
) -> None:  # fmt: skip
    """Steps of one block of 32 values, with a scale (and for 4 bits a smallest value) per output."""
    values_bytes = Q4_1_VALUES if four_bits else Q8_0_VALUES
    acc = accumulators(builder, rows, vectors, VF, const(0.0))
    x_rows = row_addresses(builder, x, x_stride, rows)
    sum_rows = [_at(builder, builder.add(row, builder.mul(steps, ir.Constant(I64, BLOCK))), ROW_TAIL) for row in x_rows]
    starts = [load_at(builder, _at(builder, table, 8 * b), I64, 8) for b in range(vectors)]
    fetches = [load_at(builder, _at(builder, builder.add(table, ahead), 8 * b), I64, 8) for b in range(vectors)]
    with cgutils.for_range(builder, steps) as loop:
        step = builder.mul(loop.index, w_stride)
        x_step = builder.mul(loop.index, ir.Constant(I64, BLOCK))
        sum_step = builder.mul(loop.index, ir.Constant(I64, 4))
        for b in range(vectors):
            start, fetch = builder.add(starts[b], step), builder.add(fetches[b], step)
            for line in range(0, values_bytes + LINE_BYTES, LINE_BYTES):
                prefetch(builder, _at(builder, fetch, line))
            w = _four_bit_values(builder, start) if four_bits else _eight_bit_values(builder, start)
            # Vectors come in pairs, the two halves of a tile.
            scales = 2 * values_bytes if b % 2 == 0 else values_bytes + HALF_BYTES
            scale = _load_half(builder, _at(builder, start, scales))
            smallest = _load_half(builder, _at(builder, start, scales + LINE_BYTES)) if four_bits else None
            for m in range(rows):
                block_sum = load_at(builder, builder.add(sum_rows[m], sum_step), I32)
                dot = iconst(0)
                if not four_bits:
                    dot = broadcast(builder, builder.mul(block_sum, ir.Constant(I32, -128)), VI)
                for i, values in enumerate(w):
                    word = load_at(builder, _at(builder, builder.add(x_rows[m], x_step), 4 * i), I32)
                    dot = _dot(builder, dot, values, broadcast(builder, word, VI))
                total = _fma(builder, builder.sitofp(dot, VF), scale, builder.load(acc[m][b]))
                if smallest is not None:
                    total = _fma(builder, builder.sitofp(broadcast(builder, block_sum, VI), VF), smallest, total)
                builder.store(total, acc[m][b])
    tails = [builder.add(row, builder.mul(steps, ir.Constant(I64, BLOCK))) for row in x_rows]
    scales = [load_at(builder, tail, VF.element) for tail in tails]
    sums = [
        [builder.fmul(builder.load(slot), broadcast(builder, scales[m], VF)) for slot in acc[m]] for m in range(rows)
    ]
    store_sums(builder, sums, out, out_stride)


def _fma(builder: Any, x: Any, y: Any, z: Any) -> Any:
    return call(builder, "llvm.fma.v16f32", VF, [x, y, z])


def _eight_bit_values(builder: Any, start: Any) -> list[Any]:
    return [load_at(builder, _at(builder, start, LINE_BYTES * i), VI) for i in range(BLOCK // 4)]


def _four_bit_values(builder: Any, start: Any) -> list[Any]:
    """The first half of a block is in the low bits of its bytes, the second in the high ones."""
    both = [load_at(builder, _at(builder, start, LINE_BYTES * i), VI) for i in range(BLOCK // 8)]
    low = [builder.and_(v, iconst(0x0F0F0F0F)) for v in both]
    return low + [builder.and_(builder.lshr(v, iconst(4)), iconst(0x0F0F0F0F)) for v in both]


def _emit_q8_0(
    builder: Any, rows: int, vectors: int, x: Any, x_stride: Any, table: Any, table_stride: Any, ahead: Any,
    groups: Any, steps: Any, w_stride: Any, out: Any, out_stride: Any,
) -> None:  # fmt: skip
    _emit_blocks(
        builder, rows, vectors, x, x_stride, table, ahead, steps, w_stride, out, out_stride, four_bits=False
    )  # fmt: skip


def _emit_q4_1(
    builder: Any, rows: int, vectors: int, x: Any, x_stride: Any, table: Any, table_stride: Any, ahead: Any,
    groups: Any, steps: Any, w_stride: Any, out: Any, out_stride: Any,
) -> None:  # fmt: skip
    _emit_blocks(
        builder, rows, vectors, x, x_stride, table, ahead, steps, w_stride, out, out_stride, four_bits=True
    )  # fmt: skip


_int8_cases, _q8_0_cases, _q4_1_cases = (tile_cases(emit) for emit in (_emit_int8, _emit_q8_0, _emit_q4_1))


def tile_int8(rows, vectors, x, x_stride, table, table_stride, ahead, groups, steps, w_stride, out, out_stride):  # type: ignore[no-untyped-def]
    """Compute a tile with one scale per output; one group only."""
    _int8_cases(rows, vectors, x, x_stride, table, table_stride, ahead, groups, steps, w_stride, out, out_stride)


def tile_q8_0(rows, vectors, x, x_stride, table, table_stride, ahead, groups, steps, w_stride, out, out_stride):  # type: ignore[no-untyped-def]
    """Compute a tile with blocks of 8-bit values; one group only."""
    _q8_0_cases(rows, vectors, x, x_stride, table, table_stride, ahead, groups, steps, w_stride, out, out_stride)


def tile_q4_1(rows, vectors, x, x_stride, table, table_stride, ahead, groups, steps, w_stride, out, out_stride):  # type: ignore[no-untyped-def]
    """Compute a tile with blocks of 4-bit values; one group only."""
    _q4_1_cases(rows, vectors, x, x_stride, table, table_stride, ahead, groups, steps, w_stride, out, out_stride)
