"""What is timed before the first request, with a fake clock and a fake backend."""

import types

import numpy as np
import pytest

from engine_v1.core.token_table import TokenTable
from engine_v1.spec_decode.cost_model import CostModel, StepLoad
from engine_v1.worker.calibration import measure_step_times
from engine_v1.worker.gpu_model_runner import GPUModelRunner


class FakeBackend:
    """Takes 4 s, 0.01 s a row and 0.001 s a key of each request, later; drawing takes 0.5 s a row, arg-max 0.1 s."""

    def __init__(self):
        self.now = 0.0
        self.rows = []
        self.blocks = set()
        self.begun_s = 0.0

    def clock(self):
        return self.now

    def forward(self, input_ids, positions, metadata):
        self.rows.append(len(input_ids))
        self.blocks |= set((metadata.slot_mapping // 16).tolist())
        first = int(metadata.seq_lens.sum())
        further = int(metadata.seq_lens[0]) * (len(input_ids) // len(metadata.seq_lens) - 1)
        self.begun_s = 4.0 + 0.01 * len(input_ids) + 0.001 * (first + further / 4)

    def synchronize(self):
        self.now += self.begun_s

    def sample(self, indices, rows, *, keep_logits):
        assert rows is None or rows.temperature.tolist() == [1.0] * len(indices)
        self.now += (0.1 if rows is None else 0.5) * len(indices)
        return np.zeros(len(indices), np.int64), np.ones(len(indices), np.bool_)


def measure(budget_s, *, max_rows=4096, max_context=4096):
    backend = FakeBackend()
    runner = GPUModelRunner(backend, TokenTable(4, 4096), block_size=16, vocab_size=64)
    times = measure_step_times(
        runner, max_rows=max_rows, max_context=max_context, clock=backend.clock, budget_s=budget_s
    )
    return times, backend


def test_times_are_those_of_the_backend():
    """Rows, keys, further rows' keys and drawn rows are told apart."""
    times, backend = measure(1e9)
    cost = CostModel(times)
    assert cost.seconds(StepLoad(32, 0)) == pytest.approx(4.0 + 32 * (0.01 + 0.016) + 3.2)
    assert times.key_s == pytest.approx(0.001)
    assert times.row_key_s == pytest.approx(0.00025)
    assert times.drawn_row_s == pytest.approx(0.4)
    assert 0 not in backend.blocks


def test_a_large_model_takes_few_steps():
    """The budget is gone with the first timed step: three row counts are tried all the same, nothing else."""
    times, backend = measure(1.0)
    assert backend.rows == [1, 1, 1, 8, 16]
    assert (times.key_s, times.drawn_row_s) == (0.0, 0.0)


def test_nothing_is_tried_that_has_no_room():
    """An engine of 6 rows and 3 tokens of context is timed within these bounds."""
    times, backend = measure(1e9, max_rows=6, max_context=3)
    assert max(backend.rows) == 6
    assert max(times.rows) == 6
    assert (times.key_s, times.row_key_s) == (0.0, 0.0)


def test_a_bad_moment_is_measured_again():
    """Rounds are repeated, and the shortest time of a size counts."""
    backend = FakeBackend()
    runner = GPUModelRunner(backend, TokenTable(4, 4096), block_size=16, vocab_size=64)
    forward = backend.forward

    def slow_at_first(self, *args):
        forward(*args)
        if 2 < len(self.rows) < 10:
            self.now += 100.0

    backend.forward = types.MethodType(slow_at_first, backend)
    times = measure_step_times(runner, max_rows=64, max_context=4096, clock=backend.clock, budget_s=1e9)
    assert times.rows[1] == pytest.approx(4.0 + 0.01 + 0.016 + 0.1)


def test_the_first_touch_of_pages_is_not_timed():
    """The first step and the first over many keys take very long; one round shows what the others take."""
    backend = FakeBackend()
    runner = GPUModelRunner(backend, TokenTable(4, 4096), block_size=16, vocab_size=64)
    forward, seen = backend.forward, set()

    def slow_at_first(self, input_ids, positions, metadata):
        forward(input_ids, positions, metadata)
        blocks = set((metadata.block_tables).ravel().tolist())
        self.now += 0.0 if blocks <= seen else 400.0
        seen.update(blocks)

    backend.forward = types.MethodType(slow_at_first, backend)
    times = measure_step_times(runner, max_rows=64, max_context=4096, clock=backend.clock, budget_s=100.0)
    assert times.rows[16] == pytest.approx(4.0 + 16 * (0.01 + 0.016 + 0.1))
    assert times.key_s == pytest.approx(0.001)
