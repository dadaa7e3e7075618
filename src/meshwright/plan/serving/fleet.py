"""The engines that a cluster can be divided into: parts of it, and the mesh and placement of each."""

import math
from collections.abc import Iterator, Mapping
from typing import get_args

import msgspec
import numpy as np

from meshwright.core.dims import MESH_AXES
from meshwright.core.errors import CannotRunError, InputError, nearest
from meshwright.cost.network.links import physical_links
from meshwright.cost.network.placement import Placement, place_axes
from meshwright.plan.candidates import parts_of
from meshwright.plan.legal import divisors
from meshwright.spec.cluster import Cluster
from meshwright.spec.model import Model
from meshwright.spec.strategy import CacheSplit, Strategy, cache_assignment, make_mesh, standard_assignment

ENGINE_AXES = ("expert", "context", "tensor")
"""Mesh axes of an engine: ``tensor`` splits heads and widths; ``expert`` splits experts, and the sequences too (experts
with data-parallel attention). Weights are split over nothing else: each step would gather them. ``context`` splits the
positions of a prompt, in engines that only prefill, or `SPLITS` of caches."""

SPLITS: tuple[CacheSplit | None, ...] = (None, *get_args(CacheSplit))
"""What ``context`` splits of the caches of an engine that generates: nothing, or what is left beyond the kv heads."""

OTHER_AXES: tuple[str, ...] = tuple(axis for axis in MESH_AXES if axis not in ENGINE_AXES)

CONTEXTS = (1, 2, 4, 8)
"""Sizes of ``context`` that are tried."""

MAX_ENGINE_CHIPS = 1024
"""Most chips of one engine that are tried."""

PARTS_TRIED = 2
"""Shapes of a torus that are tried for one number of chips, those with the most closed rings."""


def engine_strategy(mesh: dict[str, int], precision: str = "", split: CacheSplit | None = None) -> Strategy:
    """Returns the strategy of an engine: weights whole over all axes but ``tensor`` and ``expert``, and ``context`` if
    it splits caches."""
    assignment = cache_assignment(split) if split else standard_assignment(zero=0)
    return Strategy(mesh=make_mesh(mesh), assignment=assignment, precision=precision)  # type: ignore[arg-type]


class Fleet(msgspec.Struct, frozen=True, kw_only=True):
    """Every engine that is tried, an entry each: its sizes on mesh axes, which of `SPLITS` its caches have, its part of
    the cluster and its placement."""

    cluster: Cluster
    mesh: dict[str, np.ndarray]
    split: np.ndarray
    parts: tuple[Cluster, ...]
    placements: tuple[Placement, ...]

    def __len__(self) -> int:
        return len(self.parts)

    @property
    def num_chips(self) -> np.ndarray:
        """Chips of each engine."""
        return np.array([part.num_chips for part in self.parts])

    @property
    def batch_shards(self) -> np.ndarray:
        """Devices of each engine over which the sequences of a batch are split."""
        return self.mesh["expert"] * np.where(self.split == SPLITS.index("sequences"), self.mesh["context"], 1)

    @property
    def generates(self) -> np.ndarray:
        """True for engines that do not only prefill."""
        return (self.mesh["context"] == 1) | (self.split > 0)

    def strategy(self, number: int, precision: str) -> Strategy:
        """Returns the strategy of an engine."""
        mesh = {axis: int(self.mesh[axis][number]) for axis in ENGINE_AXES}
        found = engine_strategy(mesh, precision, SPLITS[self.split[number]])
        return msgspec.structs.replace(found, placement=self.placements[number].describe())


def fleet_of(model: Model, cluster: Cluster, axes: Mapping[str, int] | None = None) -> Fleet:
    """Returns the engines whose numbers of chips divide the cluster, and whose sizes divide the heads and experts.

    ``axes`` fixes sizes. Raises InputError for an axis that engines are not split over, CannotRunError if no engine has
    these sizes.
    """
    fixed = axes or {}
    for axis in fixed:
        if axis not in ENGINE_AXES:
            raise InputError(
                f"mesh axis {axis!r} splits no engine of a service in this version.{nearest(axis, ENGINE_AXES)} "
                f"Use {' or '.join(ENGINE_AXES)}."
            )
    found = [
        (part, placement, split)
        for part, placement, split in _engines(model, cluster)
        if all(placement.mesh[axis] == size for axis, size in fixed.items())
    ]
    if not found:
        named = " x ".join(f"{axis}={size}" for axis, size in fixed.items())
        raise CannotRunError(
            f"no engine of {model.name} on {cluster.short_name} has {named}: tensor must divide the {model.num_heads} "
            f"heads{f', expert the {model.num_experts} experts' * bool(model.num_experts)}, and the engine the "
            f"{cluster.num_chips} chips."
        )
    meshes = [placement.mesh for _, placement, _ in found]
    return Fleet(
        cluster=cluster,
        mesh={axis: np.array([mesh[axis] for mesh in meshes], dtype=np.int64) for axis in MESH_AXES},
        split=np.array([split for *_, split in found]),
        parts=tuple(part for part, *_ in found),
        placements=tuple(placement for _, placement, _ in found),
    )


def _engines(model: Model, cluster: Cluster) -> Iterator[tuple[Cluster, Placement, int]]:
    for chips in divisors(cluster.num_chips):
        sizes = [
            ({"expert": expert, "context": context, "tensor": chips // expert // context}, 0)
            for expert in (divisors(math.gcd(chips, model.num_experts)) if model.num_experts else (1,))
            for context in CONTEXTS
            if chips % (expert * context) == 0 and model.num_heads % (chips // expert // context) == 0
        ]
        # a latent has no heads
        kv_heads = 1 if model.latent_attention else model.num_kv_heads
        for mesh, _ in [one for one in sizes if one[0]["context"] == 1]:
            heads = math.gcd(kv_heads, mesh["tensor"])
            beyond = {"expert": mesh["expert"], "context": mesh["tensor"] // heads, "tensor": heads}
            sizes += [(beyond, split) for split in range(1, len(SPLITS)) if beyond["context"] > 1]
        if chips <= MAX_ENGINE_CHIPS and sizes:
            for part in engine_parts(cluster, chips):
                for mesh, split in sizes:
                    yield from (
                        (part, _padded(one, cluster), split) for one in place_axes(part, make_mesh(mesh))[:PARTS_TRIED]
                    )


def _padded(placement: Placement, cluster: Cluster) -> Placement:
    """Returns the placement with all links of the cluster: a part within one slice does not use what joins slices."""
    others = physical_links(cluster)[len(placement.links) :]
    unused = (msgspec.structs.replace(link, size=1, parts=()) for link in others)
    return msgspec.structs.replace(placement, links=(*placement.links, *unused))


def engine_parts(cluster: Cluster, num_chips: int) -> tuple[Cluster, ...]:
    """Returns the parts of a cluster to try for an engine: on switches the one that fills the domains first."""
    parts = parts_of(cluster, num_chips)
    if cluster.kind != "switched" or not parts:
        return parts[:PARTS_TRIED]
    return (max(parts, key=lambda part: part.shape),)


def transfer_bytes_per_s(cluster: Cluster) -> float:
    """Returns the bytes per second that one chip sends to a chip of another engine.

    On switches it is the rate of the outermost level of several parts, on a torus one link (several slices: their
    network). Nothing else is assumed to use it.
    """
    links = [link for link in physical_links(cluster) if link.size > 1 and link.level != "host"]
    return links[-1].bytes_per_s if links else np.inf
