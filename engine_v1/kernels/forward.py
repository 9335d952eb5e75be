"""One step through all decoder layers as a single parallel region."""

from collections import namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import types

from engine_v1.kernels.attention import (
    GROUPS,
    GROUPS_AHEAD,
    SCORES_STRIDE,
    SPAN,
    SPAN_LINES,
    UNIT_COLUMNS,
    VALUES_AT,
    attend,
    merge_parts,
    plan_units,
    rope_and_cache,
)
from engine_v1.kernels.elementwise import rms_norm
from engine_v1.kernels.formats import FORMAT_FIELDS
from engine_v1.kernels.intrinsics import (
    LANES,
    bf16_view,
    float_view,
    int32_matrix,
    int32_view,
    int64_matrix,
    int64_view,
    load,
    store,
)
from engine_v1.kernels.jit import jit, kernel_part, native_function
from engine_v1.kernels.linear import linear_add, linear_silu_mul, linear_store
from engine_v1.kernels.quantize import byte_row_size, operands, quantize_row, quantize_rows
from engine_v1.kernels.schedule import claim, finish

PHASES_PER_LAYER = 11

# Columns of the table of layers: where each weight starts, -1 where the model has none; the sliding window, or 0.
(
    QKV, O_PROJ, GATE_UP, DOWN, INPUT_NORM, POST_NORM, QKV_BIAS, O_BIAS, GATE_UP_BIAS, DOWN_BIAS, Q_NORM, K_NORM,
    WINDOW,
) = range(13)  # fmt: skip
LAYER_COLUMNS = 13

# Sizes of one step, in this order in the array `sizes`.
SIZE_FIELDS = (
    "rows", "units", "merges", "layers", "hidden_size", "hidden_pad", "inter_pad", "heads", "kv_heads", "group_heads",
    "head_size", "head_pad", "rope_half", "block_size", "final_norm_at", "scratch_size", "act_size",
    "table_size", "max_lines", "tile", *FORMAT_FIELDS,
)  # fmt: skip
Sizes = namedtuple("Sizes", (*SIZE_FIELDS, "score_factor"))  # noqa: PYI024  (Numba's named tuples are untyped)
_ROWS, _UNITS, _MERGES, _KV_HEADS, _GROUP_HEADS = map(
    SIZE_FIELDS.index, ("rows", "units", "merges", "kv_heads", "group_heads")
)
# Addresses that a step's kernel gets, in this order.
(
    SIZES, SCALARS, SYNC, LAYERS, WEIGHTS, FLOATS, EMBED, ROPE, IDS, POSITIONS, SLOTS, UNITS, MERGES, SEQ_LENS,
    BLOCK_TABLES, BLOCK_TABLE_COLUMNS, KEYS, VALUES, RESIDUAL, NORMED, QKV_ROWS, Q_ROWS, ATTENDED, MLP, PARTS, SCRATCH,
    OPERANDS, TABLE, HIDDEN, BYTE_ROWS,
) = range(30)  # fmt: skip
NUM_ADDRESSES = 30
# What a phase needs to take part in it: counters, and the thread's places in the scratch arrays.
Context = namedtuple(  # noqa: PYI024
    "Context",
    (
        "tile", "sync", "threads", "thread", "eps", "table", "table_at", "scratch", "scratch_at", "scores_at",
        "sums_at", "acc_at", "stats_at", "act", "row_at", "query_at", "weights_at", "groups_at", "linear_tile",
        "step_bytes", "tail_bytes",
    ),
)  # fmt: skip


@kernel_part
def embed_rows(ctx, phase, m, ids, table, out):  # type: ignore[no-untyped-def]
    """out[i] = table[ids[i]], widened to float32."""
    done = 0
    task = claim(ctx.sync, ctx.threads, phase, ctx.thread, m.rows)
    while task >= 0:
        source = np.int64(ids[task]) * m.hidden_size
        full = m.hidden_size // LANES * LANES
        for i in range(0, full, LANES):
            store(out, task * m.hidden_pad + i, load(table, source + i))
        # The row's end is copied through the thread's scratch: a vector load could reach past the table.
        for i in range(full, m.hidden_size):
            ctx.act[ctx.row_at + i - full] = table[source + i]
        for i in range(m.hidden_size - full, m.hidden_pad - full):
            ctx.act[ctx.row_at + i] = 0
        for i in range(full, m.hidden_pad, LANES):
            store(out, task * m.hidden_pad + i, load(ctx.act, ctx.row_at + i - full))
        done += 1
        task = claim(ctx.sync, ctx.threads, phase, ctx.thread, m.rows)
    finish(ctx.sync, ctx.threads, phase, done, m.rows)


