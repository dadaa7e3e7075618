"""Placements of a mesh on a cluster: the physical links that each mesh axis uses."""

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec
from msgspec.structs import replace

from meshwright.core.errors import CannotRunError, InputError
from meshwright.cost.network.links import Link, Parts, physical_links
from meshwright.spec.cluster import Cluster

Factors = tuple[int, ...]
MeshLayout = tuple[tuple[tuple[int, int], ...], ...]
"""For each link its factors, outermost first, as (index of the mesh axis, size)."""

MAX_PLACEMENTS = 12


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """A mesh placed on the links of a cluster."""

    mesh: dict[str, int]
    links: tuple[Link, ...]

    def describe(self) -> dict[str, str]:
        """Maps each mesh axis to its factors: ``{"data": "5 of y (20) x 7 of z (28)", "tensor": "4 of z (28)"}``."""
        return {axis: " x ".join(self._words(axis)) or "1 chip" for axis in self.mesh}

    def _words(self, axis: str) -> list[str]:
        return [
            f"{link.name} ({link.size})" if factor == link.size else f"{factor} of {link.name} ({link.size})"
            for link in self.links
            for name, factor in link.parts
            if name == axis
        ]


def place_axes(cluster: Cluster, mesh: Mapping[str, int]) -> tuple[Placement, ...]:
    """Returns candidate placements of a mesh (axis -> size, major to minor), at most ``MAX_PLACEMENTS``, first
    placements whose mesh axes share the fewest physical axes; () if there is none.

    On a torus a mesh axis is factored over the physical axes; the minor axes are inside as contiguous blocks. A
    placement is dropped if another is as good on every axis. On switches the minor axes fill the domain first. The
    outermost factors of the major-most axes cross slices. Raises InputError unless mesh and cluster are equally large.
    """
    links = physical_links(cluster)
    if math.prod(mesh.values()) != cluster.num_chips:
        mesh_text = " x ".join(f"{axis} {size}" for axis, size in mesh.items())
        raise InputError(
            f"mesh {mesh_text} has {math.prod(mesh.values())} devices, but {cluster.short_name} has {cluster.num_chips}"
            " chips. Make the two equal."
        )
    # axes of size 1 take no link, and leaving them out lets equal meshes share one cached search
    axis_names = tuple(axis for axis, size in mesh.items() if size > 1)
    axis_sizes = tuple(mesh[axis] for axis in axis_names)
    layouts = _LAYOUTS[cluster.kind](cluster, axis_sizes)
    return tuple(Placement(mesh=dict(mesh), links=_named(links, layout, axis_names)) for layout in layouts)


