"""Groups on switches for many meshes at once: NumPy arrays in, rates of arrays out, no loop over meshes."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from meshwright.cost.legs import switched
from meshwright.cost.links import physical_links
from meshwright.cost.network import GroupRates, leg_rates
from meshwright.spec.calibration import Calibration
from meshwright.spec.cluster import Cluster

Sizes = Any
"""Whole numbers, one or an array of them."""


def switched_split(cluster: Cluster, *, stride: Sizes, size: Sizes) -> tuple[np.ndarray, ...]:
    """How many members of an axis lie on each level of a switched cluster, innermost first.

    ``stride`` is the product of the mesh axes more minor than this one. They have filled a level of n chips up to
    gcd(n, stride), and this axis takes what it shares with the rest: the same split as ``place_axes`` makes axis by
    axis, since gcd(n, a b) = gcd(n, a) gcd(n / gcd(n, a), b).
    """
    behind, rest = np.asarray(stride, dtype=np.int64), np.asarray(size, dtype=np.int64)
    members = []
    for level in cluster.shape[:-1]:
        filled = np.gcd(behind, level)
        inside = np.gcd(rest, level // filled)
        members.append(inside)
        behind, rest = behind // filled, rest // inside
    return (*members, rest)


def switched_rates(cluster: Cluster, members: Sequence[Sizes], calibration: Calibration | None = None) -> GroupRates:
    """The rates of groups with so many members on each level: those of ``group_rates``, as arrays.

    A group of several mesh axes has the product of their members on each level.
    """
    legs = [switched(link, np.asarray(on)) for link, on in zip(physical_links(cluster), members, strict=True)]
    return leg_rates(legs, calibration)


def switched_group_rates(
    cluster: Cluster, *, stride: Sizes, size: Sizes, calibration: Calibration | None = None
) -> GroupRates:
    """The rates of one mesh axis, or of neighbouring ones together, for arrays of strides and sizes."""
    return switched_rates(cluster, switched_split(cluster, stride=stride, size=size), calibration)
