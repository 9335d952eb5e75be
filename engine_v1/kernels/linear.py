"""Matrix products of a decoder layer as phases over packed weights, with what follows each product fused into it."""

from typing import Any

import numpy as np
from numba import prange, types

from engine_v1.kernels.elementwise import silu
from engine_v1.kernels.intrinsics import (
    LANES,
    MAX_TILE_ROWS,
    TILE_COLUMNS,
    address,
    keep_range,
    lane_numbers,
    load,
    splat,
    store,
    where_greater,
    where_nan,
)
from engine_v1.kernels.jit import jit, kernel_part
from engine_v1.kernels.schedule import claim, finish
from engine_v1.kernels.tiles import tile

# More rows than this are shared out too, so that many cores find enough tasks in narrow matrices.
ROWS_PER_TASK = 192
# Bytes by which weights are fetched ahead of their use.
PREFETCH_BYTES = 2048
# Tiles that one task of the logits product covers; each task leaves one candidate per row.
ARGMAX_TILES = 16


def padded(size: int, multiple: int = TILE_COLUMNS) -> int:
    """Return `size` rounded up to a multiple."""
    return -(-size // multiple) * multiple


def packed_size(rows: int, columns: int, dtype: np.dtype[Any]) -> int:
    """Return how many elements :func:`pack_into` writes for weights of [rows, columns]."""
    return padded(rows) * padded(columns, 2 if dtype == np.uint16 else 1)


@jit(parallel=True)
def pack_into(weight, out, first_tile, tile_step, rows, columns):  # type: ignore[no-untyped-def]
    """Lay weights out in the order in which :func:`tile` reads them.

    Args:
        weight: act[n, k]: one output per row; bf16 as uint16, or float32.
        out: act[packed_size], flat and zero: tile t of `weight` goes to place first_tile + t * tile_step, each being
            [k / 2, 32, 2] for bf16 and [k, 32] for float32.
        first_tile: see `out`.
        tile_step: 1, or 2 to interleave two matrices.
        rows: int64[n]: which output each row of `weight` is (padding between heads).
        columns: int64[k]: which input each column is.
    """
    k = out.shape[1]
    pair = out.shape[3]
    for i in prange(weight.shape[0]):
        n = rows[i]
        place = first_tile + n // TILE_COLUMNS * tile_step
        lane = n % TILE_COLUMNS
        for j in range(weight.shape[1]):
            c = columns[j]
            out[place, c // pair, lane, c % pair] = weight[i, j]
    return k


@kernel_part(forceinline=True)
def _block_rows(rows):  # type: ignore[no-untyped-def]
    """Rows per tile: as even as can be, at most 12. 13 rows -> 7 + 6."""
    blocks = (rows + MAX_TILE_ROWS - 1) // MAX_TILE_ROWS
    return (rows + blocks - 1) // blocks


@kernel_part(forceinline=True)
def _row_share(rows, chunks, chunk):  # type: ignore[no-untyped-def]
    return chunk * rows // chunks, (chunk + 1) * rows // chunks


@kernel_part(forceinline=True)
def _chunks(rows):  # type: ignore[no-untyped-def]
    return (rows + ROWS_PER_TASK - 1) // ROWS_PER_TASK


@kernel_part
def linear_store(ctx, phase, x, x_stride, rows, w, w_at, tiles, steps, out, out_stride):  # type: ignore[no-untyped-def]
    """out[m, n] = sum over k of x[m, k] * w[n, k], float32."""
    tile_bytes = steps * TILE_COLUMNS * 4
    chunks = _chunks(rows)
    total = tiles * chunks
    done = 0
    task = claim(ctx.sync, ctx.threads, phase, ctx.thread, total)
    while task >= 0:
        n = task // chunks
        m, last = _row_share(rows, chunks, task % chunks)
        size = _block_rows(last - m)
        ctx.table[ctx.table_at] = address(w, w_at) + n * tile_bytes
        ctx.table[ctx.table_at + 1] = ctx.table[ctx.table_at] + PREFETCH_BYTES
        while m < last:
            count = min(size, last - m)
            tile(
                ctx.tile, count, address(x, m * x_stride), x_stride * x.itemsize, address(ctx.table, ctx.table_at), 1, steps,
                TILE_COLUMNS * 4, LANES * 4, address(ctx.table, ctx.table_at + 1), LANES * 4, address(out, m * out_stride + n * TILE_COLUMNS), out_stride * 4,
            )  # fmt: skip
            m += count
        done += 1
        task = claim(ctx.sync, ctx.threads, phase, ctx.thread, total)
    finish(ctx.sync, ctx.threads, phase, done, total)


@kernel_part
def linear_add(ctx, phase, x, x_stride, rows, w, w_at, tiles, steps, bias, bias_at, out, out_stride):  # type: ignore[no-untyped-def]
    """out[m, n] += bias[n] + sum over k of x[m, k] * w[n, k]; a negative bias_at stands for no bias."""
    tile_bytes = steps * TILE_COLUMNS * 4
    chunks = _chunks(rows)
    total = tiles * chunks
    done = 0
    task = claim(ctx.sync, ctx.threads, phase, ctx.thread, total)
    while task >= 0:
        n = task // chunks
        m, last = _row_share(rows, chunks, task % chunks)
        size = _block_rows(last - m)
        ctx.table[ctx.table_at] = address(w, w_at) + n * tile_bytes
        ctx.table[ctx.table_at + 1] = ctx.table[ctx.table_at] + PREFETCH_BYTES
        while m < last:
            count = min(size, last - m)
            tile(
                ctx.tile, count, address(x, m * x_stride), x_stride * x.itemsize, address(ctx.table, ctx.table_at), 1, steps,
                TILE_COLUMNS * 4, LANES * 4, address(ctx.table, ctx.table_at + 1), LANES * 4, address(ctx.scratch, ctx.scratch_at), TILE_COLUMNS * 4,
            )  # fmt: skip
            for i in range(count):
                for j in range(0, TILE_COLUMNS, LANES):
                    at = (m + i) * out_stride + n * TILE_COLUMNS + j
                    v = load(ctx.scratch, ctx.scratch_at + i * TILE_COLUMNS + j)
                    if bias_at >= 0:
                        v = v + load(bias, bias_at + n * TILE_COLUMNS + j)
                    store(out, at, load(out, at) + v)
            m += count
        done += 1
        task = claim(ctx.sync, ctx.threads, phase, ctx.thread, total)
    finish(ctx.sync, ctx.threads, phase, done, total)


@kernel_part
def linear_silu_mul(ctx, phase, x, x_stride, rows, w, w_at, tiles, steps, bias, bias_at, out, out_stride):  # type: ignore[no-untyped-def]
    """out[m, n] = silu(gate[m, n]) * up[m, n]; w and bias hold a tile of gate's, one of up's, and so on."""
    tile_bytes = steps * TILE_COLUMNS * 4
    chunks = _chunks(rows)
    total = tiles * chunks
    width = 2 * TILE_COLUMNS
    done = 0
    task = claim(ctx.sync, ctx.threads, phase, ctx.thread, total)
    while task >= 0:
        n = task // chunks
        m, last = _row_share(rows, chunks, task % chunks)
        size = _block_rows(last - m)
        while m < last:
            count = min(size, last - m)
            for half in range(2):
                ctx.table[ctx.table_at] = address(w, w_at) + (2 * n + half) * tile_bytes
                ctx.table[ctx.table_at + 1] = ctx.table[ctx.table_at] + PREFETCH_BYTES
                tile(
                    ctx.tile, count, address(x, m * x_stride), x_stride * x.itemsize, address(ctx.table, ctx.table_at), 1,
                    steps, TILE_COLUMNS * 4, LANES * 4, address(ctx.table, ctx.table_at + 1), LANES * 4,
                    address(ctx.scratch, ctx.scratch_at + half * TILE_COLUMNS), width * 4,
                )  # fmt: skip
            for i in range(count):
                for j in range(0, TILE_COLUMNS, LANES):
                    at = ctx.scratch_at + i * width + j
                    gate = load(ctx.scratch, at)
                    up = load(ctx.scratch, at + TILE_COLUMNS)
                    if bias_at >= 0:
                        gate = gate + load(bias, bias_at + n * width + j)
                        up = up + load(bias, bias_at + n * width + TILE_COLUMNS + j)
                    store(out, (m + i) * out_stride + n * TILE_COLUMNS + j, silu(gate) * up)
            m += count
        done += 1
        task = claim(ctx.sync, ctx.threads, phase, ctx.thread, total)
    finish(ctx.sync, ctx.threads, phase, done, total)


@kernel_part
def linear_argmax(ctx, phase, x, x_stride, rows, w, w_at, size, steps, best, best_id):  # type: ignore[no-untyped-def]
    """Leave each row's largest output and its lowest index, one candidate per task of 512 outputs.

    The candidate's value is NaN where any output of its range is. Outputs from `size` on are padding.
    best: float32[tasks * rows], best_id: int32[tasks * rows].
    """
    tile_bytes = steps * TILE_COLUMNS * 4
    tiles = (size + TILE_COLUMNS - 1) // TILE_COLUMNS
    total = (tiles + ARGMAX_TILES - 1) // ARGMAX_TILES
    state = ctx.scratch_at + MAX_TILE_ROWS * TILE_COLUMNS  # per row: largest, index, NaN marks; sixteen lanes each
    block = _block_rows(rows)
    done = 0
    task = claim(ctx.sync, ctx.threads, phase, ctx.thread, total)
    while task >= 0:
        for m in range(rows):
            store(ctx.scratch, state + m * 3 * LANES, splat(-np.inf))
            store(ctx.scratch, state + (m * 3 + 1) * LANES, splat(2.0**24))
            store(ctx.scratch, state + (m * 3 + 2) * LANES, splat(0.0))
        for n in range(task * ARGMAX_TILES, min(tiles, (task + 1) * ARGMAX_TILES)):
            ctx.table[ctx.table_at] = address(w, w_at) + n * tile_bytes
            ctx.table[ctx.table_at + 1] = ctx.table[ctx.table_at] + PREFETCH_BYTES
            m = 0
            while m < rows:
                count = min(block, rows - m)
                tile(
                    ctx.tile, count, address(x, m * x_stride), x_stride * x.itemsize, address(ctx.table, ctx.table_at), 1,
                    steps, TILE_COLUMNS * 4, LANES * 4, address(ctx.table, ctx.table_at + 1), LANES * 4, address(ctx.scratch, ctx.scratch_at), TILE_COLUMNS * 4,
                )  # fmt: skip
                for i in range(count):
                    _update_best(ctx, state + (m + i) * 3 * LANES, ctx.scratch_at + i * TILE_COLUMNS, n, size)
                m += count
        for m in range(rows):
            _reduce_best(ctx, state + m * 3 * LANES, task * rows + m, best, best_id)
        done += 1
        task = claim(ctx.sync, ctx.threads, phase, ctx.thread, total)
    finish(ctx.sync, ctx.threads, phase, done, total)


@kernel_part(forceinline=True)
def _update_best(ctx, state, values, n, size):  # type: ignore[no-untyped-def]
    largest = load(ctx.scratch, state)
    index = load(ctx.scratch, state + LANES)
    marks = load(ctx.scratch, state + 2 * LANES)
    for j in range(0, TILE_COLUMNS, LANES):
        v = load(ctx.scratch, values + j)
        first = n * TILE_COLUMNS + j
        if first + LANES > size:
            v = keep_range(v, first, 0, size, splat(-np.inf))
        # Vocabularies have fewer than 2**24 entries: float32 lanes hold their indices exactly.
        index = where_greater(v, largest, lane_numbers() + splat(first), index)
        largest = where_greater(v, largest, v, largest)
        marks = where_nan(v, v, marks)
    store(ctx.scratch, state, largest)
    store(ctx.scratch, state + LANES, index)
    store(ctx.scratch, state + 2 * LANES, marks)


@kernel_part
def _reduce_best(ctx, state, at, best, best_id):  # type: ignore[no-untyped-def]
    value = ctx.scratch[state]
    index = ctx.scratch[state + LANES]
    for lane in range(1, LANES):
        v = ctx.scratch[state + lane]
        i = ctx.scratch[state + LANES + lane]
        if v > value or (v == value and i < index):
            value = v
            index = i
    for lane in range(LANES):
        if np.isnan(ctx.scratch[state + 2 * LANES + lane]):
            value = np.float32(np.nan)
    best[at] = value
    best_id[at] = np.int32(index)


def pack_signatures(act: Any) -> list[tuple[Any, ...]]:
    """Return the signature of :func:`pack_into` for bf16 (types.uint16) or types.float32."""
    ids = types.Array(types.int64, 1, "C")
    weight = types.Array(act, 2, "C")
    return [(weight, types.Array(act, 4, "C"), types.int64, types.int64, ids, ids)]
