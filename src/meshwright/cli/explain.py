"""`meshwright explain`: a plan in the book's notation, line by line, and the limits it stands near."""

from pathlib import Path
from textwrap import fill
from typing import Any

import click
import msgspec

from meshwright.cli.output import emit_json, json_option, print_table, width
from meshwright.cli.plan import mesh_words
from meshwright.core.units import format_bytes, format_count, format_flops, format_seconds
from meshwright.plan.explain import Algorithm, Explanation, Limit, Line, explain
from meshwright.spec.plan_file import load_plan


@click.command()
@click.argument("plan_file", metavar="PLAN.toml", type=click.Path(path_type=Path))
@json_option
def command(plan_file: Path, as_json: bool) -> None:
    """The algorithm of one layer under a plan, with bytes and times, and the limits in closed form."""
    told = explain(load_plan(plan_file))
    if as_json:
        emit_json(_as_json(told))
    else:
        _print(told)


def _as_json(told: Explanation) -> dict[str, Any]:
    plan = told.plan
    return {
        "model": plan.model.name,
        "cluster": plan.cluster.short_name,
        "job": msgspec.to_builtins(plan.job),
        "axes": plan.strategy.mesh,
        "forward": msgspec.to_builtins(told.forward),
        "backward": msgspec.to_builtins(told.backward),
        "once": msgspec.to_builtins(told.once),
        "limits": msgspec.to_builtins(told.limits),
        "estimate": msgspec.to_builtins(told.estimate),
    }


def _print(told: Explanation) -> None:
    plan, estimate = told.plan, told.estimate
    strategy, job = plan.strategy, plan.job
    click.echo(f"{plan.model.name} on {plan.cluster.short_name}: {mesh_words(strategy.mesh)}")
    click.echo(
        f"{format_count(job.tokens_per_step)} tokens a step = {job.batch_seqs} sequences of {job.seq_len}, "
        f"{strategy.num_microbatches} microbatch{'es' if strategy.num_microbatches > 1 else ''}, "
        f"remat {strategy.remat}, state {strategy.state}"
    )
    where = "; ".join(f"{axis} on {place}" for axis, place in strategy.placement.items() if place != "1 chip")
    if where:
        click.echo(fill(f"placement: {where}", width(), subsequent_indent="  "))
    click.echo(f"times rest on {plan.calibration.describe()}")
    for part in (told.forward, told.backward, told.once):
        _print_algorithm(part)
    _print_step(told)
    click.echo()
    print_table(["limit", "", "bound", "here", ""], [_limit_row(x) for x in told.limits], "Limits, and this plan")
    for limit in told.limits:
        if limit.note:
            click.echo(fill(f"{limit.name}: {limit.note}", width(), subsequent_indent="  "))
    click.echo(f"the step is bound by {estimate.bound_by}")


def _print_algorithm(part: Algorithm) -> None:
    click.echo(f"\n{part.title[0].upper()}{part.title[1:]}")
    for line in part.lines:
        click.echo(fill(f"{line.number:>3}. {line.text}", width(), subsequent_indent=" " * 7, break_on_hyphens=False))
        click.echo(f"       {_measures(line)}")
    if part.num_left_out:
        click.echo(f"     ({part.num_left_out} small local steps are not listed)")
    click.echo(
        f"     compute {format_seconds(part.compute_s)}; communication that can hide {format_seconds(part.hidden_s)}, "
        f"on the critical path {format_seconds(part.critical_s)}"
    )


def _measures(line: Line) -> str:
    amount = format_flops(line.flops, unit="FLOP") if line.flops else format_bytes(line.num_bytes)
    tail = f", {line.overlaps}" if line.overlaps else ""
    return f"{amount}, {format_seconds(line.time_s)}{tail}"


def _print_step(told: Explanation) -> None:
    estimate = told.estimate
    rows = [
        [name if "," not in name and name not in told.plan.strategy.mesh else f"collectives over {name}",
         format_seconds(seconds)]
        for name, seconds in sorted(estimate.terms.items(), key=lambda item: -item[1])
        if seconds > 0
    ]  # fmt: skip
    click.echo()
    print_table(["work of one step, by itself", "time"], rows)
    lower, upper = format_seconds(estimate.step_s_lower), format_seconds(estimate.step_s_upper)
    click.echo(f"step {format_seconds(estimate.step_s)}, between {lower} (perfect overlap) and {upper} (none)")
    click.echo(f"MFU {estimate.mfu:.1%}, HFU {estimate.hfu:.1%}")
    items = ", ".join(f"{name} {format_bytes(size)}" for name, size in estimate.memory.items() if size)
    click.echo(
        fill(f"memory of a chip {format_bytes(estimate.hbm_bytes_per_chip)}: {items}", width(), subsequent_indent="  ")
    )


def _limit_row(limit: Limit) -> list[str]:
    verdict = {True: "holds", False: "BROKEN", None: "a hint"}[limit.holds]
    show = format_bytes if "bytes" in limit.name else lambda v: f"{v:,.4g}" if v < 1e6 else f"{v:.3g}"
    return [limit.name, limit.formula, show(limit.limit), show(limit.here), verdict]
