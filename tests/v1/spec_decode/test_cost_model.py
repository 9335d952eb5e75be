"""The model of what a step costs: curves from noisy points, and correction by what steps took."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_v1.spec_decode.cost_model import CostModel, RowCurve, StepLoad, StepTimes

TIMES = StepTimes(
    layers={1: 4.0, 8: 4.0, 16: 8.0, 64: 32.0},
    head={1: 1.0, 64: 1.0},
    key_s=0.001,
    row_key_s=0.0005,
    drawn_row_s=0.25,
)


class TestRowCurve:
    def test_values_between_and_beyond_points(self):
        """Linear between points; the last slope goes on beyond them."""
        curve = RowCurve({1: 4.0, 3: 5.0, 5: 9.0})
        assert [curve.seconds(rows) for rows in (0, 1, 2, 3, 4, 5, 7)] == [4.0, 4.0, 4.5, 5.0, 7.0, 9.0, 13.0]
        assert [curve.slope(rows) for rows in (0, 1, 2, 3, 4, 5, 9)] == [0.0, 0.5, 0.5, 2.0, 2.0, 2.0, 2.0]

    def test_a_bad_moment_of_the_machine_is_left_out(self):
        """A point above the line between its neighbours does not count."""
        assert RowCurve({1: 4.0, 2: 40.0, 3: 6.0}).seconds(2) == 5.0

    def test_more_rows_in_less_time_show_that_few_rows_took_too_long(self):
        """8 rows in 5 seconds: then one row takes no more."""
        assert RowCurve({1: 13.0, 8: 5.0, 16: 9.0}).seconds(1) == 5.0

    def test_one_point_is_a_flat_curve(self):
        """With nothing else known further rows are taken to be free, until steps show otherwise."""
        curve = RowCurve({4: 2.0})
        assert (curve.seconds(1), curve.seconds(9), curve.slope(9)) == (2.0, 2.0, 0.0)

    @given(st.dictionaries(st.integers(1, 40), st.floats(0.001, 10.0), min_size=1, max_size=12))
    def test_a_curve_is_convex_never_falls_and_lies_below_its_points(self, points):
        """Whatever was measured: slopes never fall, none is negative, no point is below."""
        curve = RowCurve(points)
        slopes = [curve.slope(rows) for rows in range(45)]
        assert all(later >= slope - 1e-9 for slope, later in itertools.pairwise(slopes))
        assert min(slopes) >= -1e-12
        assert all(curve.seconds(rows) <= seconds + 1e-9 for rows, seconds in points.items())


class TestCostModel:
    def test_a_prediction_adds_floor_growth_and_attention(self):
        """16 rows of which 4 are drafts, over 1000 keys and 200 draft keys, with logits stored."""
        load = StepLoad(16, 16, 1000, 200, drawn=True)
        assert CostModel(TIMES).seconds(load) == pytest.approx(8.0 + 1.0 + 16 * 0.25 + 1.0 + 0.1)

    def test_a_further_row_costs_its_slopes(self):
        """Free up to 8 rows, then half a second each; a drawn row costs more."""
        cost = CostModel(TIMES)
        assert cost.row_seconds(4, 4, drawn=False) == 0.0
        assert cost.row_seconds(16, 16, drawn=False) == 0.5
        assert cost.row_seconds(16, 16, drawn=True) == 0.75
        assert cost.row_key_seconds == 0.0005

    def test_it_follows_a_machine_that_became_slower(self):
        """Everything takes twice as long: after 200 steps the prediction is within 5 %."""
        cost, load = CostModel(TIMES), StepLoad(16, 16, 1000)
        truth = 2 * cost.seconds(load)
        for _ in range(200):
            cost.observe(load, truth)
        assert cost.seconds(load) == pytest.approx(truth, rel=0.05)

    def test_it_tells_slow_memory_from_slow_arithmetic(self):
        """Only the floor doubled: steps of 1 and of 24 rows teach it that a further row costs what it did."""
        cost, truth = CostModel(TIMES), CostModel(TIMES)
        truth.factors[0] = 2.0
        for step in range(2000):
            load = StepLoad(rows := (1, 24)[step % 2], rows, 0)
            cost.observe(load, truth.seconds(load))
        assert cost.factors[0] == pytest.approx(2.0, rel=0.05)
        assert cost.factors[1] == pytest.approx(1.0, rel=0.1)

    def test_one_outlier_moves_little(self):
        """A step that took a hundred times as long changes the prediction by less than 3 %."""
        cost, load = CostModel(TIMES), StepLoad(16, 16, 0)
        before = cost.seconds(load)
        cost.observe(load, 100 * before)
        assert cost.seconds(load) == pytest.approx(before, rel=0.03)

    def test_factors_stay_within_bounds(self):
        """A clock that stands, runs backwards or jumps leaves a model that predicts something."""
        cost, load = CostModel(TIMES), StepLoad(16, 16, 1000)
        for seconds in (0.0, -1.0):
            cost.observe(load, seconds)
        assert cost.factors == [1.0, 1.0, 1.0]
        for _ in range(2000):
            cost.observe(load, 1e9)
        assert max(cost.factors) <= 4.0
