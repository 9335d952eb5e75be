"""What a step costs: seconds against rows and keys, measured at start and learned from every step since."""

import itertools
import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import types

from engine_v1.kernels.jit import jit, warmup

_Floats = npt.NDArray[np.float64]

# Between these numbers of rows, and beyond the last, each further row costs the same.
KNOTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96)
# Standard deviations of the measurements at start: of floor and bends together and of the floor alone, as shares of
# themselves; of each bend, as a share of what a row of a step takes there; of attention and of drawing, as shares.
SCALE_DOUBT, FLOOR_DOUBT, BEND_DOUBT, OTHER_DOUBT = 0.5, 0.15, 0.03, 0.5
# The same of a step's time, as a share. A surprise counts for at most one standard deviation of what was to be
# expected: a step during which a neighbour had the processor says little about the next.
NOISE = 0.1
# The share of what steps have taught that each further step makes doubtful again.
FORGETTING = 1 / 200
# No floor is believed to be so many times lower than it was measured: no step is free.
MAX_DRIFT = 1000.0


@dataclass(frozen=True)
class StepTimes:
    """What was measured of a backend, in seconds."""

    rows: Mapping[int, float]  # rows of a step, all sampled -> its time over short contexts; at least one
    key_s: float = 0.0  # one row's attention to one more key, read from memory
    row_key_s: float = 0.0  # the same for a further row of a request, whose keys have been read
    drawn_row_s: float = 0.0  # what a row costs beyond arg-max where logits are stored and drawn from


class StepLoad(NamedTuple):
    """What a step that only decodes computes, as far as its time depends on it."""

    num_rows: int  # all sampled
    num_keys: int  # over requests: keys that the newest known token sees
    num_draft_keys: int = 0  # over draft rows: the same
    drawn: bool = False  # whether logits are stored: a request is not greedy or asks for log probabilities


class RowCurve:
    """Seconds against rows: the greatest convex, never falling curve below all that was measured.

    Noise only ever adds time, so low measurements are the true ones; and hardware that computes rows together
    has a time that is flat while it waits for memory and then rises, which is convex. So the time of one more
    row never falls with the number of rows.

    Args:
        points: rows -> seconds, at least one.
    """

    def __init__(self, points: Mapping[int, float]) -> None:
        assert points, "a curve has at least one point"
        hull: list[tuple[int, float]] = []
        lowest = math.inf
        for rows in sorted(points, reverse=True):
            # more rows took less time: then so many take no more
            lowest = min(lowest, points[rows])
            while len(hull) >= 2 and _is_above(hull[-1], hull[-2], (rows, lowest)):
                hull.pop()
            hull.append((rows, lowest))
        hull.reverse()
        self._first, self._last = hull[0][0], hull[-1][0]
        # [(1, 5), (3, 6)] -> seconds 5, 5.5, 6
        self._seconds = [hull[0][1]]
        for (low, low_s), (high, high_s) in itertools.pairwise(hull):
            step = (high_s - low_s) / (high - low)
            self._seconds += [low_s + step * i for i in range(1, high - low + 1)]
        self._last_slope = self._seconds[-1] - self._seconds[-2] if len(self._seconds) > 1 else 0.0

    def seconds(self, rows: int) -> float:
        """Return the time of so many rows; beyond the last point the last slope goes on."""
        if rows <= self._first:
            return self._seconds[0]
        if rows > self._last:
            return self._seconds[-1] + (rows - self._last) * self._last_slope
        return self._seconds[rows - self._first]

    def slope(self, rows: int) -> float:
        """Return the time that one row more than so many adds."""
        index = rows - self._first
        if index < 0:
            return 0.0
        if index + 1 >= len(self._seconds):
            return self._last_slope
        return self._seconds[index + 1] - self._seconds[index]


def _is_above(middle: tuple[int, float], right: tuple[int, float], left: tuple[int, float]) -> bool:
    """Whether the middle point lies on or above the line between the other two."""
    rise = (right[1] - left[1]) * (middle[0] - left[0])
    return (middle[1] - left[1]) * (right[0] - left[0]) >= rise


