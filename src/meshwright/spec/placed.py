"""Reads a strategy's placement: the parts of mesh axes on physical axes, and the order of the chips in a mesh."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

TORUS_AXES = "xyzuvw"
SLICES = "slices"

_PART = re.compile(r"(?:(\d+) of )?(\S+) \((\d+)\)")


class Part(NamedTuple):
    """A factor of a mesh axis on one physical axis or level of switches."""

    link: str
    size: int

    @property
    def on_torus(self) -> bool:
        return self.link in TORUS_AXES


def parts_of(placement: Mapping[str, str], axis: str) -> tuple[Part, ...]:
    """Returns the parts of a mesh axis, major to minor; () for one chip.

    Torus axes come first, the longest before shorter ones, since sums cross them in this order; then levels of the
    network, outermost first.
    ``placement`` is that of a strategy, such as ``{"fsdp": "8 of x (16) x y (8)"}``.
    """
    found = _PART.findall(placement.get(axis, ""))
    parts = [Part(link, int(factor or size)) for factor, link, size in reversed(found)]
    return tuple(sorted(parts, key=lambda part: -part.size if part.on_torus else 0))


def is_on_torus(placement: Mapping[str, str]) -> bool:
    """True if a placement names a torus axis."""
    return any(part.on_torus for axis in placement for part in parts_of(placement, axis))


def mesh_order(
    mesh: Mapping[str, int], placement: Mapping[str, str], *, links: Sequence[str] = (*TORUS_AXES, SLICES)
) -> np.ndarray:
    """Returns the chip numbers that a placement assigns to the mesh, as an array of the mesh's shape.

    ``links`` are from the innermost out. Chips are numbered row-major over them, outermost first: slices, then z, y, x;
    or nodes, then the chips of a domain. On one link the mesh's minor axes are inside.
    """
    parts = {axis: parts_of(placement, axis) for axis in mesh}
    placed = [(a, part) for link in reversed(links) for a in mesh for part in parts[a] if part.link == link]
    numbers = np.arange(math.prod(mesh.values())).reshape([part.size for _, part in placed])
    order = [placed.index((axis, part)) for axis in mesh for part in parts[axis]]
    return numbers.transpose(order).reshape(tuple(mesh.values()))
