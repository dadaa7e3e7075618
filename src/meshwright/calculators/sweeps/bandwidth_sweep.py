"""The bandwidth of every collective over all chips of a cluster, as the cluster grows."""

from collections.abc import Sequence

import msgspec

from meshwright.core.dims import CollectiveKind
from meshwright.cost.network.collectives import collective_bound_by, collective_time, group_rates, received_share
from meshwright.cost.network.placement import place_axes
from meshwright.spec.calibration import Calibration
from meshwright.spec.cluster import Cluster

SWEPT: tuple[CollectiveKind, ...] = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")


class BandwidthPoint(msgspec.Struct, frozen=True, kw_only=True):
    """One collective over all chips of a cluster.

    ``bytes_per_s`` is what every chip receives per second: for an all-reduce, which receives everything twice, the
    "bus bandwidth" of benchmarks.
    """

    cluster: str
    num_chips: int
    collective: CollectiveKind
    seconds: float
    bytes_per_s: float
    bound_by: str


def bandwidth_sweep(
    clusters: Sequence[Cluster], num_bytes: float, *, calibration: Calibration | None = None
) -> tuple[BandwidthPoint, ...]:
    """Returns every kind of collective over every cluster of at least two chips, the clusters in order.

    ``num_bytes`` is the size of the result, or for an all-to-all of one chip's buffer.
    """
    return tuple(
        _point(cluster, kind, num_bytes, calibration) for cluster in clusters if cluster.num_chips > 1 for kind in SWEPT
    )


def _point(cluster: Cluster, kind: CollectiveKind, num_bytes: float, calibration: Calibration | None) -> BandwidthPoint:
    size = cluster.num_chips
    # rates count the whole array on the group: an all-to-all's is the buffers of all chips together
    whole = num_bytes * size if kind == "all_to_all" else num_bytes
    groups = [group_rates(laid, ["data"], calibration) for laid in place_axes(cluster, {"data": size})]
    group = min(groups, key=lambda one: collective_time(kind, whole, one))
    seconds = float(collective_time(kind, whole, group))
    return BandwidthPoint(
        cluster=cluster.short_name,
        num_chips=size,
        collective=kind,
        seconds=seconds,
        bytes_per_s=float(received_share(kind, size)) * whole / seconds,
        bound_by=collective_bound_by(kind, whole, group),
    )
