"""Measures what a backend's steps cost, before the first request."""

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from engine_v1.attention.metadata import AttentionMetadata
from engine_v1.spec_decode.cost_model import StepTimes
from engine_v1.worker.gpu_model_runner import GPUModelRunner

logger = logging.getLogger(__name__)

BUDGET_S = 0.8
NUM_ROUNDS = 3
NUM_ALWAYS = 3  # shapes that are tried once even if the budget is gone
SHORT_CONTEXT = 16
LONG_CONTEXT = 1024


class _Shape(NamedTuple):
    """A step to be timed; every row of it is sampled."""

    num_requests: int
    num_rows: int = 1  # of each request
    context: int = SHORT_CONTEXT  # of each request
    drawn: bool = False  # store logits and draw from them, instead of taking the arg-max


_FIRST_KEYS = _Shape(1, context=LONG_CONTEXT)
_FURTHER_KEYS, _FURTHER_ROWS = _Shape(1, num_rows=5, context=LONG_CONTEXT), _Shape(1, num_rows=5)
_DRAWN = _Shape(8, drawn=True)
# In the order in which they tell most: a budget that runs out leaves the last ones out.
_SHAPES = (
    *map(_Shape, (1, 8, 16)),
    *(_FIRST_KEYS, _FURTHER_KEYS, _FURTHER_ROWS, _DRAWN),
    *map(_Shape, (64, 4, 32, 2, 24, 12, 6, 48, 3, 20, 96)),
)


def measure_step_times(
    runner: GPUModelRunner,
    *,
    max_rows: int,
    max_context: int,
    clock: Callable[[], float] = time.perf_counter,
    budget_s: float = BUDGET_S,
) -> StepTimes:
    """Time steps of several shapes, all of token 0, and return the shortest of each.

    All shapes are gone through several times while the budget lasts, so that a bad moment of the machine does not fall
    on every measurement of one. Keys and values go to blocks that no request holds; a request writes its own before it
    reads them.

    Args:
        runner: of an engine that has no requests yet.
        max_rows: rows that a step may have.
        max_context: tokens that there are KV slots for, in blocks 1, 2, ..., and positions.
        clock: seconds.
        budget_s: after so many seconds no further step is begun, but for the first few shapes.

    Cost: two steps that touch what they need for the first time, and the budget, or the first few steps of a model that
    needs longer for them.
    """
    times: dict[_Shape, tuple[float, float]] = {}
    shapes = {shape: _fitting(shape, max_rows, max_context) for shape in _SHAPES}
    # The first step of a process and the first over many blocks take a hundred times as long as the next: pages of
    # weights and of the cache are touched for the first time.
    for shape in (_SHAPES[0], _FIRST_KEYS):
        _time_step(runner, shapes[shape], clock)
    deadline = clock() + budget_s
    for _ in range(NUM_ROUNDS):
        for place, shape in enumerate(_SHAPES):
            if clock() < deadline or (place < NUM_ALWAYS and shape not in times):
                measured = _time_step(runner, shapes[shape], clock)
                before = times.get(shape, measured)
                times[shape] = min(before[0], measured[0]), min(before[1], measured[1])
    plain = {
        shapes[shape].num_requests: taken
        for shape, taken in times.items()
        if not shape.drawn and shape.num_rows == 1 and shape.context == SHORT_CONTEXT
    }
    step_times = StepTimes(
        rows={rows: sum(taken) for rows, taken in plain.items()},
        **_per_key(times, shapes),
        drawn_row_s=_drawn_row_s(times, shapes, plain),
    )
    logger.info("a step takes %s", step_times)
    return step_times


def _fitting(shape: _Shape, max_rows: int, max_context: int) -> _Shape:
    """Return a shape no larger than there is room for."""
    context = min(shape.context, max_context)
    num_rows = min(shape.num_rows, context, max_rows)
    return shape._replace(num_requests=min(shape.num_requests, max_rows), num_rows=num_rows, context=context)


def _per_key(times: Mapping[_Shape, tuple[float, float]], shapes: Mapping[_Shape, _Shape]) -> dict[str, float]:
    """Return what a key costs the first and each further row of a request; nothing where it was not measured."""
    num_keys = shapes[_FIRST_KEYS].context - shapes[_SHAPES[0]].context
    num_further = shapes[_FURTHER_KEYS].num_rows - 1
    if num_keys <= 0 or _FIRST_KEYS not in times:
        return {}
    first_s = times[_FIRST_KEYS][0] - times[_SHAPES[0]][0]
    found = {"key_s": max(0.0, first_s / num_keys)}
    if num_further > 0 and _FURTHER_KEYS in times and _FURTHER_ROWS in times:
        further_s = times[_FURTHER_KEYS][0] - times[_FURTHER_ROWS][0] - first_s
        found["row_key_s"] = max(0.0, further_s / num_further / num_keys)
    return found


def _drawn_row_s(
    times: Mapping[_Shape, tuple[float, float]],
    shapes: Mapping[_Shape, _Shape],
    plain: Mapping[int, tuple[float, float]],
) -> float:
    num_rows = shapes[_DRAWN].num_requests
    if _DRAWN not in times or num_rows not in plain:
        return 0.0
    return max(0.0, (times[_DRAWN][1] - plain[num_rows][1]) / num_rows)


def _time_step(runner: GPUModelRunner, shape: _Shape, clock: Callable[[], float]) -> tuple[float, float]:
    """Return the seconds of a step's forward pass and of its sampling. Its requests share their blocks."""
    num_requests, num_rows, context, drawn = shape
    size = runner.block_size
    # Block 0 is never anyone's; the others are everyone's in turn.
    blocks = np.arange(1, 1 + -(-context // size), dtype=np.int32)
    own = np.arange(context - num_rows, context, dtype=np.int64)
    positions = np.tile(own, num_requests)
    metadata = AttentionMetadata(
        query_start_loc=np.arange(num_requests + 1, dtype=np.int32) * num_rows,
        seq_lens=np.full(num_requests, context, np.int32),
        block_tables=np.tile(blocks, (num_requests, 1)),
        slot_mapping=np.tile(blocks[own // size].astype(np.int64) * size + own % size, num_requests),
    )
    rows = None  # arg-max
    if drawn:
        rows = runner.input_batch.sampling_rows(np.zeros(len(positions), np.int32), positions, {})
        rows = dataclasses.replace(rows, temperature=np.ones(len(positions)))
    started = clock()
    runner.backend.forward(np.zeros(len(positions), np.int64), positions, metadata)
    runner.backend.synchronize()
    between = clock()
    runner.backend.sample(np.arange(len(positions)), rows, keep_logits=False)
    return between - started, clock() - between
