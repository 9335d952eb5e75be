"""The product with the vocabulary: hidden states to logits or arg-max tokens, in a single parallel region."""

from collections import namedtuple
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from numba import types

from engine_v1.kernels import parallel
from engine_v1.kernels.formats import FORMAT_FIELDS, SCREEN_FORMAT, padded
from engine_v1.kernels.intrinsics import (
    LANES,
    MAX_TILE_ROWS,
    TILE_COLUMNS,
    bf16_view,
    float_view,
    int32_view,
    int64_view,
)
from engine_v1.kernels.jit import jit, kernel_part, native_function, warmup
from engine_v1.kernels.linear import ARGMAX_TILES, linear_argmax, linear_store
from engine_v1.kernels.parallel import run_parallel
from engine_v1.kernels.quantize import byte_row_size, operands, quantize_rows
from engine_v1.kernels.schedule import LINE, sync_size
from engine_v1.kernels.screening import FACTS, candidates_argmax, gather_bounds, measure_rows, screen

if TYPE_CHECKING:  # who only compiles kernels needs no torch
    from engine_v1.kernels.packed_weights import PackedWeights

_PHASES = 4
# Screening leaves each row tiles that are computed one by one. Where they are more than this share of all tiles, and so
# much more per row of the step, it is quicker to compute all at once; after so many steps it is tried again.
_MAX_CANDIDATES, _MAX_CANDIDATES_PER_ROW = 0.2, 1 / 80
_UNSCREENED_STEPS = 50

# What the kernel gets: numbers, addresses, and where the output embedding and its copy are, each with its format.
(
    _TASK, _ROWS, _HIDDEN_SIZE, _HIDDEN_PAD, _VOCAB_SIZE, _SCRATCH_SIZE, _SYNC, _SCRATCH, _TABLE, _HIDDEN, _BYTE_ROWS,
    _LOGITS, _BEST, _BEST_ID, _BOUNDS, _UPPER, _LOWER, _FACTS, _COUNTS, _EMBEDDING,
) = range(20)  # fmt: skip
_COPY = _EMBEDDING + 1 + len(FORMAT_FIELDS)
_NUM_ARGUMENTS = _COPY + 1 + len(FORMAT_FIELDS)
# What _TASK may be: all logits; the arg-max of all of them; the same, of those that can be it.
_ALL_LOGITS, _ARGMAX, _SCREENED_ARGMAX = range(3)
_TABLE_SIZE = 2 * LINE  # per thread: the four addresses of a tile, on cache lines of their own
# What a phase needs to take part in it: counters, the thread's places in the scratch arrays, and the matrix.
Context = namedtuple(  # noqa: PYI024  (Numba's named tuples are untyped)
    "Context",
    (
        "sync", "threads", "thread", "scratch", "scratch_at", "table", "table_at", "weights", "linear_tile",
        "step_values", "step_bytes", "tail_bytes", "quantized",
    ),
)  # fmt: skip

Array = npt.NDArray[Any]


