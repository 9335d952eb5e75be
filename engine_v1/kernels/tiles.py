"""Matrix tiles: 12 rows times 32 columns (of keys and values 6 times 64) over the whole of K, each sum in a register.

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
    MAX_TILE_ROWS,
    VBF_PAIRS,
    VF,
    VI,
    WIDE_TILE_ROWS,
    broadcast,
    call,
    call_address,
    const,
    iconst,
    prefetch,
)

LINE_BYTES = 64  # a vector, and a cache line
# How far ahead of their use weights are fetched, and how far ahead into the second cache already.
NEAR_BYTES, FAR_BYTES = 4096, 10240
FEW_ROWS = 4  # up to so many they are not, of weights that are used as they lie there
_NEAREST_CACHE, _SECOND_CACHE = 0, 2  # LLVM's localities: not to be kept in any other, and from the second on

# Emits the code of one tile: builder, rows, vectors, then the arguments of :func:`tile` from `x` on.
Emit = Callable[..., None]


def tile_cases(emit: Emit, *, wide: bool) -> Any:
    """Return an intrinsic that branches to the code for its number of rows and vectors; arguments as for `tile`.

    Args:
        emit: emits the code of one number of rows and vectors.
        wide: 2 and 4 vectors of up to 6 rows, not only 2 of up to 12.
    """
    widths = ((2, WIDE_TILE_ROWS), (4, WIDE_TILE_ROWS)) if wide else ((2, MAX_TILE_ROWS),)

    @intrinsic
    def run_tile(
        typingctx: Any, rows: Any, vectors: Any, x: Any, x_stride: Any, table: Any, table_stride: Any, ahead: Any,
        groups: Any, steps: Any, w_stride: Any, out: Any, out_stride: Any,
    ) -> Any:  # fmt: skip
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            done = builder.append_basic_block("done")
            number = builder.add(args[0], builder.mul(args[1], ir.Constant(I64, LANES)))
            switch = builder.switch(number, done)
            for width, most_rows in widths:
                for count in range(1, most_rows + 1):
                    case = builder.append_basic_block(f"tile_{count}_{width}")
                    switch.add_case(ir.Constant(I64, count + width * LANES), case)
                    builder.position_at_end(case)
                    emit(builder, count, width, *args[2:])
                    builder.branch(done)
            builder.position_at_end(done)
            return context.get_dummy_value()

        return types.void(*([types.intp] * 12)), codegen

    return run_tile


def accumulators(builder: Any, rows: int, vectors: int, vector_type: Any, zero: Any) -> list[list[Any]]:
    """Return places for rows x vectors sums, set to zero; LLVM keeps each in a register."""
    acc = [[cgutils.alloca_once(builder, vector_type) for _ in range(vectors)] for _ in range(rows)]
    for slot in itertools.chain(*acc):
        builder.store(zero, slot)
    return acc


def row_addresses(builder: Any, first: Any, stride: Any, rows: int) -> list[Any]:
    """Return the addresses of `rows` rows."""
    return [builder.add(first, builder.mul(stride, ir.Constant(I64, m))) for m in range(rows)]


def offset_by(builder: Any, address: Any, num_bytes: int) -> Any:
    """Return the address so many bytes further on."""
    return builder.add(address, ir.Constant(I64, num_bytes))


def load_at(builder: Any, address: Any, kind: Any, align: int = 4) -> Any:
    """Load a value of an LLVM type."""
    value = builder.load(builder.inttoptr(address, kind.as_pointer()))
    value.align = align
    return value


def store_sums(builder: Any, sums: list[list[Any]], out: Any, out_stride: Any) -> None:
    """Write float32 vectors, by row and vector, to the tile's outputs."""
    for row, values in zip(row_addresses(builder, out, out_stride, len(sums)), sums, strict=True):
        for b, value in enumerate(values):
            place = builder.inttoptr(offset_by(builder, row, LINE_BYTES * b), VF.as_pointer())
            builder.store(value, place).align = 4


def _prefetch(builder: Any, at: Any, locality: int) -> None:
    prefetch(builder, builder.inttoptr(at, I8.as_pointer()), write=False, locality=locality)


def fetch_line(builder: Any, at: Any) -> None:
    """Ask for the line at an address, which is read soon, and once."""
    _prefetch(builder, at, _NEAREST_CACHE)


def fetch_weights(builder: Any, at: Any, rows: int, few_rows: int) -> None:
    """Ask for what a tile of more than a few rows reads a little after the line at an address.

    The nearest cache waits for too few lines at a time to keep a fast memory busy, the second cache for more. Few rows
    use lines faster than anything asks for them: the CPU sees by itself that they follow each other. More work per
    line, where weights are put together of parts, leaves it less time to.
    """
    if rows > few_rows:
        _prefetch(builder, offset_by(builder, at, NEAR_BYTES), _NEAREST_CACHE)
        _prefetch(builder, offset_by(builder, at, FAR_BYTES), _SECOND_CACHE)


def _multiply_add(builder: Any, kind: str, x: Any, w: Any, acc: Any) -> Any:
    """One k step: x and w hold one float32, or a pair of bf16, per lane."""
    if kind == "f32":
        return call(builder, "llvm.fma.v16f32", VF, [x, w, acc])
    if HAS_BF16_DOT:
        pair = [builder.bitcast(v, VBF_PAIRS) for v in (x, w)]
        return call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", VF, [acc, *pair])
    for part in ("low", "high"):
        both = [builder.shl(v, iconst(16)) if part == "low" else builder.and_(v, iconst(-65536)) for v in (x, w)]
        acc = call(builder, "llvm.fma.v16f32", VF, [builder.bitcast(v, VF) for v in both] + [acc])
    return acc


