"""The exact arg-max over a vocabulary without reading all of the output embedding.

A copy of the embedding in 8 bits is half as many bytes as bfloat16. Its product says of every output how large it can
be and how small, so of nearly all that they are not the largest; what is left, a few tiles, is computed from the
embedding itself by the tile that computes all of it elsewhere. The result is the same bits.

The bounds are the Cauchy-Schwarz inequality: with w = v + (w - v) for the copy v, and x = y + (x - y) for the quantised
row y, |w.x - v.y| <= |w - v| |x| + |v| |x - y|. What both products lose in their float32 sums is added to it.
"""

import numpy as np

from engine_v1.kernels.intrinsics import (
    LANES,
    MAX_TILE_ROWS,
    TILE_COLUMNS,
    fma,
    keep_range,
    load,
    maximum,
    reduce_max,
    splat,
    store,
    where_nan,
)
from engine_v1.kernels.jit import kernel_part
from engine_v1.kernels.linear import (
    ARGMAX_TILES,
    block_rows,
    bytes_of_tile,
    clear_best,
    point,
    product,
    reduce_best,
    update_best,
)
from engine_v1.kernels.quantize import byte_row_size, quantize_row
from engine_v1.kernels.schedule import claim, finish

# What a sum of k products in float32 may be off by, per k and per unit of the norms: twice the unit roundoff.
ROUNDING = 2.0**-23
# On all bounds, for the rounding of the norms that they are made of; and in logits, for norms whose squares vanish.
SLACK = 1.01
LEAST_MARGIN = 1e-6
# Places per row: its norm, the norm of what quantising took from it, and the least that its largest output can be.
FACTS = 3


@kernel_part
def measure_rows(ctx, phase, rows, size, x, byte_rows, facts):  # type: ignore[no-untyped-def]
    """Quantise rows of `size` values and note their norms."""
    done = 0
    task = claim(ctx.sync, ctx.threads, phase, ctx.thread, rows)
    while task >= 0:
        norm, error = quantize_row(x, task * size, size, byte_rows + task * byte_row_size(size))
        facts[task * FACTS] = norm
        facts[task * FACTS + 1] = error
        done += 1
        task = claim(ctx.sync, ctx.threads, phase, ctx.thread, rows)
    finish(ctx.sync, ctx.threads, phase, done, rows)


@kernel_part
def screen(ctx, phase, x, x_bytes, facts, rows, w, size, steps, bounds, upper, lower):  # type: ignore[no-untyped-def]
    """Bound every tile's largest output from above, and from below that of every task of 512 outputs.

    Args:
        ctx, x, x_bytes, w, steps: of the copy.
        facts: float32[rows, FACTS].
        size: outputs; those behind them are padding.
        bounds: float32[tiles, 2, 32]: what an output is off by per unit of norm and of error.
        upper: float32[tiles, rows], written; infinite where nothing is known.
        lower: float32[tasks, rows], written.
    """
    tile_bytes = bytes_of_tile(ctx, steps)
    tiles = (size + TILE_COLUMNS - 1) // TILE_COLUMNS
    total = (tiles + ARGMAX_TILES - 1) // ARGMAX_TILES
    block = block_rows(rows, MAX_TILE_ROWS)
    state = ctx.scratch_at + MAX_TILE_ROWS * TILE_COLUMNS  # per row: what some output is at least, in sixteen lanes
    done = 0
    task = claim(ctx.sync, ctx.threads, phase, ctx.thread, total)
    while task >= 0:
        for m in range(rows):
            store(ctx.scratch, state + m * LANES, splat(-np.inf))
        for n in range(task * ARGMAX_TILES, min(tiles, (task + 1) * ARGMAX_TILES)):
            point(ctx, w + n * tile_bytes)
            for m in range(0, rows, block):
                lines = min(block, rows - m)
                product(ctx, lines, x + m * x_bytes, x_bytes, steps, ctx.scratch, ctx.scratch_at, TILE_COLUMNS)
                for i in range(lines):
                    fact, at = (m + i) * FACTS, state + (m + i) * LANES
                    upper[n * rows + m + i] = _bound(ctx, i, n, size, facts[fact], facts[fact + 1], bounds, at)
        for m in range(rows):
            lower[task * rows + m] = reduce_max(load(ctx.scratch, state + m * LANES))
        done += 1
        task = claim(ctx.sync, ctx.threads, phase, ctx.thread, total)
    finish(ctx.sync, ctx.threads, phase, done, total)


