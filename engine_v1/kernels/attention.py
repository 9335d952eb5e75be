"""Paged attention for ragged rows: rotary embedding with the write to the cache, attention over the cache, merging.

Keys are processed in *groups* of 16 at absolute positions, laid out for :func:`tile`:

* keys of a group: [head_dim / 2, 16 keys, 2] in bf16, [head_dim, 16] in float32;
* values of a group: [8 pairs of keys, head_dim, 2] in bf16, [16, head_dim] in float32.

With a block size that is a multiple of 16 the cache itself has this layout; with any other it holds plain rows, from
which groups are assembled. The cache is cut into *chunks* of 64 blocks, each with its part of all layers and heads: few
requests touch few of an operating system's large pages.

Sixteen groups make a *span* of 256 keys. Softmax and weighted sum of a span start from nothing, and spans are merged in
ascending order, so that nothing depends on block size, chunks or threads. Keys that a row may not see weigh exactly
zero; as zero times infinity is NaN, values are stored finite. NaN in a row still reaches that row's result through its
own key and query.
"""

import numpy as np

from engine_v1.kernels.elementwise import LOG2_E, copy_finite, merge_span, rms_norm, softmax_span  # noqa: F401
from engine_v1.kernels.intrinsics import (
    LANES,
    WIDE_TILE_ROWS,
    address,
    copy_values,
    copy_word,
    fetch_to_write,
    load,
    splat,
    store,
)
from engine_v1.kernels.jit import jit, kernel_part
from engine_v1.kernels.linear import block_rows
from engine_v1.kernels.schedule import claim, finish
from engine_v1.kernels.tiles import tile

CHUNK_BLOCKS = 64
GROUP = 16
SPAN = 256
GROUPS = SPAN // GROUP
SPAN_LINES = WIDE_TILE_ROWS  # lines whose scores of a span are computed together
# Rows times heads of one key-value head that share each key tile in prompts.
QUERY_ROWS = 48

# Columns of the table of attention units, one unit being rows of one request times a range of spans.
UNIT_ROW, UNIT_ROWS, UNIT_POSITION, UNIT_REQUEST, UNIT_FIRST_SPAN, UNIT_LAST_SPAN, UNIT_PART = range(7)
UNIT_COLUMNS = 7
# A tile computes up to 64 scores at once: four groups, of which the last ones may lie past the span.
SCORES_STRIDE = SPAN + 3 * GROUP
# Groups by which keys and values are fetched ahead of their use: 8 kB of a head of 64 bf16 values.
GROUPS_AHEAD = 4
# Where values begin in a thread's table of addresses: behind the keys' and what is fetched or computed past them.
VALUES_AT = GROUPS + GROUPS_AHEAD + 4


@kernel_part
def count_pairs(cache):  # type: ignore[no-untyped-def]
    """Elements per k step: 2 in bf16, 1 in float32."""
    return 4 // cache.itemsize


@kernel_part
def _block_at(m, layer, block, head):  # type: ignore[no-untyped-def]
    """Where a head's part of a block starts in the cache: blocks in a row, of one chunk, are read in a row."""
    chunk, inner = block // CHUNK_BLOCKS, block % CHUNK_BLOCKS
    return (((chunk * m.layers + layer) * m.kv_heads + head) * CHUNK_BLOCKS + inner) * m.block_size * m.head_pad


@kernel_part
def _group_at(m, layer, block, head, group):  # type: ignore[no-untyped-def]
    """Where a group starts in a cache whose block size is a multiple of 16."""
    return _block_at(m, layer, block, head) + group * GROUP * m.head_pad