class OutputProjection:
    """Computes logits and arg-max tokens of rows of hidden states.

    The arg-max is screened where the weights have a copy to do it with, and where that leaves few outputs.

    Args:
        weights: the output embedding and perhaps its copy.
        act: dtype of the hidden states.
        vocab_size: outputs.
        hidden_size: inputs.
        max_logit_rows: rows that are asked for at once.
        threads: how many share the work.
        progress: called with a line of text when kernels have to be compiled.
    """

    def __init__(
        self,
        weights: "PackedWeights",
        act: np.dtype[Any],
        *,
        vocab_size: int,
        hidden_size: int,
        max_logit_rows: int,
        threads: int,
        progress: Callable[[str], None] | None = None,
    ) -> None:
        self._entry = warm_up(act, progress=progress)
        self._vocab_size, self._max_logit_rows, self._threads = vocab_size, max_logit_rows, threads
        self._weights = weights
        self._unscreened_steps = 0  # to come, since screening left too much to compute
        self._num_tasks = -(-vocab_size // (TILE_COLUMNS * ARGMAX_TILES))
        rows, candidates, hidden_pad = max_logit_rows, self._num_tasks * max_logit_rows, padded(hidden_size)
        byte_rows = rows if weights.vocab_format.quantized or weights.is_screened else 0
        # Per thread: a block of a tile's outputs, three vectors a row, and a cache line apart from the next.
        scratch_size = MAX_TILE_ROWS * TILE_COLUMNS + rows * 3 * LANES + LANES
        self._sync = np.zeros(sync_size(_PHASES, threads), np.int64)
        self._hidden = np.zeros((rows, hidden_pad), act)
        self._logits = np.zeros(0, np.float32)
        self._best, self._best_id = np.zeros(candidates, np.float32), np.zeros(candidates, np.int32)
        self._counts = np.zeros(self._num_tasks, np.int32)
        self._arrays: dict[int, Array] = {  # the kernel knows their addresses only
            _SYNC: self._sync,
            _SCRATCH: np.zeros(threads * scratch_size, np.float32),
            _TABLE: np.zeros(threads * _TABLE_SIZE, np.int64),
            _HIDDEN: self._hidden,
            _BYTE_ROWS: np.zeros(byte_rows * byte_row_size.py_func(hidden_pad), np.uint8),
            _BEST: self._best,
            _BEST_ID: self._best_id,
            _UPPER: np.zeros(candidates * ARGMAX_TILES, np.float32),
            _LOWER: np.zeros(candidates, np.float32),
            _FACTS: np.zeros(rows * FACTS, np.float32),
            _COUNTS: self._counts,
        }
        self._arguments = np.zeros(_NUM_ARGUMENTS, np.int64)
        for place, array in self._arrays.items():
            self._arguments[place] = array.ctypes.data
        sizes = (hidden_size, hidden_pad, vocab_size, scratch_size)
        self._arguments[[_HIDDEN_SIZE, _HIDDEN_PAD, _VOCAB_SIZE, _SCRATCH_SIZE]] = sizes
        start, numbers = weights.packed.ctypes.data, weights.vocab_format.numbers(progress=progress)
        self._arguments[_EMBEDDING:_COPY] = start + weights.lm_head_at, *numbers
        if weights.is_screened:
            self._arguments[_COPY:] = start + weights.screen_at, *SCREEN_FORMAT.numbers(progress=progress)
            self._arguments[_BOUNDS] = weights.floats[weights.screen_bounds_at :].ctypes.data

    def logits(self, hidden: Array, rows: Array) -> npt.NDArray[np.float32]:
        """Return float32[num_rows, vocab_size], never rounded to less; a view that the next call overwrites.

        Args:
            hidden: act[..., hidden_pad], padded with zeros.
            rows: int[num_rows], indices into `hidden`.

        Raises:
            ValueError: more rows than there is room for.
        """
        width = padded(self._vocab_size)
        if len(rows) * width > self._logits.size:
            self._logits = np.zeros(len(rows) * width, np.float32)
            self._arguments[_LOGITS] = self._logits.ctypes.data
        self._run(hidden, rows, _ALL_LOGITS)
        return self._logits[: len(rows) * width].reshape(len(rows), width)[:, : self._vocab_size]

    def greedy(self, hidden: Array, rows: Array) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        """Return each row's most likely token, the lowest id on ties, and its logit; NaN where any logit is NaN.

        Arguments and errors are those of :meth:`logits`.

        Cost: reads half of a bf16 embedding, where a CPU has VNNI, and what :mod:`~engine_v1.kernels.screening` leaves.
        """
        is_screened = self._weights.is_screened and self._unscreened_steps == 0
        self._unscreened_steps -= self._unscreened_steps > 0
        self._run(hidden, rows, _SCREENED_ARGMAX if is_screened else _ARGMAX)
        if is_screened:
            share = int(self._counts.sum()) / (self._num_tasks * ARGMAX_TILES)
            if share > _MAX_CANDIDATES + _MAX_CANDIDATES_PER_ROW * len(rows):
                self._unscreened_steps = _UNSCREENED_STEPS
        ids, values = np.empty(len(rows), np.int32), np.empty(len(rows), np.float32)
        pick_best(self._best, self._best_id, self._num_tasks, len(rows), ids, values)
        return ids, values

    def _run(self, hidden: Array, rows: Array, task: int) -> None:
        if len(rows) > self._max_logit_rows:
            raise ValueError(f"{len(rows)} rows exceed max_logit_rows={self._max_logit_rows}")
        hidden.take(rows, 0, self._hidden[: len(rows)], "clip")
        self._arguments[_ROWS] = len(rows)
        self._arguments[_TASK] = task
        self._sync.fill(0)
        run_parallel(self._entry, self._threads, self._arguments)


@kernel_part(forceinline=True)
def _context(thread, threads, a, matrix):  # type: ignore[no-untyped-def]
    """One thread's context for the matrix that a place of the arguments names."""
    return Context(
        int64_view(a[_SYNC], 1), threads, thread, float_view(a[_SCRATCH], 1), thread * a[_SCRATCH_SIZE],
        int64_view(a[_TABLE], 1), thread * _TABLE_SIZE, a[matrix], a[matrix + 1], a[matrix + 2], a[matrix + 3],
        a[matrix + 4], a[matrix + 5],
    )  # fmt: skip


@kernel_part
def _project(thread, threads, a, act):  # type: ignore[no-untyped-def]
    """One thread's part of the product with the output embedding: logits, or each task's best candidate."""
    ctx = _context(thread, threads, a, _EMBEDDING)
    hidden, rows, size = act(a[_HIDDEN], 1), a[_ROWS], a[_VOCAB_SIZE]
    if a[_TASK] == _SCREENED_ARGMAX:
        _project_screened(ctx, _context(thread, threads, a, _COPY), a, hidden)
        return
    byte_rows = a[_BYTE_ROWS] if ctx.quantized else 0
    if ctx.quantized:
        quantize_rows(ctx, 0, rows, a[_HIDDEN_PAD], hidden, byte_rows)
    x, x_bytes, steps = operands(ctx, hidden, a[_HIDDEN_SIZE], byte_rows)
    if a[_TASK] == _ARGMAX:
        best, best_id = float_view(a[_BEST], 1), int32_view(a[_BEST_ID], 1)
        linear_argmax(ctx, 1, x, x_bytes, rows, ctx.weights, size, steps, best, best_id)
    else:
        tiles = (size + TILE_COLUMNS - 1) // TILE_COLUMNS
        logits = float_view(a[_LOGITS], 1)
        linear_store(ctx, 1, x, x_bytes, rows, ctx.weights, tiles, steps, logits, tiles * TILE_COLUMNS)


@kernel_part
def _project_screened(ctx, copy, a, hidden):  # type: ignore[no-untyped-def]
    """One thread's part of the arg-max that reads the output embedding's copy, and of itself what it must."""
    rows, size, byte_rows = a[_ROWS], a[_VOCAB_SIZE], a[_BYTE_ROWS]
    upper, lower, facts = float_view(a[_UPPER], 1), float_view(a[_LOWER], 1), float_view(a[_FACTS], 1)
    measure_rows(copy, 0, rows, a[_HIDDEN_PAD], hidden, byte_rows, facts)
    x, x_bytes, steps = operands(copy, hidden, a[_HIDDEN_SIZE], byte_rows)
    bounds = float_view(a[_BOUNDS], 1)
    screen(copy, 1, x, x_bytes, facts, rows, copy.weights, size, steps, bounds, upper, lower)
    tasks = (size + TILE_COLUMNS * ARGMAX_TILES - 1) // (TILE_COLUMNS * ARGMAX_TILES)
    gather_bounds(copy, 2, tasks, rows, lower, facts)
    x, x_bytes, steps = operands(ctx, hidden, a[_HIDDEN_SIZE], 0)
    candidates_argmax(
        ctx, 3, x, x_bytes, rows, ctx.weights, size, steps, upper, facts, float_view(a[_BEST], 1),
        int32_view(a[_BEST_ID], 1), int32_view(a[_COUNTS], 1),
    )  # fmt: skip


def vocabulary_bf16(thread, threads, arguments):  # type: ignore[no-untyped-def]
    """:func:`_project` with bf16 hidden states."""
    _project(thread, threads, int64_view(arguments, 1), bf16_view)


def vocabulary_f32(thread, threads, arguments):  # type: ignore[no-untyped-def]
    """:func:`_project` with float32 hidden states."""
    _project(thread, threads, int64_view(arguments, 1), float_view)


@jit
def pick_best(best, best_id, tasks, rows, ids, values):  # type: ignore[no-untyped-def]
    """Choose each row's winner among the tasks' candidates, lowest index on ties; NaN where any candidate is."""
    for m in range(rows):
        value = best[m]
        index = best_id[m]
        for task in range(1, tasks):
            v = best[task * rows + m]
            if v > value or np.isnan(v):  # NaN stays: nothing compares greater
                value = v
                index = best_id[task * rows + m]
        values[m] = value
        ids[m] = index


def warm_up(act: np.dtype[Any], *, progress: Callable[[str], None] | None = None) -> int:
    """Compile what an :class:`OutputProjection` calls, or load it from disk; return its entry's address."""
    floats, ints = types.Array(types.float32, 1, "C"), types.Array(types.int32, 1, "C")
    parallel.warm_up(progress=progress)
    warmup(pick_best, [(floats, ints, types.int64, types.int64, ints, floats)], progress=progress)
    entry = vocabulary_bf16 if act == np.uint16 else vocabulary_f32
    return native_function(entry, types.void(types.int64, types.int64, types.int64), progress=progress)
