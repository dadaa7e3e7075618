"""`meshwright sweep bandwidth`: bytes per second and chip of every collective as the cluster grows."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

from meshwright.api.rates import rates_for
from meshwright.cli.sweeps.fields import growing, require_links, sweep_clusters
from meshwright.cli.verb import CALIBRATION, PNG, Options, option, verb
from meshwright.core.dims import CollectiveKind
from meshwright.core.errors import InputError
from meshwright.core.units import format_bytes, format_rate, parse_bytes
from meshwright.cost.network.collectives import collective_bound_by, collective_time, group_rates, received_share
from meshwright.cost.network.legs import slice_turns_text
from meshwright.cost.network.placement import place_axes
from meshwright.report.answer import Answer, Condition, Facts, Piece, Table
from meshwright.report.figure import Figure
from meshwright.report.sweeps import bandwidth_figure
from meshwright.spec.calibration import Calibration
from meshwright.spec.cluster import Cluster

SWEPT: tuple[CollectiveKind, ...] = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
NAMES = {kind: kind.replace("_", "-") for kind in SWEPT}


class Given(Options):
    on: str = option("The largest cluster: h100:8x512; or a list or range of clusters.")
    size: str = option("Bytes of the result, or of a chip's all-to-all buffer.", "--bytes", default="1GB")
    calibration: Path | None = CALIBRATION
    png: Path | None = PNG


@verb(Given)
def command(given: Given) -> Answer:
    """Show bytes that every chip receives per second in each collective over all chips of a growing cluster."""
    named_clusters = sweep_clusters(given.on)
    clusters = (growing(named_clusters[0]) or named_clusters) if len(named_clusters) == 1 else named_clusters
    num_bytes = parse_bytes(given.size)
    if not 1 <= num_bytes <= 1e18:
        raise InputError(f"--bytes {given.size} must be between 1 B and 1 EB.")
    require_links(given.on, clusters)
    rates = rates_for(clusters[-1], given.calibration, fitted=True)
    points = bandwidth_sweep(clusters, num_bytes, calibration=rates)
    chip_name, size_text = clusters[0].short_name.partition(":")[0], format_bytes(num_bytes)

    def picture() -> Figure:
        return bandwidth_figure(
            [point["num_chips"] for point in points if point["collective"] == SWEPT[0]],
            {name: [row["bytes_per_s"] for row in points if row["collective"] == kind] for kind, name in NAMES.items()},
            title=f"Collectives on {chip_name}: bandwidth against chips",
            subtitle=f"Bytes that every chip receives per second, in collectives of {size_text}.",
        )

    rates_of_kind = {name: (kind, format_rate) for kind, name in NAMES.items()}
    columns: Facts = {"shape": "shape", "chips": "chips", **rates_of_kind, "bound by": "bound by"}
    pieces: list[Piece] = [
        f"{chip_name}: what every chip receives per second in collectives of {size_text} over all chips",
        Table.of(_rows(points), columns),
        *map(Condition, filter(None, [
            f"rates: {rates.describe() if rates else 'the data sheet'}",
            "an all-reduce counts its bytes twice: as a reduce-scatter and as an all-gather",
            slice_turns_text(clusters[-1]),
        ])),
    ]  # fmt: skip
    return Answer({"bytes": num_bytes, "points": points}, pieces, {given.png: picture}, [points])


def bandwidth_sweep(
    clusters: Sequence[Cluster], num_bytes: float, *, calibration: Calibration | None = None
) -> list[Facts]:
    """Returns every kind of collective over every cluster of at least two chips, the clusters in order.

    ``num_bytes`` is the size of the result, or for an all-to-all of one chip's buffer. ``bytes_per_s`` is what every
    chip receives per second: for an all-reduce, which receives everything twice, the "bus bandwidth" of benchmarks.
    """
    points = []
    for cluster in (cluster for cluster in clusters if cluster.num_chips > 1):
        num_chips = cluster.num_chips
        groups = [group_rates(layout, ["data"], calibration) for layout in place_axes(cluster, {"data": num_chips})]
        for kind in SWEPT:
            # rates count the whole array on the group: an all-to-all's is the buffers of all chips together
            full_bytes = num_bytes * num_chips if kind == "all_to_all" else num_bytes
            time_s, rates = min(
                ((float(collective_time(kind, full_bytes, rates)), rates) for rates in groups), key=lambda pair: pair[0]
            )
            points.append(
                {
                    "cluster": cluster.short_name,
                    "num_chips": num_chips,
                    "collective": kind,
                    "seconds": time_s,
                    "bytes_per_s": float(received_share(kind, num_chips)) * full_bytes / time_s,
                    "bound_by": collective_bound_by(kind, full_bytes, rates),
                }
            )
    return points


def _rows(points: Sequence[Facts]) -> Iterator[Facts]:
    """Yields a row of the table for each cluster."""
    for cluster, group in groupby(points, key=lambda point: point["cluster"]):
        row = list(group)
        rate_by_kind = {point["collective"]: point["bytes_per_s"] for point in row}
        bound_text = ", ".join(dict.fromkeys(point["bound_by"] for point in row))
        yield {"shape": cluster.partition(":")[2], "chips": row[0]["num_chips"], "bound by": bound_text, **rate_by_kind}
