"""What a step costs: seconds against rows, keys and sampled rows, measured at start and corrected by every step."""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

# How much of a step's surprise is believed, and the largest surprise: a step during which a neighbour had the
# processor says little about the next.
LEARNING_RATE = 0.05
MAX_SURPRISE = 0.25
# No part is believed to be this many times cheaper or dearer than it was measured.
MAX_DRIFT = 4.0


@dataclass(frozen=True)
class StepTimes:
    """What was measured of a backend, in seconds. Empty curves stand for one that could not be measured."""

    layers: Mapping[int, float]  # rows of a step -> its forward pass over short contexts
    head: Mapping[int, float]  # rows sampled -> output projection and arg-max
    key_s: float = 0.0  # one row's attention to one more key, read from memory
    row_key_s: float = 0.0  # the same for a further row of a request, whose keys have been read
    drawn_row_s: float = 0.0  # what a row costs beyond arg-max where logits are stored and drawn from


class StepLoad(NamedTuple):
    """What a step computes, as far as its time depends on it."""

    num_rows: int
    num_sampled: int
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

    A prediction is the sum of three parts: the floor, which is a step of one row (reading the weights); growth
    by further rows, in the layers, the output projection and sampling; and attention, by the keys in context.
    Each has a factor, 1 at first, that steps correct: memory and cores do not slow down together.

    Invariant: the time of one more row is never negative and never falls as rows are added.

    Args:
        times: what was measured.

    Cost: a prediction takes about a microsecond, an observation two.

    Source: normalised least mean squares (Nagumo and Noda, 1967), on relative errors that are cut off.
    """

    def __init__(self, times: StepTimes) -> None:
        self._times = times
        self._layers = RowCurve(times.layers)
        self._head = RowCurve(times.head)
        self._floor = self._layers.seconds(1) + self._head.seconds(1)
        self.factors = [1.0, 1.0, 1.0]  # floor, growth, attention

    def seconds(self, load: StepLoad) -> float:
        """Return what a step of this load should take."""
        floor, growth, attention = self._parts(load)
        return floor + growth + attention

    def row_seconds(self, num_rows: int, num_sampled: int, *, drawn: bool) -> float:
        """Return what one more sampled row adds to a step of so many, without its attention to keys."""
        more = self._layers.slope(num_rows) + self._head.slope(num_sampled)
        if drawn:
            more += self._times.drawn_row_s
        return more * self.factors[1]

    @property
    def row_key_seconds(self) -> float:
        """What a draft row adds per key in its context."""
        return self._times.row_key_s * self.factors[2]

    def observe(self, load: StepLoad, seconds: float) -> None:
        """Learn from a step without prompt tokens."""
        parts = self._parts(load)
        predicted = sum(parts)
        if predicted <= 0.0 or seconds <= 0.0:
            return
        surprise = max(-MAX_SURPRISE, min(MAX_SURPRISE, seconds / predicted - 1.0))
        shares = [part / predicted for part in parts]
        step = LEARNING_RATE * surprise / sum(share * share for share in shares)
        for index, share in enumerate(shares):
            factor = self.factors[index] * (1.0 + step * share)
            self.factors[index] = max(1.0 / MAX_DRIFT, min(MAX_DRIFT, factor))

    def _parts(self, load: StepLoad) -> tuple[float, float, float]:
        growth = self._layers.seconds(load.num_rows) + self._head.seconds(load.num_sampled) - self._floor
        if load.drawn:
            growth += load.num_sampled * self._times.drawn_row_s
        attention = self._times.key_s * load.num_keys + self._times.row_key_s * load.num_draft_keys
        floor_factor, growth_factor, attention_factor = self.factors
        return self._floor * floor_factor, max(0.0, growth) * growth_factor, attention * attention_factor
