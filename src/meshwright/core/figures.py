"""Figures that persons give: positive and finite, or refused where they are read."""

import math
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec


def check_figures(given: msgspec.Struct, what: str, *, may_be_zero: Iterable[str] = ()) -> None:
    """Raise ValueError for a number of a struct, or of a table in it, that is not finite and above 0.

    Fields ``may_be_zero`` are latencies and the like. msgspec makes of the error one that says where it stands.
    """
    for name, key, value in _numbers(given):
        wanted = "a number of at least 0" if name in may_be_zero else "a positive number"
        if not math.isfinite(value) or value < 0 or (value == 0 and name not in may_be_zero):
            raise ValueError(f"{key} of {what} is {value:g}, give {wanted}")


def _numbers(given: msgspec.Struct) -> Iterator[tuple[str, str, float]]:
    """Field, place and value of every number."""
    for name in given.__struct_fields__:
        value: Any = getattr(given, name)
        for key, one in value.items() if isinstance(value, dict) else [("", value)]:
            if isinstance(one, int | float) and not isinstance(one, bool):
                yield name, f"{name}.{key}" if key else name, one
