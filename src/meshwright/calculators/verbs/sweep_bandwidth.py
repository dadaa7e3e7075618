"""`meshwright sweep bandwidth`: bytes that every collective moves per second and chip as the cluster grows."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

from meshwright.api.rates import rates_for
from meshwright.calculators.sweeps.bandwidth_sweep import SWEPT, BandwidthPoint, bandwidth_sweep
from meshwright.calculators.sweeps.fields import growing, require_links, sweep_clusters
from meshwright.cli.verb import CALIBRATION, PNG, Options, option, verb
from meshwright.core.errors import InputError
from meshwright.core.units import format_bytes, format_rate, parse_bytes
from meshwright.report.answer import Answer, Piece, Table
from meshwright.report.figure import Figure
from meshwright.report.sweeps import bandwidth_figure

NAMES = {kind: kind.replace("_", "-") for kind in SWEPT}


class Given(Options):
    on: str = option("The largest cluster: h100:8x512; or a list or range of clusters.")
    size: str = option("Bytes of the result, or of a chip's all-to-all buffer.", "--bytes", default="1GB")
    calibration: Path | None = CALIBRATION
    png: Path | None = PNG


@verb(Given)
def command(given: Given) -> Answer:
    """Show bytes that every chip receives per second in each collective over all chips of a growing cluster."""
    found = sweep_clusters(given.on)
    clusters = (growing(found[0]) or found) if len(found) == 1 else found
    num_bytes = parse_bytes(given.size)
    if not 1 <= num_bytes <= 1e18:
        raise InputError(f"--bytes {given.size} must be between 1 B and 1 EB.")
    require_links(given.on, clusters)
    rates = rates_for(clusters[-1], given.calibration)
    points = bandwidth_sweep(clusters, num_bytes, calibration=rates)
    rests_on = rates.describe() if rates else "the data sheet"
    return Answer(
        {"bytes": num_bytes, "points": points},
        _text(points, num_bytes, rests_on),
        {given.png: lambda: _figure(points, num_bytes)},
        [points],
    )


def _chip(points: Sequence[BandwidthPoint]) -> str:
    return points[0].cluster.partition(":")[0]


def _text(points: Sequence[BandwidthPoint], num_bytes: float, rests_on: str) -> Iterator[Piece]:
    size = format_bytes(num_bytes)
    yield f"{_chip(points)}: what every chip receives per second in collectives of {size} over all chips"
    rows = []
    for cluster, group in groupby(points, key=lambda point: point.cluster):
        row = list(group)
        rates: dict[str, float] = {point.collective: point.bytes_per_s for point in row}
        bound = ", ".join(dict.fromkeys(point.bound_by for point in row))
        rows.append({"shape": cluster.partition(":")[2], "chips": row[0].num_chips, "bound by": bound, **rates})
    columns = {name: (kind, format_rate) for kind, name in NAMES.items()}
    yield Table.of(rows, {"shape": "shape", "chips": "chips", **columns, "bound by": "bound by"})
    yield f"an all-reduce receives everything twice; times rest on {rests_on}"


def _figure(points: Sequence[BandwidthPoint], num_bytes: float) -> Figure:
    return bandwidth_figure(
        [point.num_chips for point in points if point.collective == SWEPT[0]],
        {name: [one.bytes_per_s for one in points if one.collective == kind] for kind, name in NAMES.items()},
        title=f"Collectives on {_chip(points)}: bandwidth against chips",
        subtitle=f"Bytes that every chip receives per second, in collectives of {format_bytes(num_bytes)}.",
    )
