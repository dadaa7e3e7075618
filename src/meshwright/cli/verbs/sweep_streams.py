"""`meshwright sweep streams`: compute and communication of a few layers side by side, by kind of data parallelism."""

from pathlib import Path

import click

from meshwright.api.rates import rates_for
from meshwright.cli.fields import job_of
from meshwright.cli.sweeps.two_streams import WAYS, two_streams
from meshwright.cli.verb import BATCH, CALIBRATION, PNG, SEQ, Count, Options, argument, option, verb
from meshwright.core.errors import InputError
from meshwright.core.units import counted, format_bytes, format_count, parse_bytes
from meshwright.cost.network.legs import slice_turns_text
from meshwright.cost.setting import Setting
from meshwright.report.answer import Answer, Condition, Piece, Table
from meshwright.report.figure import Figure
from meshwright.report.plans.timeline import two_streams_figure
from meshwright.spec.catalogue import load_model
from meshwright.spec.cluster import parse_cluster

MAX_LAYERS = 32
SECONDS = {"time": "total_s", "compute": "compute_s", "links": "links_s", "exposed": "exposed_s"}


class Given(Options):
    model: str = argument()
    on: str = option("The cluster: all of its chips are data parallel.")
    batch: str = BATCH
    seq_len: Count = SEQ
    zero: str | None = option("One stage of ZeRO.  [default: all ways]", type=click.Choice(["0", "1", "3"]))
    layers: int = option("Layers that are drawn.", default=3)
    remat: str = option("What the backward pass computes again.", default="none")
    bucket: str = option("Bytes of gradients sent together.", default="25MB", needs={"in_buckets": "--zero 0 or 1"})
    calibration: Path | None = CALIBRATION
    png: Path | None = PNG

    @property
    def in_buckets(self) -> bool:
        """True if gradients may be summed in buckets."""
        return self.zero != "3"


@verb(Given)
def command(given: Given) -> Answer:
    """Show compute and communication of a few layers of MODEL on two streams: naive, overlapped, bucketed, ZeRO."""
    if not 1 <= given.layers <= MAX_LAYERS:
        raise InputError(f"--layers {given.layers} must be between 1 and {MAX_LAYERS}.")
    cluster, job = parse_cluster(given.on), job_of(given.batch, given.seq_len, {})
    if job.batch_seqs % cluster.num_chips:
        raise InputError(
            f"{job.batch_seqs} sequences cannot be divided over {cluster.num_chips} chips. "
            f"Use --batch {max(1, job.batch_seqs // cluster.num_chips) * cluster.num_chips}seq, or another cluster."
        )
    setting = Setting(load_model(given.model), cluster, job, rates_for(cluster, given.calibration))
    timelines = [
        two_streams(setting, way, layers=given.layers, remat=given.remat, bucket_bytes=parse_bytes(given.bucket))
        for way in WAYS
        if given.zero is None or way.zero == int(given.zero)
    ]
    seqs_per_chip = job.batch_seqs // cluster.num_chips
    layers_text = (
        f"{counted(given.layers, 'layer')}, one microbatch of {counted(seqs_per_chip, 'sequence')} of "
        f"{format_count(job.seq_len)} tokens per chip"
    )
    way_rows = [
        {"name": lanes.name, **{name: getattr(lanes, name) for name in SECONDS.values()}, "boxes": lanes.slices}
        for lanes in timelines
    ]
    place_text = f"{given.model} on {cluster.short_name}"
    pieces: list[Piece] = [
        f"{place_text}, data parallel: {layers_text}",
        Table.of(timelines, {"data parallelism": "name", **SECONDS}),
        *map(Condition, filter(None, [
            f"rates: {setting.rates.describe()}",
            f"exposed: links are busy, the chip is idle; buckets of {format_bytes(parse_bytes(given.bucket))}; "
            "weights are gathered one pass ahead; the optimizer starts after all gradients; without embedding and head",
            slice_turns_text(cluster),
        ])),
    ]  # fmt: skip

    def picture() -> Figure:
        return two_streams_figure(
            timelines,
            title=f"{place_text}: data parallelism on two streams",
            subtitle=f"{layers_text}; F and B are forward and backward passes over a layer, R forward passes again.",
        )

    facts = {"model": given.model, "cluster": cluster.short_name, "layers": given.layers, "ways": way_rows}
    return Answer(facts, pieces, {given.png: picture})
