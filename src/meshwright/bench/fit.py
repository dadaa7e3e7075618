"""Fits lines and knees to measured points, robust against single outliers."""

import itertools
import math
import statistics
from collections.abc import Sequence

import msgspec


class FittedLine(msgspec.Struct, frozen=True, kw_only=True):
    """y = start + slope x; ``error`` is the median relative distance of the points."""

    start: float
    slope: float
    error: float

    def at(self, x: float) -> float:
        """Returns y at x."""
        return self.start + self.slope * x


def fit_line(xs: Sequence[float], ys: Sequence[float]) -> FittedLine:
    """Returns the line of least sum of |y - line| / y, with neither start nor slope negative.

    Such a line passes through two points, or through one point with zero start or zero slope: all are tried.
    """
    points = list(zip(xs, ys, strict=True))
    candidate_lines = [(0.0, y / x) for x, y in points if x > 0] + [(y, 0.0) for _, y in points]
    for (x, y), (x2, y2) in itertools.combinations(points, 2):
        if x2 != x:
            slope = (y2 - y) / (x2 - x)
            candidate_lines.append((y - slope * x, slope))

    def distances(line: tuple[float, float]) -> list[float]:
        return [abs(y - line[0] - line[1] * x) / y for x, y in points]

    start, slope = min((line for line in candidate_lines if min(line) >= 0), key=lambda line: sum(distances(line)))
    return FittedLine(start=start, slope=slope, error=statistics.median(distances((start, slope))))


class Knee(msgspec.Struct, frozen=True, kw_only=True):
    """y = max(floor, slope x), with the knee at x = ``at``; ``error`` is the median distance of the points in log y."""

    at: float
    floor: float
    slope: float
    error: float


def fit_knee(xs: Sequence[float], ys: Sequence[float]) -> Knee | None:
    """Returns the knee of least sum of |log (y / max(floor, slope x))|; None if no points lie on one of its sides.

    The best floor and the best slope each pass through a point: all pairs are tried, after all constants and all lines
    from the origin, which win ties.
    """
    points = sorted(zip(xs, ys, strict=True))

    def distances(floor: float, slope: float) -> list[float]:
        return [abs(math.log(y / max(floor, slope * x))) for x, y in points]

    constants, lines = [(y, 0.0) for _, y in points], [(0.0, y / x) for x, y in points]
    knees = [(floor, slope) for floor, _ in constants for _, slope in lines]
    floor, slope = min([*constants, *lines, *knees], key=lambda knee: sum(distances(*knee)), default=(0.0, 0.0))
    if not slope or not points[0][0] < floor / slope < points[-1][0]:
        return None
    return Knee(at=floor / slope, floor=floor, slope=slope, error=statistics.median(distances(floor, slope)))


def crossing(xs: Sequence[float], ys: Sequence[float], level: float) -> float | None:
    """Returns the x at which y first rises above ``level``, interpolated in logarithms; None if it does not."""
    points = sorted(zip(xs, ys, strict=True))
    for (x, y), (x2, y2) in itertools.pairwise(points):
        if y <= level < y2:
            log_share = math.log(level / y) / math.log(y2 / y)
            return float(x * (x2 / x) ** log_share)
    return None
