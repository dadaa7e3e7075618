"""`meshwright plan`: the best ways to split a training job over a cluster."""

from pathlib import Path
from textwrap import fill

import click

from meshwright.cli.fields import parse_axes, parse_fields, with_fields
from meshwright.cli.machine import rates_for
from meshwright.cli.output import emit_json, json_option, or_dash, print_table, say, width
from meshwright.core.units import format_bytes, format_count, format_seconds, parse_count
from meshwright.plan.planner import plan
from meshwright.plan.result import PlannedStrategy, PlanResult
from meshwright.spec.catalogue import model as find_model
from meshwright.spec.cluster import parse_cluster
from meshwright.spec.job import Job, parse_batch
from meshwright.spec.plan_file import save_plan


@click.command()
@click.argument("model")
@click.option("--on", "on", required=True, help="The cluster, such as v5p:16x20x28, h100:8x256, cpu:8.")
@click.option("--batch", required=True, help="Tokens a step (4Mi) or sequences (1024seq).")
@click.option("--seq", "seq_len", required=True, help="Tokens of a sequence.")
@click.option("--tokens", help="Tokens of the whole run, such as 15T: gives days and cost.")
@click.option("--axes", help="Mesh axes to keep fixed, such as fsdp=1024,tensor=4.")
@click.option("--top", default=5, show_default=True, help="How many strategies to list.")
@click.option("--set", "pairs", multiple=True, metavar="KEY=VALUE", help="Any field: strategy.remat=block.")
@click.option("--calibration", type=click.Path(path_type=Path), help="Measured rates of the cluster (TOML).")
@click.option("-o", "--out", type=click.Path(path_type=Path), help="Write the best plan to this file.")
@json_option
def command(
    model: str,
    on: str,
    batch: str,
    seq_len: str,
    tokens: str | None,
    axes: str | None,
    top: int,
    pairs: tuple[str, ...],
    calibration: Path | None,
    out: Path | None,
    as_json: bool,
) -> None:
    """Find how to split the training of MODEL (a name or a config.json) over a cluster."""
    fields = parse_fields(pairs, sections=("model", "job", "strategy"))
    chosen = with_fields(find_model(model), "model", fields["model"])
    cluster = parse_cluster(on)
    length = parse_count(seq_len, what="seq")
    job = Job(
        batch_seqs=parse_batch(batch, seq_len=length),
        seq_len=length,
        train_tokens=parse_count(tokens, what="tokens") if tokens else None,
    )
    job = with_fields(job, "job", fields["job"])
    result = plan(
        chosen,
        cluster,
        job,
        axes=parse_axes(axes),
        overrides=fields["strategy"],
        top=top,
        calibration=rates_for(cluster, calibration),
    )
    if out:
        save_plan(result.plan(), out)
        say(f"wrote {out}")
    if as_json:
        emit_json(result.to_json())
    else:
        print_plan(result)


def print_plan(result: PlanResult) -> None:
    """The ranked strategies, what they need, and the conventions behind the numbers."""
    job = result.job
    used = result.strategies[0].cluster
    click.echo(
        f"{result.model.name} on {used.short_name} ({used.num_chips:,} chips), {format_count(job.tokens_per_step)} "
        f"tokens a step = {job.batch_seqs} sequences of {job.seq_len}"
    )
    print_table(
        ["", "mesh", "micro", "remat", "step", "range", "MFU", "memory", "bound by"],
        [_row(number, one) for number, one in enumerate(result.strategies, 1)],
    )
    best = result.strategies[0]
    if best.train_days is not None:
        money = or_dash(best.cost_usd, lambda v: f"${v:,.0f}")
        click.echo(
            f"the best trains {format_count(job.train_tokens or 0)} tokens in {best.train_days:.3g} days for {money}"
        )
    where = "; ".join(f"{axis} on {place}" for axis, place in best.strategy.placement.items() if place != "1 chip")
    click.echo(fill(f"placement of the best: {where or 'one chip'}", width(), subsequent_indent="  "))
    for note in result.notes:
        click.echo(fill(note, width(), subsequent_indent="  "))


def _row(number: int, one: PlannedStrategy) -> list[str | int | float | None]:
    estimate, strategy = one.estimate, one.strategy
    remat = strategy.remat if isinstance(strategy.remat, str) else "+".join(strategy.remat)
    return [
        number,
        mesh_words(strategy.mesh),
        strategy.num_microbatches,
        remat,
        format_seconds(estimate.step_s),
        f"{format_seconds(estimate.step_s_lower)} to {format_seconds(estimate.step_s_upper)}",
        f"{estimate.mfu:.0%}",
        format_bytes(estimate.hbm_bytes_per_chip),
        estimate.bound_by,
    ]


def mesh_words(mesh: dict[str, int]) -> str:
    """``"fsdp 1024 x tensor 4"``; axes of one device are left out."""
    return " x ".join(f"{axis} {size}" for axis, size in mesh.items() if size > 1) or "1 device"
