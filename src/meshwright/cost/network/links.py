"""The links of a cluster, innermost level first: torus axes and slices, or a switched domain and network levels."""

import math
from typing import Literal

import msgspec

from meshwright.core.errors import CannotRunError
from meshwright.spec.chip import known
from meshwright.spec.cluster import Cluster
from meshwright.spec.cluster_shapes import SLICES, TORUS_AXES

Level = Literal["ici", "nvlink", "network", "dcn", "host"]
Parts = tuple[tuple[str, int], ...]


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """One physical axis, and the mesh axes on it: ``parts`` are (mesh axis, factor) from outer to inner.

    ``bytes_per_s`` is one way and per chip. Inner factors are contiguous; an outer one has the stride of all factors
    inside it. A ``twisted`` axis wraps around to the middle of the longer axes: it closes into rings only together with
    them. ``sums_at_once``: a reduce-scatter over a whole slice crosses all of its axes at once, as the book counts.
    """

    name: str
    level: Level
    size: int
    bytes_per_s: float
    wraps: bool = False
    hop_s: float
    twisted: bool = False
    sums_at_once: bool = False
    parts: Parts = ()


class TorusWidth(msgspec.Struct, frozen=True, kw_only=True):
    """The bandwidth W of a torus axis in closed forms: both ways of a ring, or one way of a line if no axis wraps.

    ``axes`` has one entry for each axis of several chips, in multiples of W, widest first: if some axis is a ring, a
    line is a half. ``words`` say which directions W counts.
    """

    bytes_per_s: float
    axes: tuple[float, ...]
    words: str


def torus_width(cluster: Cluster) -> TorusWidth | None:
    """Returns W of a slice's axes; None if no torus axis has several chips, or the rate of a link is not known."""
    wrap_flags = sorted((wraps for n, wraps in zip(cluster.shape, cluster.wraps, strict=True) if n > 1), reverse=True)
    link_bytes_per_s = cluster.chip.ici_link_bytes_per_s
    if cluster.kind != "torus" or link_bytes_per_s is None or not wrap_flags:
        return None
    has_ring = wrap_flags[0]
    way_words = "both ways" if has_ring else "one way, no axis wraps around"
    return TorusWidth(
        bytes_per_s=(1 + has_ring) * link_bytes_per_s,
        axes=tuple((1 + wraps) / (1 + has_ring) for wraps in wrap_flags),
        words=way_words + (", a line counts as half an axis" if has_ring and not wrap_flags[-1] else ""),
    )


def require_joined(cluster: Cluster) -> None:
    """Raises CannotRunError for a cluster of several islands."""
    if cluster.num_islands > 1:
        name, one = cluster.short_name, cluster.island.short_name
        raise CannotRunError(f"{name} is several islands, which one program cannot span. Name one of them here: {one}.")


def physical_links(cluster: Cluster) -> tuple[Link, ...]:
    """Returns the links of a cluster without a mesh, axes of size 1 too. Raises InputError if a rate is unknown."""
    require_joined(cluster)
    if cluster.kind == "torus":
        return _torus_links(cluster)
    if cluster.kind == "switched":
        return _switched_links(cluster)
    # only a calibration has the rate of emulated devices
    return (Link(name="devices", level="host", size=cluster.num_chips, bytes_per_s=math.nan, hop_s=0.0),)


def _torus_links(cluster: Cluster) -> tuple[Link, ...]:
    chip = cluster.chip
    link_bytes_per_s = known(chip, "ici_link_bytes_per_s") if math.prod(cluster.shape) > 1 else 1.0
    max_size = max(cluster.shape)
    axis_links = tuple(
        Link(
            name=TORUS_AXES[axis_index],
            level="ici",
            size=size,
            bytes_per_s=link_bytes_per_s,
            wraps=wraps,
            hop_s=chip.ici_hop_s,
            twisted=cluster.twisted and size < max_size,
            sums_at_once=chip.variant == "book",
        )
        for axis_index, (size, wraps) in enumerate(zip(cluster.shape, cluster.wraps, strict=True))
    )
    if cluster.num_slices == 1:
        return axis_links
    dcn_bytes_per_s = known(chip, "dcn_bytes_per_s")
    return (
        *axis_links,
        Link(name=SLICES, level="dcn", size=cluster.num_slices, bytes_per_s=dcn_bytes_per_s, hop_s=chip.dcn_hop_s),
    )


def _switched_links(cluster: Cluster) -> tuple[Link, ...]:
    """Returns the domain on the chip's own links, then each network level; oversubscription divides a level's rate."""
    chip, links = cluster.chip, []
    for level_index, (name, size) in enumerate(zip(cluster.level_names, cluster.shape, strict=True)):
        level = cluster.levels[level_index] if cluster.levels else None
        bytes_per_s = level.bytes_per_s if level else None
        if bytes_per_s is None:
            bytes_per_s = known(chip, "nic_bytes_per_s" if level_index else "nvlink_bytes_per_s") if size > 1 else 1.0
        hop_s = level.hop_s if level else None
        if hop_s is None:
            hop_s = chip.network_hop_s if level_index else chip.nvlink_hop_s
        links.append(
            Link(
                name=name,
                level="network" if level_index else "nvlink",
                size=size,
                bytes_per_s=bytes_per_s / (level.oversubscription if level else 1.0),
                hop_s=hop_s,
            )
        )
    return tuple(links)
