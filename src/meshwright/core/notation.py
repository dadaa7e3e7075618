"""Reads mesh axes and arrays in the book's notation, ``A[I_XY, J]{U_Z}``, and writes axes."""

import re

from meshwright.core.dims import DTYPE_BYTES
from meshwright.core.errors import InputError, nearest

Axes = tuple[str, ...]

_ARRAY = re.compile(r"\s*([A-Za-z][\w']*)?\s*\[([^\[\]]*)\]\s*(?:\{\s*U_([^{}]*|\{[^{}]*\})\s*\})?\s*")
_DTYPE = re.compile(r"(?:bf|fp|tf|u?int|float|f|e[0-9]m)[0-9]+\w*")
_DIM = re.compile(r"\s*([A-Za-z][A-Za-z0-9']*)(?:_(\{[^{}]*\}|[A-Za-z][A-Za-z0-9]*))?\s*")
_LETTERS = re.compile(r"(?:[A-Z][0-9]*)+")
_AXIS = re.compile(r"[A-Za-z]\w*")

MOST_CHARACTERS = 20_000
"""Limit on the length of an expression: some patterns take time quadratic in it."""


def compact(text: str) -> str:
    """Returns an expression with single spaces. Raises InputError if it is longer than `MOST_CHARACTERS`."""
    spaced_text = " ".join(text.split())
    if len(spaced_text) > MOST_CHARACTERS:
        raise InputError(f"{spaced_text!r} is too long. Give an expression of at most {MOST_CHARACTERS:,} characters.")
    return spaced_text


def join_axes(axes: Axes) -> str:
    """Returns axes as a subscript: XY, tensor or {data,fsdp}."""
    if all(_LETTERS.fullmatch(a) and len(a) == 1 for a in axes):
        return "".join(axes)
    is_bare = len(axes) == 1 and axes[0].isalnum() and parse_axes(axes[0]) == axes
    return axes[0] if is_bare else "{" + ",".join(axes) + "}"


def parse_axes(text: str) -> Axes:
    """Returns the axes in a subscript: ``XY`` -> (X, Y), ``{data,fsdp}`` -> (data, fsdp), else raises InputError."""
    axes_text = text.strip()
    if axes_text.startswith("{"):
        axes = tuple(axis_text.strip() for axis_text in axes_text[1:-1].split(","))
    elif _LETTERS.fullmatch(axes_text):
        axes = tuple(re.findall(r"[A-Z][0-9]*", axes_text))
    else:
        axes = (axes_text,)
    if not all(_AXIS.fullmatch(axis) for axis in axes):
        raise InputError(f"{axes_text!r} does not name mesh axes. Write X, XY, tensor or {{data,fsdp}}.")
    return axes


def read_array(text: str) -> tuple[str, tuple[str, ...], tuple[Axes, ...], Axes, str]:
    """Returns the name, dims, axes of each dim, unreduced axes and dtype of an array in this notation.

    The name is "A" and the dtype "" if neither is given; a dtype in place of the name, such as ``bf16[I, J]``, is both.
    Raises InputError for anything that is not this notation.
    """
    text = compact(text)
    array_match = _ARRAY.fullmatch(text)
    if array_match is None:
        raise InputError(f"{text.strip()!r} is not a sharded array. Write for example A[I_X, J] or W[D_{{fsdp}}, F_Y].")
    name, dims_text, unreduced_text = array_match.groups()
    dim_names, axes_of_dims = [], []
    for dim in re.split(r",(?![^{}]*\})", dims_text) if dims_text.strip() else ():
        dim_match = _DIM.fullmatch(dim)
        if dim_match is None:
            raise InputError(f"{dim.strip()!r} in {text.strip()!r} is no dim. Write D, D_X, D_XY, D_{{fsdp,tensor}}.")
        dim_names.append(dim_match.group(1))
        axes_of_dims.append(parse_axes(dim_match.group(2)) if dim_match.group(2) else ())
    if name and _DTYPE.fullmatch(name) and name not in DTYPE_BYTES:
        raise InputError(f"{name!r} in {text.strip()!r} is not a dtype.{nearest(name, DTYPE_BYTES)}")
    dtype = name if name in DTYPE_BYTES else ""
    unreduced_axes = () if unreduced_text is None else parse_axes(unreduced_text)
    return name or "A", tuple(dim_names), tuple(axes_of_dims), unreduced_axes, dtype