def place_mesh(cluster: Cluster, mesh: Mapping[str, int]) -> Placement:
    """Returns the placement of a mesh of any axes, which may have fewer devices than the cluster.

    On a torus each mesh axis takes a physical axis that is long enough, and as many as possible fill theirs, which
    closes a ring if it wraps around; if this does not fit, it is the first of `place_axes`. Chips that the mesh leaves
    free have the axis name "". Switches use the first chips and domains. Raises CannotRunError for a mesh larger than
    the cluster, InputError for a mesh that neither fits so nor divides it.
    """
    needed_chips = math.prod(mesh.values())
    if needed_chips > cluster.num_chips:
        raise CannotRunError(
            f"the mesh has {needed_chips} devices, but {cluster.short_name} has {cluster.num_chips} chips. "
            f"Name a larger cluster or a smaller mesh."
        )
    if cluster.kind != "torus":
        laid = place_axes(_first_chips(cluster, needed_chips), mesh)[0]
        return replace(laid, links=tuple(replace(a, size=n) for a, n in zip(laid.links, cluster.shape, strict=True)))
    axis_names, shape = (*mesh, *("",) * (len(cluster.shape) - len(mesh))), cluster.shape
    axis_orders = [
        order
        for order in (itertools.permutations(axis_names) if len(axis_names) == len(shape) else ())
        if all(mesh.get(axis, 1) <= size for axis, size in zip(order, shape, strict=True))
    ]
    if not axis_orders:
        free_axes = {} if cluster.num_chips % needed_chips else {"": cluster.num_chips // needed_chips}
        return replace(place_axes(cluster, {**free_axes, **mesh})[0], mesh=dict(mesh))
    order = max(axis_orders, key=lambda axes: sum(mesh.get(a, 1) == size for a, size in zip(axes, shape, strict=True)))
    links = physical_links(cluster)
    slice_links = [
        replace(link, parts=_parts(("", -(-link.size // mesh.get(axis, 1))), (axis, mesh.get(axis, 1))))
        for axis, link in zip(order, links, strict=False)
    ]
    dcn_links = [replace(link, parts=_parts(("", link.size))) for link in links[len(shape) :]]
    return Placement(mesh=dict(mesh), links=(*slice_links, *dcn_links))


def _parts(*parts: tuple[str, int]) -> Parts:
    return tuple(part for part in parts if part[1] > 1)


def _first_chips(cluster: Cluster, num_needed: int) -> Cluster:
    """Returns the first chips of a host, or the first domains of switches; the whole cluster if one is part full."""
    part_shape, num_left = [], num_needed
    for level_size in cluster.shape:
        part_shape.append(min(num_left, level_size))
        if num_left % part_shape[-1]:
            return cluster
        num_left //= part_shape[-1]
    return cluster.part(tuple(part_shape))


def physical_placement(cluster: Cluster) -> Placement:
    """Returns a placement with each physical axis or level as a mesh axis: x, y, z; domain, nodes, racks; slices."""
    links = physical_links(cluster)
    named_links = tuple(replace(link, parts=((link.name, link.size),)) for link in links)
    return Placement(mesh={link.name: link.size for link in links}, links=named_links)


@functools.lru_cache(maxsize=1 << 14)
def _named(links: tuple[Link, ...], layout: MeshLayout, axis_names: tuple[str, ...]) -> tuple[Link, ...]:
    return tuple(
        replace(link, parts=tuple((axis_names[axis_index], factor) for axis_index, factor in parts))
        for link, parts in zip(links, layout, strict=True)
    )


def _torus_layouts(cluster: Cluster, axis_sizes: Factors) -> tuple[MeshLayout, ...]:
    outer_factors = _take_outermost(axis_sizes, cluster.num_slices)
    inner_sizes = tuple(size // outer for size, outer in zip(axis_sizes, outer_factors, strict=True))
    max_size = max(cluster.shape)
    # the wraparound of a twisted axis closes no ring by itself
    closes_ring = tuple(
        wraps and not (cluster.twisted and size < max_size)
        for size, wraps in zip(cluster.shape, cluster.wraps, strict=True)
    )
    layouts = _split_layouts(cluster.shape, closes_ring, inner_sizes)
    if cluster.num_slices == 1:
        return layouts
    dcn_layout = tuple((axis_index, outer) for axis_index, outer in enumerate(outer_factors) if outer > 1)
    return tuple((*layout, dcn_layout) for layout in layouts)


def _take_outermost(axis_sizes: Factors, num_slices: int) -> Factors:
    """Returns for each axis the factor that crosses slices: as much as possible of the major-most axes."""
    slice_factors = []
    for size in axis_sizes:
        factor = math.gcd(size, num_slices)
        slice_factors.append(factor)
        num_slices //= factor
    return tuple(slice_factors)


@functools.lru_cache(maxsize=1 << 16)
def _fill_levels(shape: Factors, axis_sizes: Factors) -> MeshLayout:
    """Returns the layout on switches: the minor axes fill the innermost level first, as far as they divide its size."""
    sizes_left, layout = axis_sizes, []
    for level_size in shape[:-1]:
        num_free = level_size
        level_factors: list[int] = []
        for axis_size in reversed(sizes_left):
            factor = math.gcd(axis_size, num_free)
            num_free //= factor
            level_factors.insert(0, factor)
        layout.append(tuple(level_factors))
        sizes_left = tuple(axis_size // factor for axis_size, factor in zip(sizes_left, level_factors, strict=True))
    layout.append(sizes_left)
    return tuple(tuple((index, factor) for index, factor in enumerate(parts) if factor > 1) for parts in layout)


_LAYOUTS: dict[str, Callable[[Cluster, Factors], tuple[MeshLayout, ...]]] = {
    "torus": _torus_layouts,
    "switched": lambda cluster, sizes: (_fill_levels(cluster.shape, sizes),),
    "host": lambda cluster, sizes: ((tuple(enumerate(sizes)),),),
}


@functools.lru_cache(maxsize=1 << 16)
def _split_layouts(shape: Factors, wraps: tuple[bool, ...], axis_sizes: Factors) -> tuple[MeshLayout, ...]:
    """Returns the layouts of the sizes (major to minor) over a torus, best first."""
    partial_layouts: list[tuple[Factors, tuple[Factors, ...], tuple[float, ...]]] = [((1,) * len(shape), (), ())]
    for axis_index in reversed(range(len(axis_sizes))):
        extended_layouts = []
        for used_sizes, splits, costs in partial_layouts:
            # the innermost axis matters most: keep more factorings of it
            for factors, cost in _splits(shape, wraps, used_sizes, axis_sizes[axis_index], 2 if not splits else 1):
                inner_sizes = tuple(u * s for u, s in zip(used_sizes, factors, strict=True))
                extended_layouts.append((inner_sizes, (factors, *splits), (cost, *costs)))
        partial_layouts = extended_layouts
    layouts = _not_beaten([(splits, costs) for _, splits, costs in partial_layouts])
    layouts.sort(key=lambda layout: (_shared_axes(layout[0]), sum(layout[1])))
    return tuple(
        tuple(tuple((index, split[i]) for index, split in enumerate(splits) if split[i] > 1) for i in range(len(shape)))
        for splits, _ in layouts[:MAX_PLACEMENTS]
    )


def _shared_axes(splits: tuple[Factors, ...]) -> int:
    """Returns the number of mesh axes beyond the first on each physical axis, summed; 0 if none is shared."""
    return sum(max(0, sum(split[i] > 1 for split in splits) - 1) for i in range(len(splits[0]))) if splits else 0


def _not_beaten(
    layouts: Sequence[tuple[tuple[Factors, ...], tuple[float, ...]]],
) -> list[tuple[tuple[Factors, ...], tuple[float, ...]]]:
    """Returns one layout per cost vector (cost by mesh axis) that no other vector equals or improves on every axis."""
    splits_by_costs = {costs: splits for splits, costs in reversed(layouts)}
    unbeaten_costs: dict[tuple[float, ...], None] = {}
    for costs in sorted(splits_by_costs):  # better vectors sort before a vector
        if not any(all(map(float.__le__, better_costs, costs)) for better_costs in unbeaten_costs):
            unbeaten_costs[costs] = None
    return [(splits, costs) for costs, splits in splits_by_costs.items() if costs in unbeaten_costs]


@functools.lru_cache(maxsize=1 << 16)
def _splits(
    shape: Factors, wraps: tuple[bool, ...], used_sizes: Factors, axis_size: int, max_kept: int
) -> tuple[tuple[Factors, float], ...]:
    """Returns factorings of ``axis_size`` over the free sizes, with the relative AllGather time of each.

    Keeps the best ``max_kept`` per number of physical axes, and one of those that are equal by symmetry of the torus.
    """
    free_sizes = tuple(p // u for p, u in zip(shape, used_sizes, strict=True))
    rank_by_signature: dict[tuple[object, ...], tuple[int, float, int, Factors]] = {}
    for factors in factorings(axis_size, [[d for d in range(1, free + 1) if free % d == 0] for free in free_sizes]):
        signature = tuple(sorted(zip(shape, wraps, used_sizes, factors, strict=True)))
        if signature not in rank_by_signature:
            cost = _relative_time(shape, wraps, used_sizes, factors)
            num_filled = sum(s == f for s, f in zip(factors, free_sizes, strict=True) if s > 1)
            rank_by_signature[signature] = (sum(s > 1 for s in factors), cost, -num_filled, factors)
    kept_splits: list[tuple[Factors, float]] = []
    kept_by_num_axes: dict[int, int] = {}
    for num_axes, cost, _, factors in sorted(rank_by_signature.values()):
        kept_by_num_axes[num_axes] = kept_by_num_axes.get(num_axes, 0) + 1
        if kept_by_num_axes[num_axes] <= max_kept:
            kept_splits.append((factors, cost))
    return tuple(kept_splits)


def factorings(number: int, options: Sequence[Sequence[int]]) -> Iterator[tuple[int, ...]]:
    """Yields every tuple of one factor from each list of ``options`` whose product is ``number``."""
    if len(options) == 1:
        if number in options[0]:
            yield (number,)
        return
    for factor in options[0]:
        if number % factor == 0:
            for factors in factorings(number // factor, options[1:]):
                yield (factor, *factors)


def _relative_time(shape: Factors, wraps: tuple[bool, ...], used_sizes: Factors, factors: Factors) -> float:
    """Returns AllGather time in units of one link's, by the rule of `cost.network.collectives.leg_rates`."""
    relative_rate, has_ring, group_size = 0.0, False, math.prod(factors)
    for axis_size, has_wrap, used_size, factor in zip(shape, wraps, used_sizes, factors, strict=True):
        if factor > 1:
            closes_ring = has_wrap and used_size * factor == axis_size
            relative_rate += (2 if closes_ring else 1) / used_size
            has_ring = has_ring or closes_ring
    return (1.0 if has_ring else (group_size - 1) / group_size) / relative_rate if relative_rate else 0.0
