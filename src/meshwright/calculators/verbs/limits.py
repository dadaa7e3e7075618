"""`meshwright limits`: the closed forms of a model, a cluster and a batch, whether a plan divides the work or not."""

import math
from collections.abc import Iterator
from typing import Any

from meshwright.calculators.training.model_limits import letters
from meshwright.cli.shared import BATCH, SEQ_NEEDED, read_job
from meshwright.cli.verb import Count, Options, argument, option, verb
from meshwright.core.units import format_bytes, format_count, format_flops, format_seconds
from meshwright.cost.formulas.limit_table import Letters, Limit, limits_at
from meshwright.report.answer import Answer, Piece, Table
from meshwright.spec.catalogue import load_model
from meshwright.spec.cluster import parse_cluster
from meshwright.spec.strategy import STATE_BYTES, Strategy

TITLES = {"speed": "When communication hides behind compute, in closed form", "size": "What fits"}


class Given(Options):
    model: str = argument()
    on: str = option("Slices of TPUs, such as v5p:16x20x28 or 4*v5p:16x20x28.")
    batch: str = BATCH
    seq_len: Count = SEQ_NEEDED
    tensor: int | None = option("A tensor size to compare with the bounds; the other chips are X.")
    tensor_axes: int = option("Torus axes that tensor takes: My.", default=1)
    dtype: str = option("Of the products: their peak is C.", default="bf16")
    state: str = option(f"Of {', '.join(STATE_BYTES)}.", default=Strategy(mesh={}).state)


@verb(Given)
def command(given: Given) -> Answer:
    """When FSDP, tensor parallelism and their mixture are compute-bound for MODEL, and what fits: no plan is needed."""
    model, cluster, job = load_model(given.model), parse_cluster(given.on), read_job(given.batch, given.seq_len)
    at = letters(
        model,
        cluster,
        job,
        dtype=given.dtype,
        state=given.state,
        tensor_axes=given.tensor_axes,
        tensor=given.tensor,
    )
    found = limits_at(at)
    heading = (
        f"{model.name} on {cluster.short_name} ({cluster.num_chips:,} chips), {format_count(job.tokens_per_step)} "
        f"tokens a step = {job.batch_seqs:,} sequences of {job.seq_len:,}"
    )
    return Answer(
        {"model": model.name, "cluster": cluster.short_name, "job": job, "symbols": at, "limits": found},
        [heading, *_tables(found), *_legend(at, found, cluster.num_slices)],
        raw=[Table.of(found, {field: field for field in Limit.__struct_fields__})],
    )


def _tables(found: tuple[Limit, ...]) -> Iterator[Piece]:
    for kind, title in TITLES.items():
        rows = [_row(limit) for limit in found if limit.kind == kind]
        yield Table(["", "formula", "bound", "here", ""], rows, title)


def _row(limit: Limit) -> list[str]:
    verdict = {True: "met", False: "not met", None: "hint"}[limit.holds]
    show: Any = {"bytes": format_bytes, "s": format_seconds, "": _number}[limit.unit]
    return [limit.name, limit.formula, show(limit.limit), "-" if math.isnan(limit.here) else show(limit.here), verdict]


def _number(value: float) -> str:
    return f"{value:,.4g}" if value < 1000 else f"{value:,.0f}" if value < 1e6 else f"{value:.3g}"


def _legend(at: Letters, found: tuple[Limit, ...], num_slices: int) -> Iterator[Piece]:
    yield from (f"{limit.name}: {limit.note}" for limit in found if limit.note)
    of = " of each slice" if num_slices > 1 else ""
    yield (
        f"B = {format_count(int(at.batch_tokens))} tokens{of}, N = {at.num_chips:,} chips{of}, F = {at.d_ff:,}, "
        f"C = {format_flops(at.peak_flops)}, alpha = C / W of a torus axis = {at.alpha:,.4g} FLOPs/byte, X = chips / "
        f"tensor on Mx = {at.fsdp_axes} and tensor on My = {at.tensor_axes} torus axes, root = that of the discriminant"
    )