def multiply_rows(builder: Any, kind: str, x_rows: list[Any], offset: Any, w: list[Any], acc: list[list[Any]]) -> None:
    """Emit one k step of a whole tile.

    Args:
        builder: where to.
        kind: "bf16" or "f32".
        x_rows: addresses of the rows.
        offset: bytes from there to the step's values.
        w: the step's weights, by vector.
        acc: places of the sums, by row and vector.
    """
    scalar, vector, align = (I32, VI, 2) if kind == "bf16" else (F32, VF, 4)
    for row, sums in zip(x_rows, acc, strict=True):
        xs = broadcast(builder, load_at(builder, builder.add(row, offset), scalar, align), vector)
        for weights, place in zip(w, sums, strict=True):
            builder.store(_multiply_add(builder, kind, xs, weights, builder.load(place)), place)


def _emit_float_tile(kind: str, *, of_keys: bool) -> Emit:
    vector = VI if kind == "bf16" else VF

    def emit(
        builder: Any, rows: int, vectors: int, x: Any, x_stride: Any, table: Any, table_stride: Any, ahead: Any,
        groups: Any, steps: Any, w_stride: Any, out: Any, out_stride: Any,
    ) -> None:  # fmt: skip
        acc = accumulators(builder, rows, vectors, VF, const(0.0))
        x_rows = row_addresses(builder, x, x_stride, rows)
        with cgutils.for_range(builder, groups) as group:
            line = builder.add(table, builder.mul(group.index, table_stride))
            starts, fetches = (
                [load_at(builder, offset_by(builder, place, 8 * b), I64, 8) for b in range(vectors)]
                for place in (line, builder.add(line, ahead))
            )
            done = builder.mul(group.index, steps)
            with cgutils.for_range(builder, steps) as loop:
                step = builder.mul(loop.index, w_stride)
                w = []
                for start, fetch in zip(starts, fetches, strict=True):
                    place = builder.add(start, step)
                    w.append(load_at(builder, place, vector))
                    if of_keys:
                        _prefetch(builder, builder.add(fetch, step), _SECOND_CACHE)
                    else:
                        fetch_weights(builder, place, rows, FEW_ROWS)
                offset = builder.mul(builder.add(done, loop.index), ir.Constant(I64, 4))
                multiply_rows(builder, kind, x_rows, offset, w, acc)
        store_sums(builder, [[builder.load(slot) for slot in row] for row in acc], out, out_stride)

    return emit


_bf16_cases, _f32_cases = (tile_cases(_emit_float_tile(kind, of_keys=False), wide=False) for kind in ("bf16", "f32"))
_keys_bf16_cases, _keys_f32_cases = (
    tile_cases(_emit_float_tile(kind, of_keys=True), wide=True) for kind in ("bf16", "f32")
)


def tile_bf16(rows, vectors, x, x_stride, table, table_stride, ahead, groups, steps, w_stride, out, out_stride):  # type: ignore[no-untyped-def]
    """Compute a tile of bf16 rows and weights; arguments as for :func:`tile`."""
    _bf16_cases(rows, vectors, x, x_stride, table, table_stride, ahead, groups, steps, w_stride, out, out_stride)


def tile_f32(rows, vectors, x, x_stride, table, table_stride, ahead, groups, steps, w_stride, out, out_stride):  # type: ignore[no-untyped-def]
    """Compute a tile of float32 rows and weights."""
    _f32_cases(rows, vectors, x, x_stride, table, table_stride, ahead, groups, steps, w_stride, out, out_stride)


def keys_bf16(rows, vectors, x, x_stride, table, table_stride, ahead, groups, steps, w_stride, out, out_stride):  # type: ignore[no-untyped-def]
    """Compute a tile of bf16 rows and keys or values, of 2 or 4 vectors."""
    _keys_bf16_cases(rows, vectors, x, x_stride, table, table_stride, ahead, groups, steps, w_stride, out, out_stride)


def keys_f32(rows, vectors, x, x_stride, table, table_stride, ahead, groups, steps, w_stride, out, out_stride):  # type: ignore[no-untyped-def]
    """Compute a tile of float32 rows and keys or values, of 2 or 4 vectors."""
    _keys_f32_cases(rows, vectors, x, x_stride, table, table_stride, ahead, groups, steps, w_stride, out, out_stride)


TILE_SIGNATURE = types.void(*([types.int64] * 12))


def keys_function(act: np.dtype[Any]) -> Callable[..., None]:
    """Return the function that computes with keys and values of a dtype: uint16, holding bf16, or float32."""
    return keys_bf16 if act == np.uint16 else keys_f32


@intrinsic
def tile(
    typingctx: Any, function: Any, rows: Any, vectors: Any, x: Any, x_stride: Any, table: Any, table_stride: Any,
    ahead: Any, groups: Any, steps: Any, w_stride: Any, out: Any, out_stride: Any,
) -> Any:  # fmt: skip
    """Compute out[m, 0:16 * vectors] = sum over k of x[m, k] * w[k, 0:16 * vectors], in float32.

    Every vector of 16 columns of w has an address of its own, and so has each of `groups` pieces along k. A piece has
    `steps` k steps, 2 bf16 values or 1 float32 each.

    Args:
        function: its address, see :class:`engine_v1.kernels.formats.WeightFormat`.
        rows: 1..12; of keys and values 1..6.
        vectors: 2 or, of keys and values, 4.
        x: byte address of row 0; rows are `x_stride` bytes apart.
        table: address of int64[groups, vectors], the addresses of w; lines are `table_stride` bytes apart.
        ahead: of keys and values, bytes from there to a table of the same form: what to fetch into the second cache
            meanwhile. They are often read again for other rows.
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
