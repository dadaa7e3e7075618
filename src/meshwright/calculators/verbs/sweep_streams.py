"""`meshwright sweep streams`: compute and communication of a few layers side by side, by kind of data parallelism."""

from collections.abc import Sequence
from pathlib import Path

import click
import msgspec

from meshwright.calculators.sweeps.two_streams import WAYS, two_streams
from meshwright.calculators.verbs.sweep_options import (
    batch_option,
    calibration_option,
    draw,
    png_option,
    read_job,
    seq_option,
)
from meshwright.cli.machine import rates_for
from meshwright.cli.output import emit_json, json_option, print_table, print_text
from meshwright.core.errors import InputError
from meshwright.core.units import format_bytes, format_count, format_seconds, parse_bytes
from meshwright.cost.lanes import Streams
from meshwright.cost.setting import Setting
from meshwright.report.figure import Spec
from meshwright.report.plans.two_streams import two_streams_figure
from meshwright.spec.catalogue import model as find_model
from meshwright.spec.cluster import Cluster, parse_cluster
from meshwright.spec.job import Job

MAX_LAYERS = 32


@click.command()
@click.argument("model")
@click.option("--on", required=True, help="The cluster: all of its chips are data parallel.")
@batch_option
@seq_option
@click.option("--zero", type=click.Choice(["0", "1", "3"]), help="One stage of ZeRO.  [default: all ways]")
@click.option("--layers", default=3, show_default=True, help="Layers that are drawn.")
@click.option("--remat", default="none", show_default=True, help="What the backward pass computes again.")
@click.option("--bucket", default="25MB", show_default=True, help="Gradients that are sent together.")
@calibration_option
@png_option
@json_option
def command(
    model: str,
    on: str,
    batch: str,
    seq_len: str,
    zero: str | None,
    layers: int,
    remat: str,
    bucket: str,
    calibration: Path | None,
    png: Path | None,
    as_json: bool,
) -> None:
    """What the chip computes and what its links carry in a few layers of MODEL: naive, overlapped, bucketed, ZeRO."""
    if not 1 <= layers <= MAX_LAYERS:
        raise InputError(f"--layers {layers} must be between 1 and {MAX_LAYERS}.")
    cluster, job = parse_cluster(on), read_job(batch, seq_len)
    if job.batch_seqs % cluster.num_chips:
        raise InputError(
            f"{job.batch_seqs} sequences cannot be divided over {cluster.num_chips} chips. "
            f"Use --batch {max(1, job.batch_seqs // cluster.num_chips) * cluster.num_chips}seq, or another cluster."
        )
    setting = Setting(find_model(model), cluster, job, rates_for(cluster, calibration))
    found = [
        two_streams(setting, way, layers=layers, remat=remat, bucket_bytes=parse_bytes(bucket))
        for way in WAYS
        if zero is None or way.zero == int(zero)
    ]
    draw(png, lambda: _figure(model, cluster, job, found, layers))
    if as_json:
        emit_json({"model": model, "cluster": cluster.short_name, "layers": layers,
                   "ways": [_as_json(one) for one in found]})  # fmt: skip
    else:
        _print(model, cluster, job, found, layers, parse_bytes(bucket))


def _as_json(streams: Streams) -> dict[str, object]:
    return {
        "name": streams.name,
        "total_s": streams.total_s,
        "compute_s": streams.compute_s,
        "links_s": streams.links_s,
        "exposed_s": streams.exposed_s,
        "boxes": [msgspec.to_builtins(box) for box in streams.boxes],
    }


def _what(cluster: Cluster, job: Job, layers: int) -> str:
    each = job.batch_seqs // cluster.num_chips
    return (
        f"{layers} layer{'s' if layers > 1 else ''}, one microbatch of {each} sequence{'s' if each > 1 else ''} of "
        f"{format_count(job.seq_len)} tokens per chip"
    )


def _print(model: str, cluster: Cluster, job: Job, found: Sequence[Streams], layers: int, bucket_bytes: float) -> None:
    print_text(f"{model} on {cluster.short_name}, data parallel: {_what(cluster, job, layers)}")
    rows = [
        [one.name, format_seconds(one.total_s), format_seconds(one.compute_s), format_seconds(one.links_s),
         format_seconds(one.exposed_s)]
        for one in found
    ]  # fmt: skip
    print_table(["way", "time", "compute", "links", "exposed"], rows)
    print_text(
        f"exposed: the chip waits for the links; buckets of {format_bytes(bucket_bytes)}; weights are gathered one "
        f"pass ahead; the optimizer waits for all gradients; embedding and head are left out"
    )


def _figure(model: str, cluster: Cluster, job: Job, found: Sequence[Streams], layers: int) -> Spec:
    return two_streams_figure(
        found,
        title=f"{model} on {cluster.short_name}: data parallelism on two streams",
        subtitle=f"{_what(cluster, job, layers)}; F and B are forward and backward passes over a layer.",
    )
