"""Interval arithmetic on blocks of indices: bounds of an expression over all pairs of a block.

A mask called with `Ranges` instead of indices returns, for every block, whether it is true for all pairs and whether it
may be true for some. Bounds are safe, not always tight: an empty or full block may be classified as partial, never the
reverse.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

AnyArray = Any
"""A NumPy or JAX array (planning packages do not import JAX)."""

Index = Any
"""An operand of masks: a number, a NumPy or JAX array, or `Ranges`."""


class NoRangesError(Exception):
    """A function uses an operation without a rule for ranges; evaluate it pair by pair instead."""


def namespace(*values: object) -> Any:
    """Returns the array API namespace of the first value that has one (`Functions` for ranges), else NumPy."""
    return next((x.__array_namespace__() for x in values if hasattr(x, "__array_namespace__")), np)


class Ranges:
    """Bounds ``low`` and ``high`` of an expression over each block.

    For a Boolean, ``low`` means true for all pairs, ``high`` possibly true for some. ``points`` are exact values of an
    expression of only rows or only columns, with one more dim, the index within a block; else None.
    """

    __array_ufunc__ = None

    def __init__(self, low: AnyArray, high: AnyArray, points: AnyArray | None = None) -> None:
        self.low, self.high, self.points = low, high, points

    @classmethod
    def of(cls, points: AnyArray) -> "Ranges":
        """Returns the ranges (min and max, or all and any) of values whose last dim is the index within a block."""
        xp = namespace(points)
        reductions = (xp.all, xp.any) if points.dtype == bool else (xp.min, xp.max)
        return cls(reductions[0](points, axis=-1), reductions[1](points, axis=-1), points)

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the values."""
        return self.low.dtype  # type: ignore[no-any-return]

    def astype(self, dtype: DTypeLike) -> "Ranges":
        """Converts to a float or integer of at least 32 bits. Raises NoRangesError for any other dtype."""
        target_dtype = np.dtype(dtype)
        if dtype != self.dtype and (target_dtype.kind not in "fi" or target_dtype.itemsize < 4):
            raise NoRangesError(f"conversion to {target_dtype} has no rule.")
        return _mapped(lambda x: x.astype(dtype), self)

    def __array_namespace__(self, **_: object) -> "type[Functions]":
        return Functions

    def __add__(self, other: Index) -> "Ranges":
        return _combined(lambda x, y: x + y, self, other)

    __radd__ = __add__

    def __sub__(self, other: Index) -> "Ranges":
        return self + -_ranges(other)

    def __rsub__(self, other: Index) -> "Ranges":
        return _ranges(other) + -self

    def __neg__(self) -> "Ranges":
        if self.dtype.kind == "u":
            raise NoRangesError("unsigned numbers wrap around.")
        return Ranges(-self.high, -self.low, None if self.points is None else -self.points)

    def __mul__(self, other: Index) -> "Ranges":
        left, right = self, _ranges(other)
        products = [x * y for x in (left.low, left.high) for y in (right.low, right.high)]
        xp = namespace(*products)
        low, high = products[0], products[0]
        for product in products[1:]:
            low, high = xp.minimum(low, product), xp.maximum(high, product)
        return Ranges(low, high, _points(lambda x, y: x * y, left, right))

    __rmul__ = __mul__

    def __floordiv__(self, other: Index) -> "Ranges":
        return _mapped(lambda x: x // _positive(other), self)

    def __truediv__(self, other: Index) -> "Ranges":
        return _mapped(lambda x: x / _positive(other), self)

    def __mod__(self, other: Index) -> "Ranges":
        divisor = _positive(other)
        if self.points is not None:
            return Ranges.of(self.points % divisor)
        xp = namespace(self.low)
        in_period = self.low // divisor == self.high // divisor
        max_rest = divisor - 1 if (self.low % divisor).dtype.kind in "iu" else divisor
        return Ranges(xp.where(in_period, self.low % divisor, 0), xp.where(in_period, self.high % divisor, max_rest))

    def __abs__(self) -> "Ranges":
        xp = namespace(self.low)
        abs_low, abs_high = xp.abs(self.low), xp.abs(self.high)
        crosses = (self.low < 0) & (self.high > 0)
        points = None if self.points is None else xp.abs(self.points)
        return Ranges(xp.where(crosses, 0, xp.minimum(abs_low, abs_high)), xp.maximum(abs_low, abs_high), points)

    def __le__(self, other: Index) -> "Ranges":
        operand = _ranges(other)
        return Ranges(self.high <= operand.low, self.low <= operand.high, _points(lambda x, y: x <= y, self, operand))

    def __lt__(self, other: Index) -> "Ranges":
        return ~(_ranges(other) <= self)

    def __ge__(self, other: Index) -> "Ranges":
        return _ranges(other) <= self

    def __gt__(self, other: Index) -> "Ranges":
        return _ranges(other) < self

    def __eq__(self, other: object) -> "Ranges":  # type: ignore[override]
        operand = _ranges(other)
        is_equal = (self.low == self.high) & (operand.low == operand.high) & (self.low == operand.low)
        may_be_equal = (self.low <= operand.high) & (operand.low <= self.high)
        return Ranges(is_equal, may_be_equal, _points(lambda x, y: x == y, self, operand))

    def __ne__(self, other: object) -> "Ranges":  # type: ignore[override]
        return ~(self == other)

    __hash__ = None  # type: ignore[assignment]

    def __invert__(self) -> "Ranges":
        _boolean(self)
        return Ranges(~self.high, ~self.low, None if self.points is None else ~self.points)

    def __and__(self, other: Index) -> "Ranges":
        return _combined(lambda x, y: x & y, _boolean(self), _boolean(_ranges(other)))

    __rand__ = __and__

    def __or__(self, other: Index) -> "Ranges":
        return _combined(lambda x, y: x | y, _boolean(self), _boolean(_ranges(other)))

    __ror__ = __or__

    def __bool__(self) -> bool:
        raise NoRangesError("a mask branches on an index. Write it with & and |.")

    def __index__(self) -> int:
        raise NoRangesError("an array is indexed by a range. Use `take`.")

    __iter__ = None


class Functions:
    """The array API functions that have a rule for ranges."""

    @staticmethod
    def minimum(one: Index, two: Index) -> Ranges:
        """Returns the ranges of the elementwise minimum."""
        return _combined(lambda x, y: namespace(x, y).minimum(x, y), one, two)

    @staticmethod
    def maximum(one: Index, two: Index) -> Ranges:
        """Returns the ranges of the elementwise maximum."""
        return _combined(lambda x, y: namespace(x, y).maximum(x, y), one, two)


def take(array: AnyArray, *index: Index) -> Index:
    """Returns ``array[index]``; an index may be a range with points. Raises NoRangesError for any other ranges."""
    range_indices = [x for x in index if isinstance(x, Ranges)]
    if not range_indices:
        return namespace(*index).asarray(array)[index]
    if len(range_indices) > 1 or range_indices[0].points is None:
        raise NoRangesError("a table is indexed by rows and columns together.")
    # plain indices get a dim for points, so that all broadcast
    point_indices = tuple(x.points if isinstance(x, Ranges) else namespace(x).asarray(x)[..., None] for x in index)
    return Ranges.of(array[point_indices])


def _ranges(value: Index) -> Ranges:
    if isinstance(value, Ranges):
        return value
    array = value if hasattr(value, "dtype") else np.asarray(value)
    return Ranges(array, array)


def _mapped(function: Callable[[AnyArray], AnyArray], value: Ranges) -> Ranges:
    """Applies a nondecreasing function to a range."""
    points = None if value.points is None else function(value.points)
    return Ranges(function(value.low), function(value.high), points)


def _combined(function: Callable[[AnyArray, AnyArray], AnyArray], one: Index, two: Index) -> Ranges:
    """Applies a function that is nondecreasing in both arguments."""
    one, two = _ranges(one), _ranges(two)
    return Ranges(function(one.low, two.low), function(one.high, two.high), _points(function, one, two))


def _points(function: Callable[[AnyArray, AnyArray], AnyArray], one: Ranges, two: Ranges) -> AnyArray | None:
    """Returns exact values within blocks if one operand has points and the other is a plain number, else None."""
    point_ranges = [x for x in (one, two) if x.points is not None]
    if len(point_ranges) != 1:
        return None
    plain_range = two if point_ranges[0] is one else one
    if np.ndim(plain_range.low) or plain_range.low is not plain_range.high:
        return None
    return function(*(x.low if x.points is None else x.points for x in (one, two)))


def _positive(value: Index) -> Index:
    if isinstance(value, Ranges) or np.ndim(value) or not value > 0:
        raise NoRangesError("division has a rule only for positive numbers.")
    return value


def _boolean(value: Ranges) -> Ranges:
    if value.dtype != bool:
        raise NoRangesError("bitwise operations have a rule only for Booleans.")
    return value