@kernel_part
def _place(m, layer, slot, head):  # type: ignore[no-untyped-def]
    """Where the group of a slot starts in such a cache, and the slot's lane in it."""
    offset = slot % m.block_size
    return _group_at(m, layer, slot // m.block_size, head, offset // GROUP), offset % GROUP


@kernel_part
def _row_at(m, layer, slot, head):  # type: ignore[no-untyped-def]
    """Where a key or value row starts in a cache with any other block size."""
    return _block_at(m, layer, slot // m.block_size, head) + slot % m.block_size * m.head_pad


@kernel_part
def put_key(row, row_at, size, out, at, lane):  # type: ignore[no-untyped-def]
    """Write a key row into place `lane` of the group at `at`."""
    pair = count_pairs(out)
    for step in range(size // pair):
        copy_word(row, row_at + step * pair, out, at + (step * GROUP + lane) * pair)


@kernel_part(forceinline=True)
def _value_at(at, lane, size, pair):  # type: ignore[no-untyped-def]
    """Where the pair of value rows with `lane` starts in the group at `at`."""
    return at + lane // pair * size * pair


@kernel_part
def put_value(row, row_at, size, out, at, lane):  # type: ignore[no-untyped-def]
    """Write a value row into place `lane` of the group at `at`."""
    pair = count_pairs(out)
    first = _value_at(at, lane, size, pair)
    for d in range(0, size, LANES):
        copy_values(row, row_at + d, out, first + d * pair, lane % pair)


@kernel_part
def _rotate(x, at, rope, rope_at, half):  # type: ignore[no-untyped-def]
    """Rotate pairs (i, i + half) of a head by the position's angles."""
    if half % LANES == 0:
        for i in range(0, half, LANES):
            c, s = load(rope, rope_at + i), load(rope, rope_at + half + i)
            a, b = load(x, at + i), load(x, at + half + i)
            store(x, at + i, a * c - b * s)
            store(x, at + half + i, b * c + a * s)
        return
    for i in range(half):
        c, s = rope[rope_at + i], rope[rope_at + half + i]
        a, b = x[at + i], x[at + half + i]
        x[at + i] = a * c - b * s
        x[at + half + i] = b * c + a * s


@kernel_part
def rope_and_cache(  # type: ignore[no-untyped-def]
    ctx, phase, m, layer, bias_at, q_norm_at, k_norm_at, floats, rope, positions, slots, qkv, q, keys, values
):  # fmt: skip
    """Finish each row's projections: bias, norm of queries and keys, rotary embedding; write keys and values.

    A task is one row and one key-value head with its queries, and rows follow each other: a group of keys is so written
    by one thread, but for the border between two shares. Two threads would take its lines from each other.
    """
    heads = m.heads + 2 * m.kv_heads
    pad = m.head_pad
    row_scratch = ctx.row_at
    x, at = ctx.scratch, ctx.scratch_at
    total = m.kv_heads * m.rows
    done = 0
    task = claim(ctx.sync, ctx.threads, phase, ctx.thread, total)
    while task >= 0:
        kv_head, row = task // m.rows, task % m.rows
        rope_at = np.int64(positions[row]) * 2 * m.rope_half
        _fetch_places(m, layer, slots[row], kv_head, keys, values)
        for i in range(m.group_heads + 2):  # queries, the key, the value
            head = kv_head * m.group_heads + i
            if i >= m.group_heads:
                head = m.heads + (i - m.group_heads) * m.kv_heads + kv_head
            # What another thread has written is copied: writing it takes several times as long as reading.
            for j in range(0, pad, LANES):
                v = load(qkv, (row * heads + head) * pad + j)
                if bias_at >= 0:
                    v = v + load(floats, bias_at + head * pad + j)
                store(x, at + j, v)
            if i <= m.group_heads:
                norm_at = q_norm_at if i < m.group_heads else k_norm_at
                if norm_at >= 0:
                    rms_norm(x, at, floats, norm_at, m.head_size, pad, ctx.eps, x, at)
                _rotate(x, at, rope, rope_at, m.rope_half)
            if i < m.group_heads:
                for j in range(0, pad, LANES):
                    store(q, (row * m.heads + head) * pad + j, load(x, at + j))
                continue
            is_key = i == m.group_heads
            if is_key:
                for j in range(0, pad, LANES):
                    store(ctx.act, row_scratch + j, load(x, at + j))
            else:
                copy_finite(x, at, pad, ctx.act, row_scratch)
            _write_row(ctx, m, layer, slots[row], kv_head, is_key, row_scratch, keys, values)
        done += 1
        task = claim(ctx.sync, ctx.threads, phase, ctx.thread, total)
    finish(ctx.sync, ctx.threads, phase, done, total)


@kernel_part
def _fetch_places(m, layer, slot, kv_head, keys, values):  # type: ignore[no-untyped-def]
    """Ask for the lines that a key and a value row will be written to: a key's are as many as its head is long."""
    if m.block_size % GROUP == 0:
        at, lane = _place(m, layer, slot, kv_head)
        pair = count_pairs(keys)
        for step in range(m.head_pad // pair):
            fetch_to_write(keys, at + step * GROUP * pair)
        first = _value_at(at, lane, m.head_pad, pair)
        for d in range(0, m.head_pad, LANES):
            fetch_to_write(values, first + d * pair)


@kernel_part
def _write_row(ctx, m, layer, slot, kv_head, is_key, row_at, keys, values):  # type: ignore[no-untyped-def]
    if m.block_size % GROUP == 0:
        at, lane = _place(m, layer, slot, kv_head)
        if is_key:
            put_key(ctx.act, row_at, m.head_pad, keys, at, lane)
        else:
            put_value(ctx.act, row_at, m.head_pad, values, at, lane)
        return
    out = keys if is_key else values
    at = _row_at(m, layer, slot, kv_head)
    for i in range(m.head_pad):
        out[at + i] = ctx.act[row_at + i]


@kernel_part
def _find_groups(  # type: ignore[no-untyped-def]
    ctx, m, layer, request, kv_head, span, first, last, next_request, next_head, next_span, seq_lens, block_tables,
    keys, values,
):  # fmt: skip
    """Fill the thread's table with the addresses of groups [first, last) of a span, in the order of their use.

    Keys: one address a group, then those of the first values. Values: head_pad / 16 addresses a group, then those of
    the first keys of the next span. What is read and what is fetched meanwhile are so one list. A group of either has
    one extent.
    """
    columns = m.head_pad // LANES
    packed = m.block_size % GROUP == 0
    per_block = max(1, m.block_size // GROUP)
    step = GROUP * m.head_pad
    values_at = ctx.table_at + VALUES_AT
    number = span * GROUPS + first  # of the group in its sequence
    block_index, inner = number // per_block, number % per_block
    for group in range(first, last):
        if packed:
            at = _group_at(m, layer, np.int64(block_tables[request, block_index]), kv_head, 0) + inner * step
            key_address = address(keys, at)
            value_address = address(values, at)
            inner += 1
            if inner == per_block:
                block_index, inner = block_index + 1, 0
        else:
            key_at = ctx.groups_at + group * step
            value_at = key_at + SPAN * m.head_pad
            position = span * SPAN + group * GROUP
            # Places past the last visible key keep what an earlier group left there: finite, and weighed with zero.
            for lane in range(min(GROUP, np.int64(seq_lens[request]) - position)):
                block = np.int64(block_tables[request, (position + lane) // m.block_size])
                at = _row_at(m, layer, block * m.block_size + (position + lane) % m.block_size, kv_head)
                put_key(keys, at, m.head_pad, ctx.act, key_at, lane)
                put_value(values, at, m.head_pad, ctx.act, value_at, lane)
            key_address = address(ctx.act, key_at)
            value_address = address(ctx.act, value_at)
        ctx.table[ctx.table_at + group] = key_address
        for column in range(columns):
            ctx.table[values_at + group * columns + column] = value_address + column * LANES * 4
    for i in range(GROUPS_AHEAD + 3):  # a tile computes the scores of four groups, wanted or not
        ctx.table[ctx.table_at + last + i] = ctx.table[values_at + min(first + i, last - 1) * columns]
    for i in range(GROUPS_AHEAD):
        number = next_span * GROUPS + i
        next_address = ctx.table[ctx.table_at + first]
        if packed and number * GROUP < seq_lens[next_request]:
            block = np.int64(block_tables[next_request, number // per_block])
            next_address = address(keys, _group_at(m, layer, block, next_head, number % per_block))
        for column in range(columns):
            ctx.table[values_at + (last + i) * columns + column] = next_address + column * LANES * 4


@kernel_part(forceinline=True)
def _oldest(position, window):  # type: ignore[no-untyped-def]
    """First key that the row at `position` sees."""
    return max(0, position - window + 1) if window > 0 else 0


@kernel_part(forceinline=True)
def _head_row(m, first_row, kv_head, line):  # type: ignore[no-untyped-def]
    """Index among all (row, head): lines of a unit count a group's heads first. 3 heads: line 4 is row 1, head 1."""
    return (first_row + line // m.group_heads) * m.heads + kv_head * m.group_heads + line % m.group_heads


@kernel_part
def attend(ctx, phase, m, layer, window, units, seq_lens, block_tables, q, keys, values, parts, out):  # type: ignore[no-untyped-def]
    """Attend over the cache: a task is one key-value head and one unit, and units follow each other.

    A thread so has most of what it needs from what it wrote itself, in :func:`rope_and_cache` and here.
    A unit whose UNIT_PART is negative covers all spans of its rows and writes their result; any other leaves a part per
    line and span in `parts` for :func:`merge_parts`.
    """
    total = m.units * m.kv_heads
    done = 0
    task = claim(ctx.sync, ctx.threads, phase, ctx.thread, total)
    while task >= 0:
        kv_head, unit = task // m.units, units[task % m.units]
        following = min(task + 1, total - 1)
        position = np.int64(unit[UNIT_POSITION])
        request = np.int64(unit[UNIT_REQUEST])
        lines = np.int64(unit[UNIT_ROWS]) * m.group_heads
        for line in range(lines):
            at = _head_row(m, unit[UNIT_ROW], kv_head, line) * m.head_pad
            for i in range(0, m.head_pad, LANES):
                store(ctx.act, ctx.query_at + line * m.head_pad + i, load(q, at + i))
                store(ctx.scratch, ctx.acc_at + line * m.head_pad + i, splat(0.0))
            ctx.scratch[ctx.stats_at + 2 * line] = -np.inf
            ctx.scratch[ctx.stats_at + 2 * line + 1] = 0.0
        oldest = _oldest(position, window)
        last = position + np.int64(unit[UNIT_ROWS]) - 1
        part = np.int64(unit[UNIT_PART])
        if part >= 0:
            part += kv_head * lines * (last // SPAN + 1)
        for span in range(max(np.int64(unit[UNIT_FIRST_SPAN]), oldest // SPAN), np.int64(unit[UNIT_LAST_SPAN])):
            next_request, next_head, next_span = request, kv_head, span + 1
            if next_span == np.int64(unit[UNIT_LAST_SPAN]):
                next_head, next_unit = following // m.units, units[following % m.units]
                next_request, next_span = np.int64(next_unit[UNIT_REQUEST]), np.int64(next_unit[UNIT_FIRST_SPAN])
            _find_groups(
                ctx, m, layer, request, kv_head, span, max(0, oldest - span * SPAN) // GROUP,
                min(GROUPS, (last - span * SPAN) // GROUP + 1), next_request, next_head, next_span, seq_lens,
                block_tables, keys, values,
            )  # fmt: skip
            _attend_span(ctx, m, window, span, position, lines, part, last // SPAN + 1, q, parts)
        if part < 0:
            for line in range(lines):
                at = _head_row(m, unit[UNIT_ROW], kv_head, line) * m.head_pad
                _finish_line(ctx, m, line, out, at)
        done += 1
        task = claim(ctx.sync, ctx.threads, phase, ctx.thread, total)
    finish(ctx.sync, ctx.threads, phase, done, total)


@kernel_part
def _attend_span(ctx, m, window, span, position, lines, part, spans, q, parts):  # type: ignore[no-untyped-def]
    """Scores, softmax and weighted sum of one span for all lines, at most SPAN_LINES at a time."""
    pair = count_pairs(q)
    start = span * SPAN
    block = block_rows(lines, SPAN_LINES)
    for line in range(0, lines, block):
        count = min(block, lines - line)
        oldest = _oldest(position + line // m.group_heads, window)
        last = position + (line + count - 1) // m.group_heads
        low = max(0, oldest - start) // GROUP
        high = min(GROUPS, (last - start) // GROUP + 1)
        if high <= low:
            continue
        for group in range(low, high, 4):
            tile(
                ctx.tile, count, 4, address(ctx.act, ctx.query_at + line * m.head_pad), m.head_pad * q.itemsize,
                address(ctx.table, ctx.table_at + group), 0, GROUPS_AHEAD * 8, 1, m.head_pad // pair, GROUP * 4,
                address(ctx.scratch, ctx.scores_at + group * GROUP), SCORES_STRIDE * 4,
            )  # fmt: skip
        for i in range(count):
            row = position + (line + i) // m.group_heads
            top, total = softmax_span(
                ctx.scratch, ctx.scores_at + i * SCORES_STRIDE, ctx.act, ctx.weights_at + i * SPAN, low * GROUP,
                high * GROUP, _oldest(row, window) - start, row + 1 - start, m.score_factor,
            )  # fmt: skip
            ctx.scratch[ctx.sums_at + i * (m.head_pad + LANES) + m.head_pad] = top
            ctx.scratch[ctx.sums_at + i * (m.head_pad + LANES) + m.head_pad + 1] = total
        columns = m.head_pad // LANES
        values_at = ctx.table_at + VALUES_AT
        column = 0
        while column < columns:
            vectors = 4 if columns - column >= 4 else 2
            tile(
                ctx.tile, count, vectors, address(ctx.act, ctx.weights_at + low * GROUP), SPAN * q.itemsize,
                address(ctx.table, values_at + low * columns + column), columns * 8, GROUPS_AHEAD * columns * 8,
                high - low, GROUP // pair, m.head_pad * 4, address(ctx.scratch, ctx.sums_at + column * LANES),
                (m.head_pad + LANES) * 4,
            )  # fmt: skip
            column += vectors
        for i in range(count):
            row = position + (line + i) // m.group_heads
            if row < start or _oldest(row, window) >= start + SPAN:
                continue
            sums = ctx.sums_at + i * (m.head_pad + LANES)
            if part < 0:
                _merge_line(ctx, m, line + i, ctx.scratch, sums)
            else:
                at = (part + (line + i) * spans + span) * (m.head_pad + LANES)
                for j in range(0, m.head_pad + LANES, LANES):
                    store(parts, at + j, load(ctx.scratch, sums + j))


@kernel_part(forceinline=True)
def _merge_line(ctx, m, line, part, at):  # type: ignore[no-untyped-def]
    merge_span(
        ctx.scratch, ctx.acc_at + line * m.head_pad, ctx.stats_at + 2 * line, part, at, part[at + m.head_pad],
        part[at + m.head_pad + 1], m.head_pad, m.score_factor,
    )  # fmt: skip


@kernel_part
def _finish_line(ctx, m, line, out, at):  # type: ignore[no-untyped-def]
    total = splat(ctx.scratch[ctx.stats_at + 2 * line + 1])
    for i in range(0, m.head_pad, LANES):
        store(out, at + i, load(ctx.scratch, ctx.acc_at + line * m.head_pad + i) / total)


@kernel_part
def merge_parts(ctx, phase, m, window, merges, parts, out):  # type: ignore[no-untyped-def]
    """Merge what several threads computed of the same lines, spans ascending."""
    total = m.merges * m.kv_heads
    done = 0
    task = claim(ctx.sync, ctx.threads, phase, ctx.thread, total)
    while task >= 0:
        kv_head, block = task // m.merges, merges[task % m.merges]
        position = np.int64(block[UNIT_POSITION])
        lines = np.int64(block[UNIT_ROWS]) * m.group_heads
        spans = (position + np.int64(block[UNIT_ROWS]) - 1) // SPAN + 1
        for line in range(lines):
            for i in range(0, m.head_pad, LANES):
                store(ctx.scratch, ctx.acc_at + i, splat(0.0))
            ctx.scratch[ctx.stats_at] = -np.inf
            ctx.scratch[ctx.stats_at + 1] = 0.0
            row = position + line // m.group_heads
            for span in range(_oldest(row, window) // SPAN, row // SPAN + 1):
                at = block[UNIT_PART] + (kv_head * lines + line) * spans + span
                _merge_line(ctx, m, 0, parts, at * (m.head_pad + LANES))
            _finish_line(ctx, m, 0, out, _head_row(m, block[UNIT_ROW], kv_head, line) * m.head_pad)
        done += 1
        task = claim(ctx.sync, ctx.threads, phase, ctx.thread, total)
    finish(ctx.sync, ctx.threads, phase, done, total)


@jit
def plan_units(query_start, seq_lens, block_rows, kv_heads, group_heads, threads, max_parts, units, merges):  # type: ignore[no-untyped-def]
    """Cut a step's rows into attention units; return (number of units, number of merges).

    A block of up to `block_rows` rows of one request is one unit, unless it is small and its context long: then it
    becomes several units of some spans each, so that all threads work on it, and one merge. Results are the same.

    Args:
        query_start: int32[num_reqs + 1].
        seq_lens: int32[num_reqs].
        block_rows: rows per unit.
        kv_heads: key-value heads, each a task.
        group_heads: query heads per key-value head.
        threads: number of threads.
        max_parts: lines times spans that the buffer of parts holds.
        units: int32[max_units, 7], written.
        merges: int32[max_rows, 7], written.
    """
    work = 0
    for i in range(seq_lens.shape[0]):
        rows = query_start[i + 1] - query_start[i]
        work += (rows + block_rows - 1) // block_rows * ((seq_lens[i] - 1) // SPAN + 1)
    # About eight tasks per thread, at least one span each.
    piece = max(1, work * kv_heads // (8 * threads))
    num_units = 0
    num_merges = 0
    parts = 0
    for i in range(seq_lens.shape[0]):
        rows = np.int64(query_start[i + 1] - query_start[i])
        for first in range(0, rows, block_rows):
            count = min(block_rows, rows - first)
            position = seq_lens[i] - rows + first
            spans = (position + count - 1) // SPAN + 1
            needed = count * group_heads * kv_heads * spans
            split = spans > piece and parts + needed <= max_parts and num_units + spans < units.shape[0] - rows
            step = piece if split else spans
            if split:
                merges[num_merges, UNIT_ROW] = query_start[i] + first
                merges[num_merges, UNIT_ROWS] = count
                merges[num_merges, UNIT_POSITION] = position
                merges[num_merges, UNIT_PART] = parts
                num_merges += 1
            for span in range(0, spans, step):
                units[num_units, UNIT_ROW] = query_start[i] + first
                units[num_units, UNIT_ROWS] = count
                units[num_units, UNIT_POSITION] = position
                units[num_units, UNIT_REQUEST] = i
                units[num_units, UNIT_FIRST_SPAN] = span
                units[num_units, UNIT_LAST_SPAN] = min(spans, span + step)
                units[num_units, UNIT_PART] = parts if split else -1
                num_units += 1
            if split:
                parts += needed
    return num_units, num_merges
