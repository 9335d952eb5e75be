"""Matrix products of a decoder layer as phases over packed weights, with what follows each product fused into it."""

import numpy as np

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
from engine_v1.kernels.jit import kernel_part
from engine_v1.kernels.schedule import claim, finish
from engine_v1.kernels.tiles import LINE_BYTES, tile

# More rows than this are shared out too, so that many cores find enough tasks in narrow matrices.
ROWS_PER_TASK = 192
# Tiles that one task of the logits product covers; each task leaves one candidate per row.
ARGMAX_TILES = 16


@kernel_part(forceinline=True)
def block_rows(rows, most):  # type: ignore[no-untyped-def]
    """Rows per tile: as even as can be, at most `most`. 13 rows, at most 12 -> 7 + 6."""
    blocks = (rows + most - 1) // most
    return (rows + blocks - 1) // blocks


@kernel_part(forceinline=True)
def _row_share(rows, chunks, chunk):  # type: ignore[no-untyped-def]
    return chunk * rows // chunks, (chunk + 1) * rows // chunks


@kernel_part(forceinline=True)
def _chunks(rows):  # type: ignore[no-untyped-def]
    return (rows + ROWS_PER_TASK - 1) // ROWS_PER_TASK


@kernel_part(forceinline=True)
def bytes_of_tile(ctx, steps):  # type: ignore[no-untyped-def]
    """Extent of a tile of so many steps along k."""
    return steps * ctx.step_bytes + ctx.tail_bytes


@kernel_part(forceinline=True)
def point(ctx, start):  # type: ignore[no-untyped-def]
    """Let the thread's table name the two vectors of a tile.

    A thread reads one tile at a time, not two side by side: two streams of addresses were 3 to 16 % slower at 1 to 6
    rows.
    """
    for vector in range(2):
        ctx.table[ctx.table_at + vector] = start + vector * LINE_BYTES


@kernel_part(forceinline=True)
def product(ctx, rows, x, x_bytes, steps, out, out_at, out_stride):  # type: ignore[no-untyped-def]
    """Multiply `rows` rows with the tile that the thread's table names."""
    tile(
        ctx.linear_tile, rows, 2, x, x_bytes, address(ctx.table, ctx.table_at), 0, 0, 1, steps, ctx.step_bytes,
        address(out, out_at), out_stride * 4,
    )  # fmt: skip


@kernel_part
def linear_store(ctx, phase, x, x_bytes, rows, w, tiles, steps, out, out_stride):  # type: ignore[no-untyped-def]
    """out[m, n] = sum over k of x[m, k] * w[n, k], float32."""
    tile_bytes = bytes_of_tile(ctx, steps)
    chunks = _chunks(rows)
    total = tiles * chunks
    done = 0
    task = claim(ctx.sync, ctx.threads, phase, ctx.thread, total)
    while task >= 0:
        n = task // chunks
        m, last = _row_share(rows, chunks, task % chunks)
        size = block_rows(last - m, MAX_TILE_ROWS)
        point(ctx, w + n * tile_bytes)
        while m < last:
            lines = min(size, last - m)
            at = m * out_stride + n * TILE_COLUMNS
            product(ctx, lines, x + m * x_bytes, x_bytes, steps, out, at, out_stride)
            m += lines
        done += 1
        task = claim(ctx.sync, ctx.threads, phase, ctx.thread, total)
    finish(ctx.sync, ctx.threads, phase, done, total)


@kernel_part
def linear_add(ctx, phase, x, x_bytes, rows, w, tiles, steps, bias, bias_at, out, out_stride):  # type: ignore[no-untyped-def]
    """out[m, n] += bias[n] + sum over k of x[m, k] * w[n, k]; a negative bias_at stands for no bias."""
    tile_bytes = bytes_of_tile(ctx, steps)
    chunks = _chunks(rows)
    total = tiles * chunks
    done = 0
    task = claim(ctx.sync, ctx.threads, phase, ctx.thread, total)
    while task >= 0:
        n = task // chunks
        m, last = _row_share(rows, chunks, task % chunks)
        size = block_rows(last - m, MAX_TILE_ROWS)
        point(ctx, w + n * tile_bytes)
        while m < last:
            lines = min(size, last - m)
            product(ctx, lines, x + m * x_bytes, x_bytes, steps, ctx.scratch, ctx.scratch_at, TILE_COLUMNS)
            for i in range(lines):
                for j in range(0, TILE_COLUMNS, LANES):
                    at = (m + i) * out_stride + n * TILE_COLUMNS + j
                    v = load(ctx.scratch, ctx.scratch_at + i * TILE_COLUMNS + j)
                    if bias_at >= 0:
                        v = v + load(bias, bias_at + n * TILE_COLUMNS + j)
                    store(out, at, load(out, at) + v)
            m += lines
        done += 1
        task = claim(ctx.sync, ctx.threads, phase, ctx.thread, total)
    finish(ctx.sync, ctx.threads, phase, done, total)