@kernel_part
def norm_rows(ctx, phase, m, x, floats, weight_at, out, byte_rows):  # type: ignore[no-untyped-def]
    """RMSNorm of every row of the residual stream; quantised too where a product follows that wants it."""
    done = 0
    task = claim(ctx.sync, ctx.threads, phase, ctx.thread, m.rows)
    while task >= 0:
        at = task * m.hidden_pad
        rms_norm(x, at, floats, weight_at, m.hidden_size, m.hidden_pad, ctx.eps, out, at)
        if byte_rows != 0:
            quantize_row(out, at, m.hidden_pad, byte_rows + task * byte_row_size(m.hidden_pad))
        done += 1
        task = claim(ctx.sync, ctx.threads, phase, ctx.thread, m.rows)
    finish(ctx.sync, ctx.threads, phase, done, m.rows)


@kernel_part(forceinline=True)
def make_context(thread, threads, a, m, act):  # type: ignore[no-untyped-def]
    """Places of one thread in the scratch arrays; :func:`scratch_sizes` gives their extent."""
    sync = int64_view(a[SYNC], 1)
    table = int64_view(a[TABLE], 1)
    scratch = float_view(a[SCRATCH], 1)
    eps = float_view(a[SCALARS], 1)[0]
    scratch_at = thread * m.scratch_size
    scores_at = scratch_at
    sums_at = scores_at + SPAN_LINES * SCORES_STRIDE
    acc_at = sums_at + SPAN_LINES * (m.head_pad + LANES)
    stats_at = acc_at + m.max_lines * m.head_pad
    row_at = thread * m.act_size
    query_at = row_at + max(m.head_pad, 64)
    weights_at = query_at + m.max_lines * m.head_pad
    groups_at = weights_at + SPAN_LINES * SPAN
    return Context(
        m.tile, sync, threads, thread, eps, table, thread * m.table_size, scratch, scratch_at, scores_at, sums_at,
        acc_at, stats_at, act, row_at, query_at, weights_at, groups_at, m.linear_tile, m.step_bytes, m.tail_bytes,
    )  # fmt: skip


def scratch_sizes(head_pad: int, max_lines: int) -> tuple[int, int, int]:
    """Return a thread's extent in float scratch, operand scratch and address table, in elements."""
    floats = SPAN_LINES * SCORES_STRIDE + SPAN_LINES * (head_pad + LANES) + max_lines * (head_pad + 2) + 64
    act = max(head_pad, 64) + max_lines * head_pad + SPAN_LINES * SPAN + 2 * SPAN * head_pad + 64
    table = VALUES_AT + (GROUPS + GROUPS_AHEAD) * (head_pad // 16)
    return floats, act, table


@kernel_part
def unpack_sizes(sizes, scalars):  # type: ignore[no-untyped-def]
    """The arrays of numbers as named ones."""
    return Sizes(
        sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], sizes[6], sizes[7], sizes[8], sizes[9], sizes[10],
        sizes[11], sizes[12], sizes[13], sizes[14], sizes[15], sizes[16], sizes[17], sizes[18], sizes[19], sizes[20],
        sizes[21], sizes[22], sizes[23], sizes[24], scalars[1],
    )  # fmt: skip


@kernel_part
def decode_layers(ctx, m, a, act):  # type: ignore[no-untyped-def]
    """One thread's part of a step: every phase of every layer, in order.

    Args:
        ctx: Context.
        m: Sizes.
        a: int64[NUM_ADDRESSES].
        act: makes an array of the operands' dtype from an address.
    """
    layers = int64_matrix(a[LAYERS], LAYER_COLUMNS)
    floats, rope, weights = float_view(a[FLOATS], 1), float_view(a[ROPE], 1), a[WEIGHTS]
    ids, positions, seq_lens = int32_view(a[IDS], 1), int32_view(a[POSITIONS], 1), int32_view(a[SEQ_LENS], 1)
    slots = int64_view(a[SLOTS], m.rows)
    units = int32_matrix(a[UNITS], UNIT_COLUMNS)
    merges = int32_matrix(a[MERGES], UNIT_COLUMNS)
    block_tables = int32_matrix(a[BLOCK_TABLES], a[BLOCK_TABLE_COLUMNS])
    keys, values, q, mlp = act(a[KEYS], 1), act(a[VALUES], 1), act(a[Q_ROWS], 1), act(a[MLP], 1)
    normed, attended = act(a[NORMED], 1), act(a[ATTENDED], 1)
    residual, qkv, parts = float_view(a[RESIDUAL], 1), float_view(a[QKV_ROWS], 1), float_view(a[PARTS], 1)
    heads_pad = m.heads * m.head_pad
    qkv_pad = (m.heads + 2 * m.kv_heads) * m.head_pad
    byte_rows = a[BYTE_ROWS] if m.quantized else 0
    x_normed, normed_bytes, normed_steps = operands(m, normed, m.hidden_size, byte_rows)
    x_attended, attended_bytes, attended_steps = operands(m, attended, heads_pad, byte_rows)
    x_mlp, mlp_bytes, mlp_steps = operands(m, mlp, m.inter_pad, byte_rows)
    embed_rows(ctx, 0, m, ids, act(a[EMBED], 1), residual)
    phase = 1
    for layer in range(m.layers):
        w = layers[layer]
        norm_rows(ctx, phase, m, residual, floats, w[INPUT_NORM], normed, byte_rows)
        linear_store(
            ctx, phase + 1, x_normed, normed_bytes, m.rows, weights + w[QKV], qkv_pad // 32, normed_steps, qkv, qkv_pad
        )
        rope_and_cache(
            ctx, phase + 2, m, layer, w[QKV_BIAS], w[Q_NORM], w[K_NORM], floats, rope, positions, slots, qkv, q,
            keys, values,
        )  # fmt: skip
        attend(ctx, phase + 3, m, layer, w[WINDOW], units, seq_lens, block_tables, q, keys, values, parts, attended)
        if m.merges > 0:
            merge_parts(ctx, phase + 4, m, w[WINDOW], merges, parts, attended)
        if m.quantized:
            quantize_rows(ctx, phase + 5, m.rows, heads_pad, attended, byte_rows)
        linear_add(
            ctx, phase + 6, x_attended, attended_bytes, m.rows, weights + w[O_PROJ], m.hidden_pad // 32,
            attended_steps, floats, w[O_BIAS], residual, m.hidden_pad,
        )  # fmt: skip
        norm_rows(ctx, phase + 7, m, residual, floats, w[POST_NORM], normed, byte_rows)
        linear_silu_mul(
            ctx, phase + 8, x_normed, normed_bytes, m.rows, weights + w[GATE_UP], m.inter_pad // 32, normed_steps,
            floats, w[GATE_UP_BIAS], mlp, m.inter_pad,
        )  # fmt: skip
        if m.quantized:
            quantize_rows(ctx, phase + 9, m.rows, m.inter_pad, mlp, byte_rows)
        linear_add(
            ctx, phase + 10, x_mlp, mlp_bytes, m.rows, weights + w[DOWN], m.hidden_pad // 32, mlp_steps, floats,
            w[DOWN_BIAS], residual, m.hidden_pad,
        )  # fmt: skip
        phase += PHASES_PER_LAYER
    norm_rows(ctx, phase, m, residual, floats, m.final_norm_at, act(a[HIDDEN], 1), 0)


