"""Matrix tiles: 12 rows times 32 columns, or 6 times 64, over the whole of K, every accumulator in a register.

An output is accumulated by one accumulator with k ascending, whatever the number of rows in its tile: this is why a
row's result does not depend on which rows are computed beside it.
"""

import itertools
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


def _multiply_add(builder: Any, kind: str, x: Any, w: Any, acc: Any) -> Any:
    """One k step: x and w hold one float32, or a pair of bf16, per lane."""
    if kind == "f32":
        return _call(builder, "llvm.fma.v16f32", VF, [x, w, acc])
    if HAS_BF16_DOT:
        pair = [builder.bitcast(v, VBF_PAIRS) for v in (x, w)]
        return _call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", VF, [acc, *pair])
    for part in ("low", "high"):
        both = [builder.shl(v, _iconst(16)) if part == "low" else builder.and_(v, _iconst(-65536)) for v in (x, w)]
        acc = _call(builder, "llvm.fma.v16f32", VF, [builder.bitcast(v, VF) for v in both] + [acc])
    return acc


def _make_tile(kind: str, rows: int, vectors: int) -> Any:
    """The tile for `rows` rows and 16 * `vectors` columns; arguments as for :func:`tile`."""

    @intrinsic
    def tile_rows(
        typingctx: Any, x: Any, x_stride: Any, table: Any, table_stride: Any, ahead: Any, groups: Any, steps: Any,
        w_stride: Any, out: Any, out_stride: Any,
    ) -> Any:  # fmt: skip
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            x, x_stride, table, table_stride, ahead, groups, steps, w_stride, out, out_stride = args
            scalar, vector = (I32, VI) if kind == "bf16" else (F32, VF)
            acc = [[cgutils.alloca_once(builder, VF) for _ in range(vectors)] for _ in range(rows)]
            for slot in itertools.chain(*acc):
                builder.store(_const(0.0), slot)
            x_rows = [builder.add(x, builder.mul(x_stride, ir.Constant(I64, m))) for m in range(rows)]
            with cgutils.for_range(builder, groups) as group:
                line = builder.add(table, builder.mul(group.index, table_stride))
                starts, fetches = (
                    [
                        builder.load(builder.inttoptr(builder.add(place, ir.Constant(I64, 8 * b)), I64.as_pointer()))
                        for b in range(vectors)
                    ]
                    for place in (line, builder.add(line, ahead))
                )
                done = builder.mul(group.index, steps)
                with cgutils.for_range(builder, steps) as loop:
                    step = builder.mul(loop.index, w_stride)
                    w = []
                    for start, fetch in zip(starts, fetches, strict=True):
                        value = builder.load(builder.inttoptr(builder.add(start, step), vector.as_pointer()))
                        value.align = 4
                        w.append(value)
                        _prefetch(builder, builder.add(fetch, step))
                    offset = builder.mul(builder.add(done, loop.index), ir.Constant(I64, 4))
                    for m in range(rows):
                        value = builder.load(builder.inttoptr(builder.add(x_rows[m], offset), scalar.as_pointer()))
                        value.align = 2 if kind == "bf16" else 4
                        xs = _splat(builder, value, vector)
                        for b in range(vectors):
                            new = _multiply_add(builder, kind, xs, w[b], builder.load(acc[m][b]))
                            builder.store(new, acc[m][b])
            for m in range(rows):
                row = builder.add(out, builder.mul(out_stride, ir.Constant(I64, m)))
                for b in range(vectors):
                    place = builder.inttoptr(builder.add(row, ir.Constant(I64, 4 * LANES * b)), VF.as_pointer())
                    builder.store(builder.load(acc[m][b]), place).align = 4
            return context.get_dummy_value()

        return types.void(*([types.intp] * 10)), codegen

    return tile_rows


def _prefetch(builder: Any, at: Any) -> None:
    flags = [ir.Constant(I32, n) for n in (0, 3, 1)]  # to read, keep in all caches, data
    _call(builder, "llvm.prefetch.p0i8", ir.VoidType(), [builder.inttoptr(at, I8.as_pointer()), *flags])


_b1, _b2, _b3, _b4, _b5, _b6, _b7, _b8, _b9, _b10, _b11, _b12 = (_make_tile("bf16", n, 2) for n in range(1, 13))
_b1w, _b2w, _b3w, _b4w, _b5w, _b6w = (_make_tile("bf16", n, 4) for n in range(1, 7))
_f1, _f2, _f3, _f4, _f5, _f6, _f7, _f8, _f9, _f10, _f11, _f12 = (_make_tile("f32", n, 2) for n in range(1, 13))
_f1w, _f2w, _f3w, _f4w, _f5w, _f6w = (_make_tile("f32", n, 4) for n in range(1, 7))


