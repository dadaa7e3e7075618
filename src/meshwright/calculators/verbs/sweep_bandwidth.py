"""`meshwright sweep bandwidth`: what every collective moves per second and chip as the cluster grows."""

from collections.abc import Sequence
from pathlib import Path

import click

from meshwright.calculators.sweeps.bandwidth_sweep import SWEPT, BandwidthPoint, bandwidth_sweep, growing
from meshwright.calculators.sweeps.sweep import sweep_clusters
from meshwright.calculators.verbs.sweep_options import calibration_option, draw, png_option
from meshwright.cli.machine import rates_for
from meshwright.cli.output import emit_json, json_option, print_table, print_text
from meshwright.core.errors import InputError
from meshwright.core.units import format_bytes, parse_bytes
from meshwright.report.figure import Spec
from meshwright.report.scaling import bandwidth_figure
from meshwright.report.tables import Cell

NAMES = {kind: kind.replace("_", "-") for kind in SWEPT}


@click.command()
@click.option("--on", required=True, help="The largest cluster: h100:8x512; or a list or range of clusters.")
@click.option("--bytes", "size", default="1GB", show_default=True, help="Of the result; of a chip's all-to-all buffer.")
@calibration_option
@png_option
@json_option
def command(on: str, size: str, calibration: Path | None, png: Path | None, as_json: bool) -> None:
    """Bytes that every chip receives per second in each collective over all chips of a growing cluster."""
    found = sweep_clusters(on)
    clusters = (growing(found[0]) or found) if len(found) == 1 else found
    num_bytes = parse_bytes(size)
    if not 1 <= num_bytes <= 1e18:
        raise InputError(f"--bytes {size} must be between 1 B and 1 EB.")
    rates = rates_for(clusters[-1], calibration)
    points = bandwidth_sweep(clusters, num_bytes, calibration=rates)
    if not points:
        raise InputError(f"{on} is one chip: there is nothing to send. Give a larger cluster.")
    draw(png, lambda: _figure(points, num_bytes))
    if as_json:
        emit_json({"bytes": num_bytes, "points": [_as_json(point) for point in points]})
        return
    _print(points, num_bytes, rates.describe() if rates else "the data sheet")


def _as_json(point: BandwidthPoint) -> dict[str, object]:
    return {
        "cluster": point.cluster.short_name,
        "num_chips": point.cluster.num_chips,
        "collective": point.kind,
        "seconds": point.seconds,
        "bytes_per_s": point.bytes_per_s,
        "bound_by": point.bound_by,
    }


def _print(points: Sequence[BandwidthPoint], num_bytes: float, rests_on: str) -> None:
    chip = points[0].cluster.chip.name
    print_text(
        f"{chip}: what every chip receives per second in collectives of {format_bytes(num_bytes)} over all chips"
    )
    rows: list[list[Cell]] = []
    for start in range(0, len(points), len(SWEPT)):
        row = points[start : start + len(SWEPT)]
        bound = list(dict.fromkeys(point.bound_by for point in row))
        rates = [f"{format_bytes(point.bytes_per_s)}/s" for point in row]
        rows.append([row[0].cluster.short_name.partition(":")[2], row[0].cluster.num_chips, *rates, ", ".join(bound)])
    print_table(["shape", "chips", *NAMES.values(), "bound by"], rows)
    print_text(f"an all-reduce receives everything twice; times rest on {rests_on}")


def _figure(points: Sequence[BandwidthPoint], num_bytes: float) -> Spec:
    lines = {
        name: [(point.cluster.num_chips, point.bytes_per_s) for point in points if point.kind == kind]
        for kind, name in NAMES.items()
    }
    return bandwidth_figure(
        lines,
        title=f"Collectives on {points[0].cluster.chip.name}: bandwidth against chips",
        subtitle=f"Bytes that every chip receives per second, in collectives of {format_bytes(num_bytes)}.",
    )