def forward_bf16(thread, threads, arguments):  # type: ignore[no-untyped-def]
    """:func:`decode_layers` with bf16 operands."""
    a = int64_view(arguments, NUM_ADDRESSES)
    m = unpack_sizes(int64_view(a[SIZES], 1), float_view(a[SCALARS], 1))
    ctx = make_context(thread, threads, a, m, bf16_view(a[OPERANDS], 1))
    decode_layers(ctx, m, a, bf16_view)


def forward_f32(thread, threads, arguments):  # type: ignore[no-untyped-def]
    """:func:`decode_layers` with float32 operands."""
    a = int64_view(arguments, NUM_ADDRESSES)
    m = unpack_sizes(int64_view(a[SIZES], 1), float_view(a[SCALARS], 1))
    ctx = make_context(thread, threads, a, m, float_view(a[OPERANDS], 1))
    decode_layers(ctx, m, a, float_view)


def forward_address(act: Any, *, progress: Callable[[str], None] | None = None) -> int:
    """Return the address of a step's kernel, for :func:`engine_v1.kernels.parallel.run_parallel`."""
    entry = forward_bf16 if act == np.uint16 else forward_f32
    return native_function(entry, types.void(types.int64, types.int64, types.int64), progress=progress)


@jit
def begin_step(  # type: ignore[no-untyped-def]
    input_ids, positions, query_start, seq_lens, block_tables, slots, max_model_len, block_rows, threads, max_parts,
    ids_32, positions_32, units, merges, sync, sizes, addresses,
):  # fmt: skip
    """Write down what a step is, for its kernel; return its longest sequence, and do nothing where that is too long."""
    longest = np.int64(0)
    for seq_len in seq_lens:
        longest = max(longest, np.int64(seq_len))
    if longest > max_model_len:
        return longest
    for i in range(len(input_ids)):
        ids_32[i] = input_ids[i]
        positions_32[i] = positions[i]
    sizes[_ROWS] = len(input_ids)
    sizes[_UNITS], sizes[_MERGES] = plan_units(
        query_start, seq_lens, block_rows, sizes[_KV_HEADS], sizes[_GROUP_HEADS], threads, max_parts, units, merges
    )
    addresses[SLOTS] = slots.ctypes.data
    addresses[SEQ_LENS] = seq_lens.ctypes.data
    addresses[BLOCK_TABLES] = block_tables.ctypes.data
    addresses[BLOCK_TABLE_COLUMNS] = block_tables.shape[1]
    sync[:] = 0
    return longest


_INTS, _TABLE, _LONGS = types.int32[::1], types.int32[:, ::1], types.int64[::1]
BEGIN_STEP_SIGNATURE = (
    _LONGS, _LONGS, _INTS, _INTS, _TABLE, _LONGS, *([types.int64] * 4), _INTS, _INTS, _TABLE, _TABLE, _LONGS, _LONGS,
    _LONGS,
)  # fmt: skip