def _tile_bf16(rows, vectors, x, x_stride, table, table_stride, ahead, groups, steps, w_stride, out, out_stride):  # type: ignore[no-untyped-def]
    if vectors == 4:
        if rows == 1:
            _b1w(x, x_stride, table, table_stride, ahead, groups, steps, w_stride, out, out_stride)
        elif rows == 2:
            _b2w(x, x_stride, table, table_stride, ahead, groups, steps, w_stride, out, out_stride)
        elif rows == 3:
            _b3w(x, x_stride, table, table_stride, ahead, groups, steps, w_stride, out, out_stride)
        elif rows == 4:
            _b4w(x, x_stride, table, table_stride, ahead, groups, steps, w_stride, out, out_stride)
        elif rows == 5:
            _b5w(x, x_stride, table, table_stride, ahead, groups, steps, w_stride, out, out_stride)
        else:
            _b6w(x, x_stride, table, table_stride, ahead, groups, steps, w_stride, out, out_stride)
    elif rows == 12:
        _b12(x, x_stride, table, table_stride, ahead, groups, steps, w_stride, out, out_stride)
    elif rows == 1:
        _b1(x, x_stride, table, table_stride, ahead, groups, steps, w_stride, out, out_stride)
    elif rows == 2:
        _b2(x, x_stride, table, table_stride, ahead, groups, steps, w_stride, out, out_stride)
    elif rows == 3:
        _b3(x, x_stride, table, table_stride, ahead, groups, steps, w_stride, out, out_stride)
    elif rows == 4:
        _b4(x, x_stride, table, table_stride, ahead, groups, steps, w_stride, out, out_stride)
    elif rows == 5:
        _b5(x, x_stride, table, table_stride, ahead, groups, steps, w_stride, out, out_stride)
    elif rows == 6:
        _b6(x, x_stride, table, table_stride, ahead, groups, steps, w_stride, out, out_stride)
    elif rows == 7:
        _b7(x, x_stride, table, table_stride, ahead, groups, steps, w_stride, out, out_stride)
    elif rows == 8:
        _b8(x, x_stride, table, table_stride, ahead, groups, steps, w_stride, out, out_stride)
    elif rows == 9:
        _b9(x, x_stride, table, table_stride, ahead, groups, steps, w_stride, out, out_stride)
    elif rows == 10:
        _b10(x, x_stride, table, table_stride, ahead, groups, steps, w_stride, out, out_stride)
    else:
        _b11(x, x_stride, table, table_stride, ahead, groups, steps, w_stride, out, out_stride)


def _tile_f32(rows, vectors, x, x_stride, table, table_stride, ahead, groups, steps, w_stride, out, out_stride):  # type: ignore[no-untyped-def]
    if vectors == 4:
        if rows == 1:
            _f1w(x, x_stride, table, table_stride, ahead, groups, steps, w_stride, out, out_stride)
        elif rows == 2:
            _f2w(x, x_stride, table, table_stride, ahead, groups, steps, w_stride, out, out_stride)
        elif rows == 3:
            _f3w(x, x_stride, table, table_stride, ahead, groups, steps, w_stride, out, out_stride)
        elif rows == 4:
            _f4w(x, x_stride, table, table_stride, ahead, groups, steps, w_stride, out, out_stride)
        elif rows == 5:
            _f5w(x, x_stride, table, table_stride, ahead, groups, steps, w_stride, out, out_stride)
        else:
            _f6w(x, x_stride, table, table_stride, ahead, groups, steps, w_stride, out, out_stride)
    elif rows == 12:
        _f12(x, x_stride, table, table_stride, ahead, groups, steps, w_stride, out, out_stride)
    elif rows == 1:
        _f1(x, x_stride, table, table_stride, ahead, groups, steps, w_stride, out, out_stride)
    elif rows == 2:
        _f2(x, x_stride, table, table_stride, ahead, groups, steps, w_stride, out, out_stride)
    elif rows == 3:
        _f3(x, x_stride, table, table_stride, ahead, groups, steps, w_stride, out, out_stride)
    elif rows == 4:
        _f4(x, x_stride, table, table_stride, ahead, groups, steps, w_stride, out, out_stride)
    elif rows == 5:
        _f5(x, x_stride, table, table_stride, ahead, groups, steps, w_stride, out, out_stride)
    elif rows == 6:
        _f6(x, x_stride, table, table_stride, ahead, groups, steps, w_stride, out, out_stride)
    elif rows == 7:
        _f7(x, x_stride, table, table_stride, ahead, groups, steps, w_stride, out, out_stride)
    elif rows == 8:
        _f8(x, x_stride, table, table_stride, ahead, groups, steps, w_stride, out, out_stride)
    elif rows == 9:
        _f9(x, x_stride, table, table_stride, ahead, groups, steps, w_stride, out, out_stride)
    elif rows == 10:
        _f10(x, x_stride, table, table_stride, ahead, groups, steps, w_stride, out, out_stride)
    else:
        _f11(x, x_stride, table, table_stride, ahead, groups, steps, w_stride, out, out_stride)


_SIGNATURE = types.void(*([types.int64] * 12))


def tile_address(act: Any, *, progress: Callable[[str], None] | None = None) -> int:
    """Return the address of the tile for operands of a dtype: uint16 for bf16, or float32."""
    return native_function(_tile_bf16 if act == np.uint16 else _tile_f32, _SIGNATURE, progress=progress)


@intrinsic
def tile(
    typingctx: Any, function: Any, rows: Any, vectors: Any, x: Any, x_stride: Any, table: Any, table_stride: Any,
    ahead: Any, groups: Any, steps: Any, w_stride: Any, out: Any, out_stride: Any,
) -> Any:  # fmt: skip
    """Compute out[m, 0:16 * vectors] = sum over k of x[m, k] * w[k, 0:16 * vectors], in float32.

    Every vector of 16 columns of w has an address of its own, and so has each of `groups` pieces along k. A piece has
    `steps` k steps, 2 bf16 values or 1 float32 each.

    Args:
        function: what :func:`tile_address` returned.
        rows: 1..12, with 4 vectors 1..6.
        vectors: 2 or 4.
        x: byte address of row 0; rows are `x_stride` bytes apart.
        table: address of int64[groups, vectors], the addresses of w; lines are `table_stride` bytes apart.
        ahead: bytes from there to a table of the same form: what to fetch into the caches meanwhile.
        groups: number of pieces.
        steps: k steps in each.
        w_stride: bytes between k steps.
        out: address of float32 outputs, rows `out_stride` bytes apart.
        out_stride: bytes.
    """

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        call_address(builder, args[0], args[1:])
        return context.get_dummy_value()

    return types.void(*([types.int64] * 13)), codegen
