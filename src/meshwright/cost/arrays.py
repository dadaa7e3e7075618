"""Numbers and arrays of them alike: sums, and structs whose figures have one entry per candidate."""

import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np

Number = Any
"""A float, an int, or a NumPy array with one entry per candidate."""

T = TypeVar("T")


def total(values: Iterable[Number]) -> Number:
    """The sum of numbers or arrays, added one after the other."""
    return functools.reduce(operator.add, values, 0.0)


def largest(values: Iterable[Number]) -> Number:
    """The largest at every place, at least 0."""
    return functools.reduce(np.maximum, values, 0.0)


def mapped(change: Callable[..., Any], *parts: Any) -> Any:
    """Structs, dicts and tuples of one shape with ``change`` applied to what all have at each place.

    Dicts may differ in their keys: those that all have are left.
    """
    first = parts[0]
    if isinstance(first, msgspec.Struct):
        fields = first.__struct_fields__
        return type(first)(**{name: mapped(change, *(getattr(part, name) for part in parts)) for name in fields})
    if isinstance(first, dict):
        keys = [key for key in first if all(key in part for part in parts)]
        return {key: mapped(change, *(part[key] for part in parts)) for key in keys}
    if isinstance(first, list | tuple):
        return type(first)(mapped(change, *places) for places in zip(*parts, strict=True))
    return change(*parts)


def taken(parts: T, index: Any) -> T:
    """The entries of all arrays that an index picks; numbers and plain fields stay."""
    found: T = mapped(lambda value: value[index] if isinstance(value, np.ndarray) and value.ndim else value, parts)
    return found


def stacked(parts: Sequence[T]) -> T:
    """One struct whose figures are arrays, with an entry for each of the given structs."""
    found: T = mapped(lambda *values: np.array(values), *parts)
    return found


def plain(parts: T) -> T:
    """The figures as Python's own numbers; arrays stay."""

    def one(value: Any) -> Any:
        return value.item() if isinstance(value, np.generic | np.ndarray) and not value.ndim else value

    found: T = mapped(one, parts)
    return found