@kernel_part
def linear_silu_mul(ctx, phase, x, x_bytes, rows, w, tiles, steps, bias, bias_at, out, out_stride):  # type: ignore[no-untyped-def]
    """out[m, n] = silu(gate[m, n]) * up[m, n]; w and bias hold a tile of gate's, one of up's, and so on."""
    tile_bytes = bytes_of_tile(ctx, steps)
    chunks = _chunks(rows)
    total = tiles * chunks
    width = 2 * TILE_COLUMNS
    done = 0
    task = claim(ctx.sync, ctx.threads, phase, ctx.thread, total)
    while task >= 0:
        n = task // chunks
        m, last = _row_share(rows, chunks, task % chunks)
        size = block_rows(last - m, MAX_TILE_ROWS)
        start = w + 2 * n * tile_bytes
        while m < last:
            lines = min(size, last - m)
            for part in range(2):
                point(ctx, start + part * tile_bytes)
                at = ctx.scratch_at + part * TILE_COLUMNS
                product(ctx, lines, x + m * x_bytes, x_bytes, steps, ctx.scratch, at, width)
            for i in range(lines):
                for j in range(0, TILE_COLUMNS, LANES):
                    at = ctx.scratch_at + i * width + j
                    gate = load(ctx.scratch, at)
                    up = load(ctx.scratch, at + TILE_COLUMNS)
                    if bias_at >= 0:
                        gate = gate + load(bias, bias_at + n * width + j)
                        up = up + load(bias, bias_at + n * width + TILE_COLUMNS + j)
                    store(out, (m + i) * out_stride + n * TILE_COLUMNS + j, silu(gate) * up)
            m += lines
        done += 1
        task = claim(ctx.sync, ctx.threads, phase, ctx.thread, total)
    finish(ctx.sync, ctx.threads, phase, done, total)


@kernel_part
def linear_argmax(ctx, phase, x, x_bytes, rows, w, size, steps, best, best_id):  # type: ignore[no-untyped-def]
    """Leave each row's largest output and its lowest index, one candidate per task of 512 outputs.

    The candidate's value is NaN where any output of its range is. Outputs from `size` on are padding.
    best: float32[tasks * rows], best_id: int32[tasks * rows].
    """
    tile_bytes = bytes_of_tile(ctx, steps)
    tiles = (size + TILE_COLUMNS - 1) // TILE_COLUMNS
    total = (tiles + ARGMAX_TILES - 1) // ARGMAX_TILES
    state = ctx.scratch_at + MAX_TILE_ROWS * TILE_COLUMNS  # per row: largest, index, NaN marks; sixteen lanes each
    block = block_rows(rows, MAX_TILE_ROWS)
    done = 0
    task = claim(ctx.sync, ctx.threads, phase, ctx.thread, total)
    while task >= 0:
        for m in range(rows):
            clear_best(ctx, state + m * 3 * LANES)
        end = min(tiles, (task + 1) * ARGMAX_TILES)
        for n in range(task * ARGMAX_TILES, end):
            point(ctx, w + n * tile_bytes)
            for m in range(0, rows, block):
                lines = min(block, rows - m)
                product(ctx, lines, x + m * x_bytes, x_bytes, steps, ctx.scratch, ctx.scratch_at, TILE_COLUMNS)
                for i in range(lines):
                    for j in range(0, TILE_COLUMNS, LANES):
                        at = ctx.scratch_at + i * TILE_COLUMNS + j
                        update_best(ctx, state + (m + i) * 3 * LANES, at, n * TILE_COLUMNS + j, size)
        for m in range(rows):
            reduce_best(ctx, state + m * 3 * LANES, task * rows + m, best, best_id)
        done += 1
        task = claim(ctx.sync, ctx.threads, phase, ctx.thread, total)
    finish(ctx.sync, ctx.threads, phase, done, total)


@kernel_part(forceinline=True)
def clear_best(ctx, state):  # type: ignore[no-untyped-def]
    """Begin a row's state: nothing was seen."""
    store(ctx.scratch, state, splat(-np.inf))
    store(ctx.scratch, state + LANES, splat(2.0**24))
    store(ctx.scratch, state + 2 * LANES, splat(0.0))


@kernel_part(forceinline=True)
def update_best(ctx, state, values, first, size):  # type: ignore[no-untyped-def]
    """Take sixteen outputs, of which `first` is the index of the first, into a row's state."""
    v = load(ctx.scratch, values)
    if first + LANES > size:
        v = keep_range(v, first, 0, size, splat(-np.inf))
    largest = load(ctx.scratch, state)
    # Vocabularies have fewer than 2**24 entries: float32 lanes hold their indices exactly.
    index = where_greater(v, largest, lane_numbers() + splat(first), load(ctx.scratch, state + LANES))
    store(ctx.scratch, state, where_greater(v, largest, v, largest))
    store(ctx.scratch, state + LANES, index)
    store(ctx.scratch, state + 2 * LANES, where_nan(v, v, load(ctx.scratch, state + 2 * LANES)))


@kernel_part
def reduce_best(ctx, state, at, best, best_id):  # type: ignore[no-untyped-def]
    """Write down the largest output that a row's state has seen, and its index."""
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
