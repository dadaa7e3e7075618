"""`meshwright limits`: the closed forms of a model, a cluster and a batch, whether a plan divides the work or not."""

import math
from typing import Any

import click
import msgspec

from meshwright.calculators.training.model_limits import letters
from meshwright.cli.output import emit_json, json_option, print_table, print_text
from meshwright.core.errors import InputError
from meshwright.core.units import format_bytes, format_count, format_flops, format_seconds, parse_count
from meshwright.cost.formulas.limit_table import Letters, Limit, limits_at
from meshwright.spec.catalogue import model as find_model
from meshwright.spec.cluster import parse_cluster
from meshwright.spec.job import Job, parse_batch
from meshwright.spec.strategy import STATE_BYTES, Strategy

TITLES = {"speed": "When communication hides behind compute, in closed form", "size": "What fits"}


@click.command()
@click.argument("model")
@click.option("--on", "on", required=True, help="Slices of TPUs, such as v5p:16x20x28 or 4*v5p:16x20x28.")
@click.option("--batch", required=True, help="Tokens a step (4Mi) or sequences (1024seq).")
@click.option("--seq", "seq_len", required=True, help="Tokens of a sequence.")
@click.option("--tensor", type=int, help="A tensor size to compare with the bounds; the other chips are X.")
@click.option("--tensor-axes", type=int, default=1, show_default=True, help="Torus axes that tensor takes: My.")
@click.option("--dtype", default="bf16", show_default=True, help="Of the products: their peak is C.")
@click.option("--state", default=Strategy(mesh={}).state, show_default=True, help=f"Of {', '.join(STATE_BYTES)}.")
@json_option
def command(
    model: str,
    on: str,
    batch: str,
    seq_len: str,
    tensor: int | None,
    tensor_axes: int,
    dtype: str,
    state: str,
    as_json: bool,
) -> None:
    """When FSDP, tensor parallelism and their mixture are compute-bound for MODEL, and what fits: no plan is needed."""
    chosen, cluster = find_model(model), parse_cluster(on)
    length = parse_count(seq_len, what="seq")
    if length < 1:
        raise InputError(f"--seq {seq_len} is no sequence. Give the tokens of one, such as 4096.")
    job = Job(batch_seqs=parse_batch(batch, seq_len=length), seq_len=length)
    at = letters(chosen, cluster, job, dtype=dtype, state=state, tensor_axes=tensor_axes, tensor=tensor)
    found = limits_at(at)
    if as_json:
        told = [msgspec.to_builtins(limit) for limit in found]
        emit_json({"model": chosen.name, "cluster": cluster.short_name, "job": job, "symbols": at, "limits": told})
        return
    print_text(
        f"{chosen.name} on {cluster.short_name} ({cluster.num_chips:,} chips), {format_count(job.tokens_per_step)} "
        f"tokens a step = {job.batch_seqs:,} sequences of {job.seq_len:,}"
    )
    for kind, title in TITLES.items():
        rows = [_row(limit) for limit in found if limit.kind == kind]
        print_table(["", "formula", "bound", "here", ""], rows, title)
    _print_legend(at, found, cluster.num_slices)


def _row(limit: Limit) -> list[str]:
    verdict = {True: "met", False: "not met", None: "hint"}[limit.holds]
    show: Any = {"bytes": format_bytes, "s": format_seconds, "": _number}[limit.unit]
    return [limit.name, limit.formula, show(limit.limit), "-" if math.isnan(limit.here) else show(limit.here), verdict]


def _number(value: float) -> str:
    return f"{value:,.4g}" if value < 1000 else f"{value:,.0f}" if value < 1e6 else f"{value:.3g}"


def _print_legend(at: Letters, found: tuple[Limit, ...], num_slices: int) -> None:
    for limit in found:
        if limit.note:
            print_text(f"{limit.name}: {limit.note}")
    of = " of each slice" if num_slices > 1 else ""
    print_text(
        f"B = {format_count(int(at.batch_tokens))} tokens{of}, N = {at.num_chips:,} chips{of}, F = {at.d_ff:,}, "
        f"C = {format_flops(at.peak_flops)}, alpha = C / W of a torus axis = {at.alpha:,.4g} FLOPs/byte, X = chips / "
        f"tensor on Mx = {at.fsdp_axes} and tensor on My = {at.tensor_axes} torus axes, root = that of the discriminant"
    )