class CostModel:
    """Predicts a step's seconds from its load, and learns from what steps took.

    A prediction is linear in what is not known: the floor, which is a step of one row; the bends, by which a further
    row is dearer from each knot on; a factor of attention to the keys in context; the time of storing a row's logits.
    What was measured at start is a first guess with a variance. Every step corrects it: the less certain a part and the
    larger its share of the step, the more. So a measurement that a neighbour disturbed is overruled within some tens of
    steps where the engine works, and beyond it a row costs at least what it costs there.

    Invariant: the time of one more row is never negative and never falls as rows are added.

    Args:
        times: what was measured.

    Cost: a prediction takes about 1 µs, an observation 3.

    Source: recursive least squares in the form of Kalman (1960), its covariance drawn back to the first one, over
        hinges whose coefficients are held above zero, so that a curve stays convex.
    """

    def __init__(self, times: StepTimes) -> None:
        self._times = times
        curve = RowCurve(times.rows)
        floor = curve.seconds(1)
        slopes = [
            (curve.seconds(b) - curve.seconds(a)) / (b - a) for a, b in itertools.pairwise((*KNOTS, 2 * KNOTS[-1]))
        ]
        bends = [after - before for before, after in itertools.pairwise((0.0, *slopes))]
        self._knots = np.array(KNOTS, np.float64)
        self._values = np.array([floor, *bends, 1.0, times.drawn_row_s])
        self._least = np.array([floor / MAX_DRIFT, *(0.0 for _ in KNOTS), 0.0, 0.0])
        together = SCALE_DOUBT * np.array([floor, *bends, 0.0, 0.0])
        shares = [curve.seconds(rows + 1) / (rows + 1) for rows in KNOTS]
        alone = np.array(
            [
                FLOOR_DOUBT * floor,
                *(BEND_DOUBT * share for share in shares),
                OTHER_DOUBT,
                OTHER_DOUBT * times.drawn_row_s,
            ]
        )
        self._covariance = np.outer(together, together) + np.diag(alone**2)
        self._forgotten = FORGETTING * self._covariance
        warmup(_load_features, [_FEATURES_SIGNATURE])
        warmup(_learn, [_LEARN_SIGNATURE])
        self._slopes = self._row_slopes()

    def seconds(self, load: StepLoad) -> float:
        """Return what a step of this load should take."""
        return float(self._features(load) @ self._values)

    def row_seconds(self, num_rows: int, *, drawn: bool) -> float:
        """Return what one more sampled row adds to a step of so many, without its attention to keys."""
        more = self._slopes[bisect_right(KNOTS, num_rows) - 1]
        return more + float(self._values[-1]) if drawn else more

    @property
    def row_key_seconds(self) -> float:
        """What a draft row adds per key in its context."""
        return self._times.row_key_s * float(self._values[-2])

    def observe(self, load: StepLoad, seconds: float) -> None:
        """Learn from a step without prompt tokens."""
        if seconds <= 0.0:
            return
        _learn(self._features(load), seconds, self._values, self._least, self._covariance, self._forgotten)
        self._slopes = self._row_slopes()

    def _features(self, load: StepLoad) -> _Floats:
        """Return how often a step takes each of the values."""
        attention = self._times.key_s * load.num_keys + self._times.row_key_s * load.num_draft_keys
        features: _Floats = _load_features(load.num_rows, attention, load.num_rows if load.drawn else 0, self._knots)
        return features

    def _row_slopes(self) -> list[float]:
        """Return what a further row costs from each knot on."""
        slopes: list[float] = self._values[1:-2].cumsum().tolist()
        return slopes


@jit
def _load_features(num_rows: int, attention: float, num_drawn: int, knots: _Floats) -> _Floats:
    """Return :meth:`CostModel._features`."""
    features = np.empty(len(knots) + 3)
    features[0] = 1.0
    for i in range(len(knots)):
        features[1 + i] = max(num_rows - knots[i], 0.0)
    features[-2] = attention
    features[-1] = num_drawn
    return features


@jit
def _learn(
    features: _Floats, seconds: float, values: _Floats, least: _Floats, covariance: _Floats, forgotten: _Floats
) -> None:
    """Correct the values, and their covariance, by what a step took."""
    size = len(values)
    shared = np.zeros(size)
    predicted = variance = 0.0
    for i in range(size):
        predicted += features[i] * values[i]
        for j in range(size):
            shared[i] += covariance[i, j] * features[j]
        variance += features[i] * shared[i]
    variance += (NOISE * predicted) ** 2
    deviation = math.sqrt(variance)
    surprise = max(-deviation, min(deviation, seconds - predicted))
    for i in range(size):
        values[i] = max(values[i] + shared[i] * surprise / variance, least[i])
        for j in range(size):
            kept = covariance[i, j] - shared[i] * shared[j] / variance
            covariance[i, j] = kept * (1.0 - FORGETTING) + forgotten[i, j]


_FLOATS, _SQUARE = types.float64[::1], types.float64[:, ::1]
_FEATURES_SIGNATURE = (types.int64, types.float64, types.int64, _FLOATS)
_LEARN_SIGNATURE = (_FLOATS, types.float64, _FLOATS, _FLOATS, _SQUARE, _SQUARE)
