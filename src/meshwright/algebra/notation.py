"""Sharded arrays in the book's notation: ``A[I_XY, J]{U_Z}``, parsed and printed."""

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from meshwright.core.errors import InputError, nearest
from meshwright.core.notation import join_axes, read_array

Sizes = Mapping[str, Any]
"""Name of a dim or of a mesh axis -> its size: an int, or a NumPy array with one entry per candidate."""


class ShardedArray(msgspec.Struct, frozen=True):
    """A named array: its dims, and for each dim the mesh axes that split it, major to minor.

    ``unreduced`` are the axes over which the blocks still have to be summed, ``{U_X}``; ``dtype`` "" is the training
    state's."""

    name: str
    dims: tuple[str, ...]
    axes: tuple[tuple[str, ...], ...]
    unreduced: tuple[str, ...] = ()
    dtype: str = ""

    def __post_init__(self) -> None:
        if len(self.dims) != len(self.axes):
            raise AssertionError(f"{self.name}: {len(self.dims)} dims, {len(self.axes)} lists of axes")
        dim_of: dict[str, str] = {}
        for dim, axes in zip(self.dims, self.axes, strict=True):
            for axis in axes:
                if axis in dim_of:
                    dims_text = f"{dim_of[axis]} and {dim}" if dim_of[axis] != dim else f"{dim} twice"
                    raise InputError(
                        f"{self.name}[...] uses mesh axis {axis} for {dims_text}; an axis can split one dim of an "
                        f"array once. Remove it from one of them."
                    )
                dim_of[axis] = dim
        for axis in self.unreduced:
            if axis in dim_of:
                raise InputError(
                    f"{self.name}[...] is split over {axis} along {dim_of[axis]} and unreduced over it; "
                    f"it can only be one of the two. Remove one."
                )
        if len(set(self.unreduced)) != len(self.unreduced):
            raise InputError(f"{self.name}[...] is unreduced over {join_axes(self.unreduced)}; name each axis once.")
        if len(set(self.dims)) != len(self.dims):
            raise InputError(f"{self.name}[{', '.join(self.dims)}] names a dim twice; give each dim its own name.")

    def __str__(self) -> str:
        dims_text = ", ".join(
            dim + (f"_{join_axes(axes)}" if axes else "") for dim, axes in zip(self.dims, self.axes, strict=True)
        )
        unreduced_text = f"{{U_{join_axes(self.unreduced)}}}" if self.unreduced else ""
        return f"{self.name}[{dims_text}]{unreduced_text}"

    def axes_of(self, dim: str) -> tuple[str, ...]:
        """Returns the mesh axes that split ``dim``; () when it is whole or not a dim of this array."""
        return self.axes[self.dims.index(dim)] if dim in self.dims else ()

    def dim_on(self, axis: str) -> str | None:
        """Returns the dim that ``axis`` splits, or None."""
        return next((d for d, axes in zip(self.dims, self.axes, strict=True) if axis in axes), None)

    def resharded(
        self, changes: Mapping[str, tuple[str, ...]], *, unreduced: tuple[str, ...] | None = None
    ) -> "ShardedArray":
        """Returns the array with other axes on the dims named in ``changes`` (and other unreduced axes)."""
        axes = tuple(changes.get(d, a) for d, a in zip(self.dims, self.axes, strict=True))
        unreduced_axes = self.unreduced if unreduced is None else unreduced
        return msgspec.structs.replace(self, axes=axes, unreduced=unreduced_axes)

    def like(self, other: "ShardedArray") -> "ShardedArray":
        """Returns the array with the axes that ``other`` has on the dims that both have."""
        return self.resharded({d: other.axes_of(d) for d in self.dims if d in other.dims})

    def replace(self, **changes: Any) -> "ShardedArray":
        """Returns the array with some fields replaced."""
        return msgspec.structs.replace(self, **changes)

    @property
    def spread(self) -> tuple[str, ...]:
        """Every mesh axis that splits some dim, in dim order."""
        return tuple(axis for axes in self.axes for axis in axes)


def parse_array(text: str) -> ShardedArray:
    """Parses an array written as ``Name[B_X, D_{fsdp,tensor}]{U_Y}`` (or with a dtype for the name: ``bf16[B,D]``).

    Raises InputError for anything that is not this notation, and for impossible shardings.
    """
    return ShardedArray(*read_array(text))


def check(array: ShardedArray, dims: Sizes, mesh: Sizes) -> None:
    """Raises InputError unless every dim and axis has a size and every split is even."""
    for axis in (*array.spread, *array.unreduced):
        if axis not in mesh:
            raise InputError(f"{array} uses mesh axis {axis}, which the mesh lacks.{nearest(axis, mesh)}")
    for dim, axes in zip(array.dims, array.axes, strict=True):
        if dim not in dims:
            raise InputError(f"dim {dim} of {array} has no size. Give it with --dims {dim}=...")
        num_parts = product(mesh[a] for a in axes)
        if dims[dim] % num_parts:
            has_groups = dim[-1] == "g" and dim != "Pg"  # of inputs that share a scale
            remedy = (
                "weights without groups of inputs (int8, fp8)"
                if has_groups
                else f"a {dim} that is a multiple of {num_parts}"
            )
            raise InputError(
                f"{dim}={dims[dim]} of {array} does not divide by {'x'.join(axes)}={num_parts}. "
                f"Use {remedy}, or smaller axes."
            )


def product(values: Any) -> Any:
    """Returns the product of ints or arrays; 1 for none."""
    return math.prod(values)


def local_elements(array: ShardedArray, dims: Sizes, mesh: Sizes) -> Any:
    """Returns the elements of one device's block; sizes may be NumPy arrays, and nothing is checked."""
    return product(dims[d] for d in array.dims) / product(mesh[a] for a in array.spread)
