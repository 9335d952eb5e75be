"""Tiles of bf16 weights in three quarters of their bytes, without loss: exponents as places in a table of sixteen.

The sign and the mantissa of a weight look random, its exponent does not: nearly all weights of a tile have one of
sixteen exponents. So a tile names sixteen, and each weight keeps sign and mantissa in a byte and the place of its
exponent in four bits. Weights are put together again in registers, to the bit that they had, and multiplied as
:mod:`engine_v1.kernels.tiles` does, in its order. The few weights with another exponent are kept beside the tile as
they are, with the others of their group.

A tile of 32 outputs is made of lines of 64 bytes:

- sixteen exponents, shifted to where bf16 has them, and the same once more;
- the first group that has a record, and where that is from the tile's start (int64 each);
- for each group of four values along k, two lines of words that hold a byte of one value and a byte of another, and a
  line of words with four codes each.

A record: which group has the next one (the number of groups, where none has), and in four more lines its group as bf16.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import prange, types
from numba.core import cgutils

from engine_v1.kernels.intrinsics import HAS_BF16_DOT, I16, I64, VF, VI, call, const
from engine_v1.kernels.jit import jit, warmup
from engine_v1.kernels.parallel import parallel_entry
from engine_v1.kernels.tiles import (
    LINE_BYTES,
    accumulators,
    load_at,
    multiply_rows,
    offset_by,
    prefetch,
    row_addresses,
    store_sums,
    tile_cases,
)

GROUP_VALUES = 4  # along k: two steps of a bf16 tile
HEAD_BYTES = 2 * LINE_BYTES
GROUP_BYTES = 3 * LINE_BYTES
RECORD_BYTES = 5 * LINE_BYTES
EXPONENTS = 16
# At most this share of groups may need a record; with a fifth of them nothing would be gained.
MAX_RECORDS = 1 / 8

_WORDS = LINE_BYTES // 2
_LINE = ir.VectorType(I16, _WORDS)
_SIGN_AND_MANTISSA = 0x807F
_SAMPLE = 1 << 20


def _words(value: int) -> Any:
    return ir.Constant(_LINE, [value] * _WORDS)


def _for_groups(builder: Any, start: Any, fetch: Any, steps: Any, use: Callable[[Any, list[Any]], None]) -> None:
    """Emit `use` for every group of a tile, in order: its number, and its values as four vectors of words."""
    exponents = load_at(builder, start, _LINE, 2)
    first, stop, record = (cgutils.alloca_once(builder, I64) for _ in range(3))
    builder.store(ir.Constant(I64, 0), first)
    builder.store(load_at(builder, offset_by(builder, start, LINE_BYTES), I64, 8), stop)
    builder.store(builder.add(start, load_at(builder, offset_by(builder, start, LINE_BYTES + 8), I64, 8)), record)
    stretch, exception, done = (builder.append_basic_block(name) for name in ("stretch", "exception", "done"))
    builder.branch(stretch)

    builder.position_at_end(stretch)
    end = builder.load(stop)
    with cgutils.for_range(builder, end, start=builder.load(first)) as loop:
        place = offset_by(builder, builder.mul(loop.index, ir.Constant(I64, GROUP_BYTES)), HEAD_BYTES)
        for line in range(3):
            prefetch(builder, offset_by(builder, builder.add(fetch, place), line * LINE_BYTES))
        group = builder.add(start, place)
        codes = load_at(builder, offset_by(builder, group, 2 * LINE_BYTES), _LINE, 2)
        values: list[Any] = []
        for line in range(2):
            both = load_at(builder, offset_by(builder, group, line * LINE_BYTES), _LINE, 2)
            for half in (both, call(builder, "llvm.bswap.v32i16", _LINE, [both])):
                # The instruction reads five bits of a word: that the table is there twice makes up for the fifth.
                code = builder.lshr(codes, _words(4 * len(values)))
                exponent = call(builder, "llvm.x86.avx512.permvar.hi.512", _LINE, [exponents, code])
                values.append(builder.or_(builder.and_(half, _words(_SIGN_AND_MANTISSA)), exponent))
        use(loop.index, values)
    builder.cbranch(builder.icmp_signed("<", end, steps), exception, done)

    builder.position_at_end(exception)
    here = builder.load(record)
    use(end, [load_at(builder, offset_by(builder, here, LINE_BYTES * (1 + i)), _LINE, 2) for i in range(4)])
    builder.store(offset_by(builder, end, 1), first)
    builder.store(load_at(builder, here, I64, 8), stop)
    builder.store(offset_by(builder, here, RECORD_BYTES), record)
    builder.branch(stretch)
    builder.position_at_end(done)


def _emit_compact(
    builder: Any, rows: int, vectors: int, x: Any, x_stride: Any, table: Any, table_stride: Any, ahead: Any,
    groups: Any, steps: Any, w_stride: Any, out: Any, out_stride: Any,
) -> None:  # fmt: skip
    del table_stride, groups, w_stride  # weights are one piece along k
    start = load_at(builder, table, I64, 8)
    fetch = load_at(builder, builder.add(table, ahead), I64, 8)
    acc = accumulators(builder, rows, vectors, VF, const(0.0))
    x_rows = row_addresses(builder, x, x_stride, rows)

    def multiply(group: Any, values: list[Any]) -> None:
        place = builder.mul(group, ir.Constant(I64, 2 * GROUP_VALUES))
        for step in range(2):
            w = [builder.bitcast(value, VI) for value in values[step * vectors : (step + 1) * vectors]]
            multiply_rows(builder, "bf16", x_rows, offset_by(builder, place, 4 * step), w, acc)

    _for_groups(builder, start, fetch, steps, multiply)
    store_sums(builder, [[builder.load(slot) for slot in row] for row in acc], out, out_stride)


_cases = tile_cases(_emit_compact, wide=False)


def tile_compact(rows, vectors, x, x_stride, table, table_stride, ahead, groups, steps, w_stride, out, out_stride):  # type: ignore[no-untyped-def]
    """Compute a tile of bf16 rows and compact bf16 weights; one group only."""
    _cases(rows, vectors, x, x_stride, table, table_stride, ahead, groups, steps, w_stride, out, out_stride)


def is_compressible(weight: npt.NDArray[np.uint16]) -> bool:
    """Say whether bf16 weights get smaller, by a sample of them; only with AVX512-BF16 are there tiles for it.

    Args:
        weight: uint16[outputs, inputs], bf16.
    """
    if not HAS_BF16_DOT:
        return False
    sample = weight.reshape(-1)[:_SAMPLE]
    counts = np.sort(np.bincount((sample >> 7) & 0xFF, minlength=EXPONENTS))
    return bool(counts[:-EXPONENTS].sum() * GROUP_VALUES * 32 <= MAX_RECORDS * len(sample))


@jit(parallel=True)
def _compact(plain, out, has_record):  # type: ignore[no-untyped-def]
    """Write tiles in their compact form, all but where their records are."""
    num_tiles, num_groups, _ = plain.shape
    for tile in prange(num_tiles):
        counts = np.zeros(256, np.int64)
        for group in range(num_groups):
            for i in range(4 * _WORDS):
                counts[(plain[tile, group, i] >> 7) & 0xFF] += 1
        codes = np.full(256, -1, np.int64)
        for place in range(EXPONENTS):
            exponent = np.argmax(counts)
            counts[exponent] = -1
            codes[exponent] = place
            out[tile, place] = exponent << 7
            out[tile, place + EXPONENTS] = exponent << 7
        for group in range(num_groups):
            at = (HEAD_BYTES + group * GROUP_BYTES) // 2
            lowest = np.int64(0)
            for word in range(_WORDS):
                word_codes = np.int64(0)
                for line in range(2):
                    first = np.int64(plain[tile, group, 2 * line * _WORDS + word])
                    second = np.int64(plain[tile, group, (2 * line + 1) * _WORDS + word])
                    # The second is read with the word's bytes the other way round.
                    swapped = (second & 0x7F) << 8 | (second & 0x8000) >> 8
                    out[tile, at + line * _WORDS + word] = (first & _SIGN_AND_MANTISSA) | swapped
                    first_code, second_code = codes[(first >> 7) & 0xFF], codes[(second >> 7) & 0xFF]
                    lowest = min(lowest, first_code, second_code)
                    word_codes |= (max(first_code, 0) | max(second_code, 0) << 4) << (8 * line)
                out[tile, at + 2 * _WORDS + word] = word_codes
            has_record[tile, group] = lowest < 0


_COMPACT_SIGNATURE = (types.uint16[:, :, ::1], types.uint16[:, :], types.boolean[:, ::1])


def compact(
    plain: npt.NDArray[np.uint16], tiles: npt.NDArray[np.uint8], records_at: npt.NDArray[np.int64]
) -> npt.NDArray[np.uint8]:
    """Write tiles in their compact form and return their records, uint8[records, RECORD_BYTES], to be put in place.

    Args:
        plain: uint16[tiles, groups * 128], tiles of bf16.
        tiles: uint8[tiles, HEAD_BYTES + groups * GROUP_BYTES], written.
        records_at: int64[tiles], bytes from each tile to the place of the first record of all.
    """
    groups = plain.reshape(len(plain), -1, 4 * _WORDS)
    num_tiles, num_groups, _ = groups.shape
    has_record: npt.NDArray[np.bool_] = np.zeros((num_tiles, num_groups), np.bool_)
    words = tiles.view(np.uint16)
    warmup(_compact, [_COMPACT_SIGNATURE])
    with parallel_entry:
        _compact(groups, words, has_record)
    tile, number = np.nonzero(has_record)
    tile_after, number_after = np.append(tile, -1), np.append(number, num_groups)
    records: npt.NDArray[np.uint8] = np.zeros((len(tile), RECORD_BYTES), np.uint8)
    following = np.where(tile_after[1:] == tile, number_after[1:], num_groups)
    records[:, :8] = following.reshape(-1, 1).view(np.uint8)
    records[:, LINE_BYTES:] = groups[tile, number].view(np.uint8)
    first = np.searchsorted(tile, np.arange(num_tiles))
    first_group = np.where(tile_after[first] == np.arange(num_tiles), number_after[first], num_groups)
    head = np.stack((first_group, records_at + first * RECORD_BYTES), axis=1)
    words[:, _WORDS : _WORDS + 8] = head.view(np.uint16)
    return records