@kernel_part(forceinline=True)
def _bound(ctx, line, n, size, norm, error, bounds, state):  # type: ignore[no-untyped-def]
    """Return the most that any output of tile n can be in a row; take what they are at least into the row's state."""
    top = splat(-np.inf)
    least = load(ctx.scratch, state)
    for j in range(0, TILE_COLUMNS, LANES):
        v = load(ctx.scratch, ctx.scratch_at + line * TILE_COLUMNS + j)
        at = n * 2 * TILE_COLUMNS + j
        margin = fma(load(bounds, at + TILE_COLUMNS), splat(error), splat(LEAST_MARGIN))
        margin = fma(load(bounds, at), splat(norm), margin)
        # A NaN anywhere bounds nothing.
        high = where_nan(v + margin, splat(np.inf), v + margin)
        low = v - margin
        if (n + 1) * TILE_COLUMNS > size:
            high = keep_range(high, n * TILE_COLUMNS + j, 0, size, splat(-np.inf))
            low = keep_range(low, n * TILE_COLUMNS + j, 0, size, splat(-np.inf))
        top = maximum(high, top)
        least = maximum(low, least)
    store(ctx.scratch, state, least)
    return reduce_max(top)


@kernel_part
def gather_bounds(ctx, phase, tasks, rows, lower, facts):  # type: ignore[no-untyped-def]
    """Note for each row the least that its largest output can be."""
    done = 0
    task = claim(ctx.sync, ctx.threads, phase, ctx.thread, rows)
    while task >= 0:
        least = np.float32(-np.inf)
        for i in range(tasks):
            least = max(least, lower[i * rows + task])
        facts[task * FACTS + 2] = least
        done += 1
        task = claim(ctx.sync, ctx.threads, phase, ctx.thread, rows)
    finish(ctx.sync, ctx.threads, phase, done, rows)


@kernel_part
def candidates_argmax(ctx, phase, x, x_bytes, rows, w, size, steps, upper, facts, best, best_id, counts):  # type: ignore[no-untyped-def]
    """Do what `linear_argmax` does, for each row only in tiles that can hold its largest output.

    Args:
        ctx, x, x_bytes, w, steps: of the embedding itself.
        upper: float32[tiles, rows].
        facts: float32[rows, FACTS].
        best: float32[tasks, rows], written; minus infinity where a task computed nothing for a row.
        best_id: int32[tasks, rows], written.
        counts: int32[tasks], written: how many tiles were computed, each row's by themselves.
    """
    tile_bytes = bytes_of_tile(ctx, steps)
    tiles = (size + TILE_COLUMNS - 1) // TILE_COLUMNS
    total = (tiles + ARGMAX_TILES - 1) // ARGMAX_TILES
    state = ctx.scratch_at + MAX_TILE_ROWS * TILE_COLUMNS
    done = 0
    task = claim(ctx.sync, ctx.threads, phase, ctx.thread, total)
    while task >= 0:
        end = min(tiles, (task + 1) * ARGMAX_TILES)
        count = 0
        for m in range(rows):
            before = count
            for n in range(task * ARGMAX_TILES, end):
                if upper[n * rows + m] < facts[m * FACTS + 2]:
                    continue
                if count == before:
                    clear_best(ctx, state)
                point(ctx, w + n * tile_bytes)
                product(ctx, 1, x + m * x_bytes, x_bytes, steps, ctx.scratch, ctx.scratch_at, TILE_COLUMNS)
                for j in range(0, TILE_COLUMNS, LANES):
                    update_best(ctx, state, ctx.scratch_at + j, n * TILE_COLUMNS + j, size)
                count += 1
            at = task * rows + m
            if count > before:
                reduce_best(ctx, state, at, best, best_id)
            else:
                best[at] = -np.inf
                best_id[at] = size
        counts[task] = count
        done += 1
        task = claim(ctx.sync, ctx.threads, phase, ctx.thread, total)
    finish(ctx.sync, ctx.threads, phase, done, total)
