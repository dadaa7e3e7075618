"""Lists the shapes available for a number of chips: tori of optically switched cubes, parts of a pod, slices.

Sources: Jouppi et al., "TPU v4: An Optically Reconfigurable Supercomputer" (2023);
How to Scale Your Model, section 2.2.
"""

import math

from meshwright.core.errors import CannotRunError, InputError
from meshwright.spec.chip import Chip, catalogued, chip
from meshwright.spec.cluster import OPEN_SHAPE, Cluster, make_cluster, parse_cluster
from meshwright.spec.cluster_shapes import ClusterShape, can_twist, is_offered


def parse_clusters(text: str) -> tuple[Cluster, ...]:
    """Returns every cluster of ``"v5p:4096chips"``, best first; the one cluster of any other text."""
    match = OPEN_SHAPE.fullmatch(text.strip())
    if match is None:
        return (parse_cluster(text),)
    return slice_shapes(chip(match.group(1)), int(match.group(2)))


def slice_shapes(chip: Chip, num_chips: int) -> tuple[Cluster, ...]:
    """Returns every cluster of ``num_chips``, highest bisection first.

    Chips joined by optical switches form any torus of whole 4x4x4 cubes, also twisted where the shape allows, or a box
    inside one cube. Two-axis chips form a rectangle in a pod. If a pod has fewer chips, several equal slices are
    joined, as few as possible. Switched chips form whole domains. Raises CannotRunError if no shape has that number.
    """
    if num_chips < 1:
        raise InputError(f"{chip.name}:{num_chips}chips has no chips. Give a number of at least 1.")
    if chip.topology == "host":
        return (make_cluster(chip, (num_chips,)),)
    if chip.topology == "switched":
        domain = math.gcd(num_chips, chip.domain_chips or num_chips)
        return (make_cluster(chip, (domain, num_chips // domain)),)
    min_slices = -(-num_chips // (chip.max_chips or num_chips))
    # several slices only where a pod is too small, as few as possible
    max_slices = 1 if min_slices == 1 or chip.dcn_bytes_per_s is None else num_chips
    for num_slices in (count for count in range(min(min_slices, max_slices), max_slices + 1) if num_chips % count == 0):
        all_shapes = _tori(chip, num_chips // num_slices)
        shapes = [shape for shape in all_shapes if is_offered(chip, shape)] or all_shapes
        clusters = [make_cluster(chip, shape, num_slices=num_slices) for shape in shapes]
        if clusters:
            twists = [cluster.shape for cluster in clusters if can_twist(chip, cluster.shape)]
            twisted = [make_cluster(chip, shape, num_slices=num_slices, twisted=True) for shape in twists]
            # shorter axes first among equals; a twisted torus follows its plain one
            return tuple(
                sorted([*clusters, *twisted], key=lambda c: (-bisection_links(c), sum(c.shape), c.shape, c.twisted))
            )
    raise CannotRunError(f"no slices of {chip.name} have {num_chips:,} chips. {_advice(chip, num_chips)}")


def slice_note(cluster: Cluster) -> list[str]:
    """Returns a line if no such slice is offered, which also says if none can be compiled; else []."""
    if is_offered(cluster.chip, cluster.shape):
        return []
    slices = ", ".join(catalogued(cluster.chip, "libtpu").slices) + ", cubes of 4x4x4" * (len(cluster.shape) == 3)
    tail = "" if compiles(cluster.shape) else ", and no program can be compiled for it: libtpu takes hosts of 2x2 chips"
    return [f"{cluster.short_name} is not a slice that is offered ({slices}){tail}"]


def compiles(shape: ClusterShape) -> bool:
    """True if libtpu compiles for this shape: of two axes, of one chip, or of hosts of 2x2 chips in the first two."""
    return len(shape) == 2 or math.prod(shape) == 1 or all(size % 2 == 0 for size in shape[:2])


def bisection_links(cluster: Cluster) -> int:
    """Counts the links cut when the longest axis of a slice is halved, which bounds an AllToAll. Ignores twists."""
    longest_axis = max(range(len(cluster.shape)), key=lambda axis: cluster.shape[axis])
    num_rings = math.prod(cluster.shape) // cluster.shape[longest_axis]
    return num_rings * (1 + cluster.wraps[longest_axis])


def _tori(chip: Chip, num_chips: int) -> list[ClusterShape]:
    """Lists the shapes of one slice, sizes ascending."""
    axes = chip.num_ici_axes or 1
    cube = chip.wrap_multiple if axes == 3 else None
    if chip.max_chips is not None and num_chips > chip.max_chips:
        return []
    if cube is not None and num_chips % cube**3 == 0:
        return [tuple(cube * size for size in box) for box in _boxes(num_chips // cube**3, axes)]
    longest = cube or max(chip.pod_shape, default=num_chips)
    return [box for box in _boxes(num_chips, axes) if box[-1] <= longest and all(size.bit_count() == 1 for size in box)]


def _boxes(volume: int, num_axes: int, least: int = 1) -> list[ClusterShape]:
    """Lists the factorings of a volume into ascending sizes."""
    if num_axes == 1:
        return [(volume,)] if volume >= least else []
    max_first = round(volume ** (1 / num_axes)) + 1
    return [
        (first, *rest)
        for first in range(least, max_first + 1)
        if volume % first == 0
        for rest in _boxes(volume // first, num_axes - 1, first)
    ]


def _advice(chip: Chip, num_chips: int) -> str:
    """Names the nearest numbers of chips that have a shape."""
    cube = (chip.wrap_multiple or 1) ** 3 if chip.num_ici_axes == 3 else 0
    if cube and num_chips > cube:
        fewer_chips = num_chips // cube * cube
        return f"Slices are whole cubes of {cube}: take {fewer_chips:,} or {fewer_chips + cube:,}."
    fewer_chips = 1 << (num_chips.bit_length() - 1)
    return f"Slices below a {'cube' if cube else 'pod'} are powers of two: take {fewer_chips:,} or {2 * fewer_chips:,}."
