"""Sums of numbers or arrays, and structs whose figures are arrays with one entry per candidate."""

import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np

from meshwright.algebra.sizes import Number

T = TypeVar("T")


def total(values: Iterable[Number]) -> Number:
    """Returns the sum of numbers or arrays, added from first to last; 0.0 for none."""
    return functools.reduce(operator.add, values, 0.0)


def largest(values: Iterable[Number]) -> Number:
    """Returns the elementwise maximum of numbers or arrays, at least 0."""
    return functools.reduce(np.maximum, values, 0.0)


def map_figures(change: Callable[..., Any], *parts: Any) -> Any:
    """Applies ``change`` to corresponding leaves of structs, dicts and tuples of one shape; returns that shape of
    results.

    Dicts may differ in their keys; only common keys remain."""
    first = parts[0]
    if isinstance(first, msgspec.Struct):
        fields = first.__struct_fields__
        return type(first)(**{name: map_figures(change, *(getattr(part, name) for part in parts)) for name in fields})
    if isinstance(first, dict):
        common_keys = [key for key in first if all(key in part for part in parts)]
        return {key: map_figures(change, *(part[key] for part in parts)) for key in common_keys}
    if isinstance(first, list | tuple):
        return type(first)(map_figures(change, *siblings) for siblings in zip(*parts, strict=True))
    return change(*parts)


def select(parts: T, index: Number) -> T:
    """Returns the struct with ``value[index]`` for each array; numbers and other fields stay."""
    entry: T = map_figures(lambda value: value[index] if isinstance(value, np.ndarray) and value.ndim else value, parts)
    return entry


def stack(parts: Sequence[T]) -> T:
    """Returns one struct whose figures are arrays, with an entry for each struct of ``parts``."""
    stacked_struct: T = map_figures(lambda *values: np.array(values), *parts)
    return stacked_struct


def as_python(parts: T) -> T:
    """Converts NumPy scalars to Python's numbers; arrays stay."""

    def one(value: Any) -> Any:
        return value.item() if isinstance(value, np.generic | np.ndarray) and not value.ndim else value

    python_parts: T = map_figures(one, parts)
    return python_parts
