"""Matrix tiles: up to 12 rows times 32 columns over the whole of K, every accumulator in a register.

An output is accumulated by one accumulator with k ascending, whatever the number of rows in its tile: this is why a
row's result does not depend on which rows are computed beside it.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.extending import intrinsic

from engine_v1.kernels.intrinsics import (
    F32,
    HAS_BF16_DOT,
    I8,
    I32,
    I64,
    LANES,
    VBF_PAIRS,
    VF,
    VI,
    _call,
    _const,
    _iconst,
    _splat,
    call_address,
)
from engine_v1.kernels.jit import native_function

VECTORS = 2


def _multiply_add(builder: Any, kind: str, x: Any, w: Any, acc: Any) -> Any:
    """One k step: x and w hold one float32, or a pair of bf16, per lane."""
    if kind == "f32":
        return _call(builder, "llvm.fma.v16f32", VF, [x, w, acc])
    if HAS_BF16_DOT:
        pair = [builder.bitcast(v, VBF_PAIRS) for v in (x, w)]
        return _call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", VF, [acc, *pair])
    for part in ("low", "high"):
        both = [
            builder.shl(v, _iconst(16)) if part == "low" else builder.and_(v, _iconst(-65536)) for v in (x, w)
        ]
        acc = _call(builder, "llvm.fma.v16f32", VF, [builder.bitcast(v, VF) for v in both] + [acc])
    return acc


def _make_tile(kind: str, rows: int) -> Any:
    """The tile for `rows` rows. Addresses and strides are in bytes; see :func:`tile`."""

    @intrinsic
    def tile_rows(
        typingctx: Any, x: Any, x_stride: Any, w_table: Any, groups: Any, steps: Any, w_stride: Any,
        w_second: Any, ahead_table: Any, ahead_second: Any, out: Any, out_stride: Any,
    ) -> Any:  # fmt: skip
        sig = types.void(*([types.intp] * 11))

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            x, x_stride, w_table, groups, steps, w_stride, w_second, ahead_table, ahead_second, out, out_stride = args
            scalar, vector = (I32, VI) if kind == "bf16" else (F32, VF)
            acc = [
                [cgutils.alloca_once_value(builder, _const(0.0)) for _ in range(VECTORS)] for _ in range(rows)
            ]
            for row in acc:
                for slot in row:
                    builder.store(_const(0.0), slot)
            four = ir.Constant(I64, 4)
            x_rows = [builder.add(x, builder.mul(x_stride, ir.Constant(I64, m))) for m in range(rows)]
            tables = [builder.inttoptr(t, I64.as_pointer()) for t in (w_table, ahead_table)]
            with cgutils.for_range(builder, groups) as group:
                base, ahead_base = (builder.load(builder.gep(table, [group.index])) for table in tables)
                done = builder.mul(group.index, steps)
                with cgutils.for_range(builder, steps) as loop:
                    step = builder.mul(loop.index, w_stride)
                    at, ahead = builder.add(base, step), builder.add(ahead_base, step)
                    w = []
                    for b in range(VECTORS):
                        place = builder.add(at, w_second) if b else at
                        value = builder.load(builder.inttoptr(place, vector.as_pointer()))
                        value.align = 4
                        w.append(value)
                        line = builder.inttoptr(builder.add(ahead, ahead_second) if b else ahead, I8.as_pointer())
                        flags = [ir.Constant(I32, n) for n in (0, 3, 1)]  # read, keep in all caches, data
                        _call(builder, "llvm.prefetch.p0i8", ir.VoidType(), [line, *flags])
                    offset = builder.mul(builder.add(done, loop.index), four)
                    for m in range(rows):
                        value = builder.load(builder.inttoptr(builder.add(x_rows[m], offset), scalar.as_pointer()))
                        value.align = 2 if kind == "bf16" else 4
                        xs = _splat(builder, value, vector)
                        for b in range(VECTORS):
                            new = _multiply_add(builder, kind, xs, w[b], builder.load(acc[m][b]))
                            builder.store(new, acc[m][b])
            for m in range(rows):
                for b in range(VECTORS):
                    offset = builder.add(builder.mul(out_stride, ir.Constant(I64, m)), ir.Constant(I64, 4 * LANES * b))
                    place = builder.inttoptr(builder.add(out, offset), VF.as_pointer())
                    builder.store(builder.load(acc[m][b]), place).align = 4
            return context.get_dummy_value()

        return sig, codegen

    return tile_rows


_b1, _b2, _b3, _b4, _b5, _b6, _b7, _b8, _b9, _b10, _b11, _b12 = (_make_tile("bf16", n) for n in range(1, 13))
_f1, _f2, _f3, _f4, _f5, _f6, _f7, _f8, _f9, _f10, _f11, _f12 = (_make_tile("f32", n) for n in range(1, 13))


def _tile_bf16(rows, x, x_stride, w_table, groups, steps, w_stride, w_second, ahead_table, ahead_second, out, out_stride):  # type: ignore[no-untyped-def]
    if rows == 12:
        _b12(x, x_stride, w_table, groups, steps, w_stride, w_second, ahead_table, ahead_second, out, out_stride)
    elif rows == 1:
        _b1(x, x_stride, w_table, groups, steps, w_stride, w_second, ahead_table, ahead_second, out, out_stride)
    elif rows == 2:
        _b2(x, x_stride, w_table, groups, steps, w_stride, w_second, ahead_table, ahead_second, out, out_stride)
    elif rows == 3:
        _b3(x, x_stride, w_table, groups, steps, w_stride, w_second, ahead_table, ahead_second, out, out_stride)
    elif rows == 4:
        _b4(x, x_stride, w_table, groups, steps, w_stride, w_second, ahead_table, ahead_second, out, out_stride)
    elif rows == 5:
        _b5(x, x_stride, w_table, groups, steps, w_stride, w_second, ahead_table, ahead_second, out, out_stride)
    elif rows == 6:
        _b6(x, x_stride, w_table, groups, steps, w_stride, w_second, ahead_table, ahead_second, out, out_stride)
    elif rows == 7:
        _b7(x, x_stride, w_table, groups, steps, w_stride, w_second, ahead_table, ahead_second, out, out_stride)
    elif rows == 8:
        _b8(x, x_stride, w_table, groups, steps, w_stride, w_second, ahead_table, ahead_second, out, out_stride)
    elif rows == 9:
        _b9(x, x_stride, w_table, groups, steps, w_stride, w_second, ahead_table, ahead_second, out, out_stride)
    elif rows == 10:
        _b10(x, x_stride, w_table, groups, steps, w_stride, w_second, ahead_table, ahead_second, out, out_stride)
    else:
        _b11(x, x_stride, w_table, groups, steps, w_stride, w_second, ahead_table, ahead_second, out, out_stride)


def _tile_f32(rows, x, x_stride, w_table, groups, steps, w_stride, w_second, ahead_table, ahead_second, out, out_stride):  # type: ignore[no-untyped-def]
    if rows == 12:
        _f12(x, x_stride, w_table, groups, steps, w_stride, w_second, ahead_table, ahead_second, out, out_stride)
    elif rows == 1:
        _f1(x, x_stride, w_table, groups, steps, w_stride, w_second, ahead_table, ahead_second, out, out_stride)
    elif rows == 2:
        _f2(x, x_stride, w_table, groups, steps, w_stride, w_second, ahead_table, ahead_second, out, out_stride)
    elif rows == 3:
        _f3(x, x_stride, w_table, groups, steps, w_stride, w_second, ahead_table, ahead_second, out, out_stride)
    elif rows == 4:
        _f4(x, x_stride, w_table, groups, steps, w_stride, w_second, ahead_table, ahead_second, out, out_stride)
    elif rows == 5:
        _f5(x, x_stride, w_table, groups, steps, w_stride, w_second, ahead_table, ahead_second, out, out_stride)
    elif rows == 6:
        _f6(x, x_stride, w_table, groups, steps, w_stride, w_second, ahead_table, ahead_second, out, out_stride)
    elif rows == 7:
        _f7(x, x_stride, w_table, groups, steps, w_stride, w_second, ahead_table, ahead_second, out, out_stride)
    elif rows == 8:
        _f8(x, x_stride, w_table, groups, steps, w_stride, w_second, ahead_table, ahead_second, out, out_stride)
    elif rows == 9:
        _f9(x, x_stride, w_table, groups, steps, w_stride, w_second, ahead_table, ahead_second, out, out_stride)
    elif rows == 10:
        _f10(x, x_stride, w_table, groups, steps, w_stride, w_second, ahead_table, ahead_second, out, out_stride)
    else:
        _f11(x, x_stride, w_table, groups, steps, w_stride, w_second, ahead_table, ahead_second, out, out_stride)


_SIGNATURE = types.void(*([types.int64] * 12))


def tile_address(act: Any, *, progress: Callable[[str], None] | None = None) -> int:
    """Return the address of the tile for operands of a dtype: uint16 for bf16, or float32."""
    return native_function(_tile_bf16 if act == np.uint16 else _tile_f32, _SIGNATURE, progress=progress)


@intrinsic
def tile(
    typingctx: Any, function: Any, rows: Any, x: Any, x_stride: Any, w_table: Any, groups: Any, steps: Any,
    w_stride: Any, w_second: Any, ahead_table: Any, ahead_second: Any, out: Any, out_stride: Any,
) -> Any:  # fmt: skip
    """Compute out[m, 0:32] = sum over k of x[m, k] * w[k, 0:32] for m < rows <= 12, in float32.

    w comes in `groups` pieces of `steps` k steps each, a step being 2 bf16 values or 1 float32.

    Args:
        function: what :func:`tile_address` returned.
        rows: 1..12.
        x: byte address of row 0; rows are `x_stride` bytes apart.
        w_table: address of int64[groups], the address of each piece.
        groups: number of pieces.
        steps: k steps in each.
        w_stride: bytes between k steps.
        w_second: bytes from the first 16 columns' vector to the second's.
        ahead_table: address of int64[groups], what to fetch into the caches while a piece is computed, laid out like it.
        ahead_second: as w_second for what is fetched.
        out: address of float32 outputs, rows `out_stride` bytes apart.
        out_stride: bytes.
    """

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        call_address(builder, args[0], args[1:])
        return context.get_dummy_value()

    return types.void(*([types.int64] * 13)), codegen
