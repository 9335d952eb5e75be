"""The model of what a step costs: curves from noisy points, and correction by what steps took."""

import dataclasses
import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_v1.spec_decode.cost_model import CostModel, RowCurve, StepLoad, StepTimes

TIMES = StepTimes({1: 5.0, 8: 5.0, 16: 9.0, 64: 33.0}, key_s=0.001, row_key_s=0.0005, drawn_row_s=0.25)


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
    def test_a_prediction_adds_rows_attention_and_drawing(self):
        """16 rows of which some are drafts, over 1000 keys and 200 draft keys, with logits stored."""
        load = StepLoad(16, 1000, 200, drawn=True)
        assert CostModel(TIMES).seconds(load) == pytest.approx(9.0 + 16 * 0.25 + 1.0 + 0.1)

    def test_a_further_row_costs_its_slope(self):
        """Free up to 8 rows, then half a second each, also beyond what was measured; a drawn row costs more."""
        cost = CostModel(TIMES)
        assert cost.row_seconds(4, drawn=False) == 0.0
        assert cost.row_seconds(16, drawn=False) == 0.5
        assert cost.row_seconds(16, drawn=True) == 0.75
        assert cost.row_seconds(1000, drawn=False) == 0.5
        assert cost.row_key_seconds == 0.0005

    @given(st.dictionaries(st.integers(1, 100), st.floats(0.001, 10.0), min_size=1, max_size=12), st.integers(0, 2**32))
    def test_rows_never_get_cheaper(self, points, seed):
        """Whatever was measured and whatever steps take, no row costs less than nothing or than the one before."""
        cost, rng = CostModel(StepTimes(points)), random.Random(seed)
        for _ in range(20):
            cost.observe(StepLoad(rng.randint(1, 100), 0), rng.choice((0.01, 1.0, 100.0)) * rng.random())
        slopes = [cost.row_seconds(rows, drawn=False) for rows in range(1, 200)]
        assert slopes[0] >= 0.0
        assert slopes == sorted(slopes)
        assert cost.seconds(StepLoad(1, 0)) > 0.0

    def test_it_follows_a_machine_that_became_slower(self):
        """Everything takes twice as long: after 40 steps prediction and price of a row are right within 10 %."""
        cost, load = CostModel(TIMES), StepLoad(16, 1000)
        truth = 2 * cost.seconds(load)
        for _ in range(40):
            cost.observe(load, truth)
        assert cost.seconds(load) == pytest.approx(truth, rel=0.05)
        assert cost.row_seconds(16, drawn=False) == pytest.approx(1.0, rel=0.1)

    def test_it_tells_slow_memory_from_slow_arithmetic(self):
        """One row takes twice as long, a further one what it did: steps of 1, 16 and 32 rows teach it that."""
        cost = CostModel(TIMES)
        truth = CostModel(StepTimes({1: 10.0, 8: 10.0, 16: 14.0, 64: 38.0}))
        for step in range(300):
            load = StepLoad((1, 16, 32)[step % 3], 0)
            cost.observe(load, truth.seconds(load))
        assert cost.seconds(StepLoad(1, 0)) == pytest.approx(10.0, rel=0.05)
        assert cost.row_seconds(16, drawn=False) == pytest.approx(0.5, rel=0.1)

    def test_rows_that_seemed_free_get_the_price_that_steps_show(self):
        """A flat curve was measured; steps of 16 to 24 rows show half a second a row, which holds for more rows too."""
        cost, truth = CostModel(StepTimes({1: 9.0, 64: 9.0})), CostModel(TIMES)
        for step in range(40):
            load = StepLoad(16 + step * 5 % 9, 0)
            cost.observe(load, truth.seconds(load))
        for rows in (16, 20, 100):
            assert cost.row_seconds(rows, drawn=False) > 0.35
        assert cost.seconds(StepLoad(20, 0)) == pytest.approx(11.0, rel=0.03)

    def test_long_contexts_teach_attention(self):
        """Keys cost three times what was measured: steps over short and long contexts show it."""
        cost = CostModel(TIMES)
        truth = CostModel(dataclasses.replace(TIMES, key_s=0.003))
        for step in range(200):
            load = StepLoad(4, (10, 4000)[step % 2])
            cost.observe(load, truth.seconds(load))
        assert cost.seconds(StepLoad(4, 4000)) == pytest.approx(17.0, rel=0.05)
        assert cost.seconds(StepLoad(4, 10)) == pytest.approx(5.0, rel=0.05)

    def test_one_outlier_moves_little(self):
        """After some steps one that took a hundred times as long changes the prediction by less than 5 %."""
        cost, load = CostModel(TIMES), StepLoad(16, 0)
        before = cost.seconds(load)
        for _ in range(20):
            cost.observe(load, before)
        cost.observe(load, 100 * before)
        assert cost.seconds(load) == pytest.approx(before, rel=0.05)

    def test_a_broken_clock_leaves_a_model(self):
        """A clock that stands or runs backwards teaches nothing; one that jumps leaves something finite."""
        cost, load = CostModel(TIMES), StepLoad(16, 1000)
        before = cost.seconds(load)
        for seconds in (0.0, -1.0):
            cost.observe(load, seconds)
        assert cost.seconds(load) == before
        for _ in range(2000):
            cost.observe(load, 1e9)
        assert before < cost.seconds(load) <= 1e9
