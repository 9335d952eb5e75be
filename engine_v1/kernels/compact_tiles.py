"""Tiles of bf16 weights in three quarters of their bytes, without loss: high bytes as places in a table of sixteen.

The low byte of a weight, the last bit of its exponent and its mantissa, looks random, its high byte does not: nearly
all weights of a tile have a sign and one of eight values of the exponent's other bits. So a tile names sixteen high
bytes, and each weight keeps its low byte and four bits for the high one's place. Weights are put together again in
registers, to the bit that they had, and multiplied as :mod:`engine_v1.kernels.tiles` does, in its order. The few
weights with another high byte are kept beside the tile as they are.

A tile of 32 outputs is made of lines of 64 bytes:

- sixteen high bytes, four times;
- the first group that has a record, and where that is from the tile's start (int64 each);
- for each group of four values along k, 128 weights, two lines of low bytes and a line of two places each, in the low
  half of a byte for the first line and in the high half for the second.

Within a line bytes lie as the CPU interleaves them: those of words 0..7 of one vector, 0..7 of the next, 8..15 of the
one, and so on.

A record is whole lines: which group has the next one (the number of groups, where none has) and where that is from
this one (int32 each), for each of the group's four vectors which of its 32 words are replaced (uint32 each), and those
words, ascending.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import prange, types
from numba.core import cgutils

from engine_v1.kernels.intrinsics import HAS_BF16_DOT, HAS_BYTE_PERMUTE, I8, I16, I32, I64, VF, VI, call, const
from engine_v1.kernels.jit import jit, kernel_part, warmup
from engine_v1.kernels.parallel import parallel_entry
from engine_v1.kernels.tiles import (
    LINE_BYTES,
    accumulators,
    fetch_line,
    fetch_weights,
    load_at,
    multiply_rows,
    offset_by,
    row_addresses,
    store_sums,
    tile_cases,
)

HAS_COMPACT_TILES = HAS_BF16_DOT and HAS_BYTE_PERMUTE
FEW_ROWS = 2  # up to so many, weights are read fast enough without asking for them
GROUP_VALUES = 4  # along k: two steps of a bf16 tile
HEAD_BYTES = 2 * LINE_BYTES
GROUP_BYTES = 3 * LINE_BYTES
RECORD_HEAD_BYTES = 24
RECORD_OVERHANG = LINE_BYTES  # bytes behind the last record that a vector may reach into
HIGH_BYTES = 16
# At most this share of groups may need a record; with a fifth of them nothing would be gained.
MAX_RECORDS = 1 / 8

_WORDS = LINE_BYTES // 2
_LINE = ir.VectorType(I16, _WORDS)
_BYTES = ir.VectorType(I8, LINE_BYTES)
_SAMPLE = 1 << 20
# Where words 0..31 of the first of two vectors lie in their line, and by how many bytes the second's are further.
_PLACES = np.arange(_WORDS) // 8 * 16 + np.arange(_WORDS) % 8
_NEXT = 8


def _interleave(builder: Any, low: Any, high: Any, first: int) -> Any:
    """Put words together of low and high bytes, those of the first or second vector of a line."""
    lanes = [place + first + half * LINE_BYTES for place in _PLACES.tolist() for half in (0, 1)]
    mask = ir.Constant(ir.VectorType(I32, LINE_BYTES), lanes)
    return builder.bitcast(builder.shuffle_vector(low, high, mask), _LINE)


def _for_groups(builder: Any, start: Any, steps: Any, rows: int, use: Callable[[Any, list[Any]], None]) -> None:
    """Emit `use` for every group of a tile, in order: its number, and its values as four vectors of words."""
    table = load_at(builder, start, _BYTES, 1)
    first, stop, record = (cgutils.alloca_once(builder, I64) for _ in range(3))
    builder.store(ir.Constant(I64, 0), first)
    builder.store(load_at(builder, offset_by(builder, start, LINE_BYTES), I64, 8), stop)
    nearest = builder.add(start, load_at(builder, offset_by(builder, start, LINE_BYTES + 8), I64, 8))
    builder.store(nearest, record)
    fetch_line(builder, nearest)
    stretch, exception, done = (builder.append_basic_block(name) for name in ("stretch", "exception", "done"))
    builder.branch(stretch)

    builder.position_at_end(stretch)
    end = builder.load(stop)
    with cgutils.for_range(builder, end, start=builder.load(first)) as loop:
        use(loop.index, _unpack(builder, start, table, loop.index, rows))
    builder.cbranch(builder.icmp_signed("<", end, steps), exception, done)

    builder.position_at_end(exception)
    here = builder.load(record)
    following = builder.add(here, builder.sext(load_at(builder, offset_by(builder, here, 4), I32), I64))
    fetch_line(builder, following)
    use(end, _replace(builder, _unpack(builder, start, table, end, rows), here))
    builder.store(offset_by(builder, end, 1), first)
    builder.store(builder.sext(load_at(builder, here, I32), I64), stop)
    builder.store(following, record)
    builder.branch(stretch)
    builder.position_at_end(done)


def _unpack(builder: Any, start: Any, table: Any, number: Any, rows: int) -> list[Any]:
    """Put the four vectors of a group together."""
    group = offset_by(builder, builder.add(start, builder.mul(number, ir.Constant(I64, GROUP_BYTES))), HEAD_BYTES)
    lines = [offset_by(builder, group, line * LINE_BYTES) for line in range(3)]
    for line in lines:
        fetch_weights(builder, line, rows, FEW_ROWS)
    places = load_at(builder, lines[2], _LINE, 2)
    values: list[Any] = []
    for half, line in enumerate(lines[:2]):
        # The instruction reads six bits of a byte: that the table is there four times makes up for two.
        index = builder.bitcast(builder.lshr(places, ir.Constant(_LINE, [4 * half] * _WORDS)), _BYTES)
        high = call(builder, "llvm.x86.avx512.permvar.qi.512", _BYTES, [table, index])
        low = load_at(builder, line, _BYTES, 1)
        values += [_interleave(builder, low, high, first) for first in (0, _NEXT)]
    return values


def _replace(builder: Any, values: list[Any], record: Any) -> list[Any]:
    """Replace the words of a group that its record has."""
    at = offset_by(builder, record, RECORD_HEAD_BYTES)
    replaced = []
    for number, value in enumerate(values):
        bits = load_at(builder, offset_by(builder, record, 8 + 4 * number), I32)
        mask = builder.bitcast(bits, ir.VectorType(ir.IntType(1), _WORDS))
        words = load_at(builder, at, _LINE, 2)
        replaced.append(call(builder, "llvm.x86.avx512.mask.expand.v32i16", _LINE, [words, value, mask]))
        count = builder.zext(call(builder, "llvm.ctpop.i32", I32, [bits]), I64)
        at = builder.add(at, builder.mul(count, ir.Constant(I64, 2)))
    return replaced


def _emit_compact(
    builder: Any, rows: int, vectors: int, x: Any, x_stride: Any, table: Any, table_stride: Any, ahead: Any,
    groups: Any, steps: Any, w_stride: Any, out: Any, out_stride: Any,
) -> None:  # fmt: skip
    del table_stride, ahead, groups, w_stride  # weights are one piece along k
    start = load_at(builder, table, I64, 8)
    acc = accumulators(builder, rows, vectors, VF, const(0.0))
    x_rows = row_addresses(builder, x, x_stride, rows)

    def multiply(group: Any, values: list[Any]) -> None:
        place = builder.mul(group, ir.Constant(I64, 2 * GROUP_VALUES))
        for step in range(2):
            w = [builder.bitcast(value, VI) for value in values[step * vectors : (step + 1) * vectors]]
            multiply_rows(builder, "bf16", x_rows, offset_by(builder, place, 4 * step), w, acc)

    _for_groups(builder, start, steps, rows, multiply)
    store_sums(builder, [[builder.load(slot) for slot in row] for row in acc], out, out_stride)


_cases = tile_cases(_emit_compact, wide=False)


def tile_compact(rows, vectors, x, x_stride, table, table_stride, ahead, groups, steps, w_stride, out, out_stride):  # type: ignore[no-untyped-def]
    """Compute a tile of bf16 rows and compact bf16 weights; one group only."""
    _cases(rows, vectors, x, x_stride, table, table_stride, ahead, groups, steps, w_stride, out, out_stride)


def is_compressible(weight: npt.NDArray[np.uint16]) -> bool:
    """Say whether there are tiles for it, and bf16 weights get smaller, by a sample of them.

    Args:
        weight: uint16[outputs, inputs], bf16.
    """
    if not HAS_COMPACT_TILES:
        return False
    sample = weight.reshape(-1)[:_SAMPLE]
    counts = np.sort(np.bincount((sample >> 8) & 0x7F, minlength=HIGH_BYTES // 2))
    return bool(counts[: -HIGH_BYTES // 2].sum() * GROUP_VALUES * 32 <= MAX_RECORDS * len(sample))


@kernel_part
def _compact_tile(plain, out, counts, work):  # type: ignore[no-untyped-def]
    """Write one tile in its compact form, all but where its records are; count the words that records will have."""
    num_groups = len(plain)
    histogram, places = work[:128], work[128:]
    histogram[:] = 0
    for group in range(num_groups):
        for i in range(4 * _WORDS):
            histogram[(plain[group, i] >> 8) & 0x7F] += 1
    places[:] = -1
    for place in range(HIGH_BYTES // 2):
        magnitude = 0
        for i in range(128):
            if histogram[i] > histogram[magnitude]:
                magnitude = i
        histogram[magnitude] = -1
        for sign in range(2):
            high = magnitude | sign << 7
            number = place + sign * HIGH_BYTES // 2
            places[high] = number
            for copy in range(LINE_BYTES // HIGH_BYTES):
                out[copy * HIGH_BYTES + number] = high
    for group in range(num_groups):
        at = HEAD_BYTES + group * GROUP_BYTES
        for vector in range(2):
            for word in range(_WORDS):
                place = at + _PLACES[word] + vector * _NEXT
                both = np.int64(0)
                for line in range(2):
                    value = np.int64(plain[group, (2 * line + vector) * _WORDS + word])
                    out[place + line * LINE_BYTES] = value & 0xFF
                    number = places[value >> 8]
                    counts[group] += number < 0
                    both |= max(number, 0) << (4 * line)
                out[place + 2 * LINE_BYTES] = both


@jit(parallel=True)
def _compact(plain, out, counts, work):  # type: ignore[no-untyped-def]
    """Write tiles in their compact form; `work` is int64[tiles, 384]."""
    for tile in prange(len(plain)):
        _compact_tile(plain[tile], out[tile], counts[tile], work[tile])


_COMPACT_SIGNATURE = (types.uint16[:, :, ::1], types.uint8[:, :], types.int64[:, ::1], types.int64[:, ::1])


def compact(
    plain: npt.NDArray[np.uint16], tiles: npt.NDArray[np.uint8], records_at: npt.NDArray[np.int64]
) -> npt.NDArray[np.uint8]:
    """Write tiles in their compact form and return their records, uint8[size], to be put in place.

    Behind the last record there must be RECORD_OVERHANG bytes that can be read.

    Args:
        plain: uint16[tiles, groups * 128], tiles of bf16.
        tiles: uint8[tiles, HEAD_BYTES + groups * GROUP_BYTES], written.
        records_at: int64[tiles], bytes from each tile to the place of the first record of all.
    """
    groups = plain.reshape(len(plain), -1, 4 * _WORDS)
    counts: npt.NDArray[np.int64] = np.zeros(groups.shape[:2], np.int64)
    warmup(_compact, [_COMPACT_SIGNATURE])
    with parallel_entry:
        _compact(groups, tiles, counts, np.empty((len(tiles), 128 + 256), np.int64))
    tile, number = np.nonzero(counts)
    sizes = -(-(RECORD_HEAD_BYTES + 2 * counts[tile, number]) // LINE_BYTES) * LINE_BYTES
    starts = np.cumsum(sizes) - sizes
    words = groups[tile, number]
    is_named: npt.NDArray[np.bool_] = np.zeros((len(tiles), 256), np.bool_)
    np.put_along_axis(is_named, tiles[:, :HIGH_BYTES].astype(np.int64), values=True, axis=1)
    is_replaced = ~is_named[tile[:, None], words >> 8]
    records: npt.NDArray[np.uint8] = np.zeros(int(sizes.sum()), np.uint8)
    places = (starts[:, None] + RECORD_HEAD_BYTES) // 2 + np.cumsum(is_replaced, axis=1) - 1
    records.view(np.uint16)[places[is_replaced]] = words[is_replaced]
    tile_after, number_after = np.append(tile, -1), np.append(number, groups.shape[1])
    following = np.where(tile_after[1:] == tile, number_after[1:], groups.shape[1])
    links = np.stack((following, sizes), axis=1).astype(np.int32).view(np.uint8)
    masks = np.packbits(is_replaced, axis=1, bitorder="little")
    records[starts[:, None] + np.arange(RECORD_HEAD_BYTES)] = np.concatenate((links, masks), axis=1)
    first = np.searchsorted(tile, np.arange(len(tiles)))
    first_group = np.where(tile_after[first] == np.arange(len(tiles)), number_after[first], groups.shape[1])
    head = np.stack((first_group, records_at + np.append(starts, records.size)[first]), axis=1)
    tiles[:, LINE_BYTES : LINE_BYTES + 16] = head.view(np.uint8)
    return records
