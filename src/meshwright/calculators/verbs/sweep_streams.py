"""`meshwright sweep streams`: compute and communication of a few layers side by side, by kind of data parallelism."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import click
import msgspec

from meshwright.api.rates import rates_for
from meshwright.calculators.sweeps.two_streams import WAYS, two_streams
from meshwright.cli.shared import BATCH, CALIBRATION, PNG, SEQ, read_job
from meshwright.cli.verb import Count, Options, argument, option, verb
from meshwright.core.errors import InputError
from meshwright.core.units import format_bytes, format_count, format_seconds, parse_bytes
from meshwright.cost.lanes import Streams
from meshwright.cost.setting import Setting
from meshwright.report.answer import Answer, Piece, Table
from meshwright.report.figure import Spec
from meshwright.report.plans.two_streams import two_streams_figure
from meshwright.spec.catalogue import model as find_model
from meshwright.spec.cluster import Cluster, parse_cluster
from meshwright.spec.job import Job

MAX_LAYERS = 32


class Given(Options):
    model: str = argument()
    on: str = option("The cluster: all of its chips are data parallel.")
    batch: str = BATCH
    seq_len: Count = SEQ
    zero: str | None = option("One stage of ZeRO.  [default: all ways]", type=click.Choice(["0", "1", "3"]))
    layers: int = option("Layers that are drawn.", default=3)
    remat: str = option("What the backward pass computes again.", default="none")
    bucket: str = option("Gradients that are sent together.", default="25MB")
    calibration: Path | None = CALIBRATION
    png: Path | None = PNG


@verb(Given)
def command(given: Given) -> Answer:
    """What the chip computes and what its links carry in a few layers of MODEL: naive, overlapped, bucketed, ZeRO."""
    if not 1 <= given.layers <= MAX_LAYERS:
        raise InputError(f"--layers {given.layers} must be between 1 and {MAX_LAYERS}.")
    cluster, job = parse_cluster(given.on), read_job(given.batch, given.seq_len)
    if job.batch_seqs % cluster.num_chips:
        raise InputError(
            f"{job.batch_seqs} sequences cannot be divided over {cluster.num_chips} chips. "
            f"Use --batch {max(1, job.batch_seqs // cluster.num_chips) * cluster.num_chips}seq, or another cluster."
        )
    setting = Setting(find_model(given.model), cluster, job, rates_for(cluster, given.calibration))
    found = [
        two_streams(setting, way, layers=given.layers, remat=given.remat, bucket_bytes=parse_bytes(given.bucket))
        for way in WAYS
        if given.zero is None or way.zero == int(given.zero)
    ]
    return Answer(
        {
            "model": given.model,
            "cluster": cluster.short_name,
            "layers": given.layers,
            "ways": [_as_json(one) for one in found],
        },
        _text(given.model, cluster, job, found, given.layers, parse_bytes(given.bucket)),
        {given.png: lambda: _figure(given.model, cluster, job, found, given.layers)},
    )


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


def _text(
    model: str, cluster: Cluster, job: Job, found: Sequence[Streams], layers: int, bucket_bytes: float
) -> Iterator[Piece]:
    yield f"{model} on {cluster.short_name}, data parallel: {_what(cluster, job, layers)}"
    rows = [
        [one.name, format_seconds(one.total_s), format_seconds(one.compute_s), format_seconds(one.links_s),
         format_seconds(one.exposed_s)]
        for one in found
    ]  # fmt: skip
    yield Table(["way", "time", "compute", "links", "exposed"], rows)
    yield (
        f"exposed: the chip waits for the links; buckets of {format_bytes(bucket_bytes)}; weights are gathered one "
        f"pass ahead; the optimizer waits for all gradients; embedding and head are left out"
    )


def _figure(model: str, cluster: Cluster, job: Job, found: Sequence[Streams], layers: int) -> Spec:
    return two_streams_figure(
        found,
        title=f"{model} on {cluster.short_name}: data parallelism on two streams",
        subtitle=f"{_what(cluster, job, layers)}; F and B are forward and backward passes over a layer.",
    )
