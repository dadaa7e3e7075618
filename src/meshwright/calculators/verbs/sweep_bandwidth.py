"""`meshwright sweep bandwidth`: what every collective moves per second and chip as the cluster grows."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from meshwright.api.rates import rates_for
from meshwright.calculators.sweeps.bandwidth_sweep import SWEPT, BandwidthPoint, bandwidth_sweep
from meshwright.calculators.sweeps.fields import growing, sweep_clusters
from meshwright.cli.shared import CALIBRATION, PNG
from meshwright.cli.verb import Options, option, verb
from meshwright.core.errors import InputError
from meshwright.core.units import format_bytes, parse_bytes
from meshwright.report.answer import Answer, Piece, Table
from meshwright.report.figure import Figure
from meshwright.report.scaling import bandwidth_figure
from meshwright.report.tables import Cell

NAMES = {kind: kind.replace("_", "-") for kind in SWEPT}


class Given(Options):
    on: str = option("The largest cluster: h100:8x512; or a list or range of clusters.")
    size: str = option("Of the result; of a chip's all-to-all buffer.", "--bytes", default="1GB")
    calibration: Path | None = CALIBRATION
    png: Path | None = PNG


@verb(Given)
def command(given: Given) -> Answer:
    """Bytes that every chip receives per second in each collective over all chips of a growing cluster."""
    found = sweep_clusters(given.on)
    clusters = (growing(found[0]) or found) if len(found) == 1 else found
    num_bytes = parse_bytes(given.size)
    if not 1 <= num_bytes <= 1e18:
        raise InputError(f"--bytes {given.size} must be between 1 B and 1 EB.")
    rates = rates_for(clusters[-1], given.calibration)
    points = bandwidth_sweep(clusters, num_bytes, calibration=rates)
    if not points:
        raise InputError(f"{given.on} is one chip: there is nothing to send. Give a larger cluster.")
    return Answer(
        {"bytes": num_bytes, "points": [_as_json(point) for point in points]},
        _text(points, num_bytes, rates.describe() if rates else "the data sheet"),
        {given.png: lambda: _figure(points, num_bytes)},
    )


def _as_json(point: BandwidthPoint) -> dict[str, object]:
    return {
        "cluster": point.cluster.short_name,
        "num_chips": point.cluster.num_chips,
        "collective": point.kind,
        "seconds": point.seconds,
        "bytes_per_s": point.bytes_per_s,
        "bound_by": point.bound_by,
    }


def _text(points: Sequence[BandwidthPoint], num_bytes: float, rests_on: str) -> Iterator[Piece]:
    chip = points[0].cluster.chip.name
    yield f"{chip}: what every chip receives per second in collectives of {format_bytes(num_bytes)} over all chips"
    rows: list[list[Cell]] = []
    for start in range(0, len(points), len(SWEPT)):
        row = points[start : start + len(SWEPT)]
        bound = list(dict.fromkeys(point.bound_by for point in row))
        rates = [f"{format_bytes(point.bytes_per_s)}/s" for point in row]
        rows.append([row[0].cluster.short_name.partition(":")[2], row[0].cluster.num_chips, *rates, ", ".join(bound)])
    yield Table(["shape", "chips", *NAMES.values(), "bound by"], rows)
    yield f"an all-reduce receives everything twice; times rest on {rests_on}"


def _figure(points: Sequence[BandwidthPoint], num_bytes: float) -> Figure:
    lines = {
        name: [(point.cluster.num_chips, point.bytes_per_s) for point in points if point.kind == kind]
        for kind, name in NAMES.items()
    }
    return bandwidth_figure(
        lines,
        title=f"Collectives on {points[0].cluster.chip.name}: bandwidth against chips",
        subtitle=f"Bytes that every chip receives per second, in collectives of {format_bytes(num_bytes)}.",
    )
