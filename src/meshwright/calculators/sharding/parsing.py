"""One product as it is written, and the exact block that a device holds of an array of given sizes."""

import re

from meshwright.algebra.notation import ShardedArray, Sizes, check, parse_array, product
from meshwright.core.errors import InputError

_ARROW = re.compile(r"\s*(?:->|→)\s*")
_TIMES = re.compile(r"\]\s*(\{[^\]]*?\})?\s*[*.@·]\s*")


def parse_einsum(text: str) -> tuple[ShardedArray, ShardedArray, ShardedArray]:
    """(lhs, rhs, out) of ``In[B_X,D_Y] * Win[D_X,F_Y] -> Tmp[B_X,F_Y]``; the product sign may be * . @ or ·."""
    sides = _ARROW.split(text.strip())
    if len(sides) != 2:
        raise InputError(f"{text.strip()!r} is not one product. Write A[I,J] * B[J,K] -> C[I,K].")
    cut = _TIMES.search(sides[0])
    if cut is None:
        raise InputError(f"{sides[0]!r} is not a product of two arrays. Write A[I,J] * B[J,K] before the arrow.")
    lhs = parse_array(sides[0][: cut.start() + 1] + (cut.group(1) or ""))
    rhs, out = parse_array(sides[0][cut.end() :]), parse_array(sides[1])
    for dim in out.dims:
        if dim not in lhs.dims and dim not in rhs.dims:
            raise InputError(f"dim {dim} of {out} is in neither {lhs} nor {rhs}; an output dim comes from an input.")
    return _distinct_names(lhs, rhs, out)


def _distinct_names(*arrays: ShardedArray) -> tuple[ShardedArray, ShardedArray, ShardedArray]:
    """Arrays named by their dtype, or all alike, get the names A, B, C."""
    names = [a.name for a in arrays]
    if len(set(names)) == 3 and not any(a.dtype for a in arrays):
        return arrays[0], arrays[1], arrays[2]
    lhs, rhs, out = (a.replace(name=n) for a, n in zip(arrays, ("A", "B", "C"), strict=True))
    return lhs, rhs, out


def local_shape(array: ShardedArray, dims: Sizes, mesh: Sizes) -> tuple[int, ...]:
    """Shape of the block that one device holds. Raises InputError when a split is uneven."""
    check(array, dims, mesh)
    return tuple(dims[d] // product(mesh[a] for a in axes) for d, axes in zip(array.dims, array.axes, strict=True))


def bytes_per_device(array: ShardedArray, dims: Sizes, mesh: Sizes, *, element_bytes: float) -> float:
    """Bytes of the block that one device holds."""
    return product(local_shape(array, dims, mesh)) * element_bytes


def bytes_total(array: ShardedArray, dims: Sizes, mesh: Sizes, *, element_bytes: float) -> float:
    """Bytes over all devices of the mesh, copies counted (How to Scale Your Model, section 3.1)."""
    return bytes_per_device(array, dims, mesh, element_bytes=element_bytes) * product(mesh.values())
