"""`meshwright limits`: the closed forms of a model, a cluster and a batch, whether a plan divides the work or not."""

from collections.abc import Iterator

from meshwright.cli.fields import job_of
from meshwright.cli.shared import BATCH, SEQ_NEEDED
from meshwright.cli.verb import Count, Options, argument, option, verb
from meshwright.cli.verbs.explain import limit_tables
from meshwright.core.errors import InputError
from meshwright.core.units import format_count, format_flops
from meshwright.cost.formulas.accounting import state_bytes
from meshwright.cost.formulas.limit_table import Letters, Limit, limits_at
from meshwright.cost.formulas.limits import ici_intensity
from meshwright.cost.network.links import torus_width
from meshwright.plan.why.bounds import shared_letters
from meshwright.report.answer import Answer, Piece
from meshwright.spec.catalogue import load_model
from meshwright.spec.chip import peak
from meshwright.spec.cluster import Cluster, parse_cluster
from meshwright.spec.job import Job
from meshwright.spec.model import Model
from meshwright.spec.strategy import STATE_BYTES, Strategy
from meshwright.spec.weights import num_params


class Given(Options):
    model: str = argument()
    on: str = option("Slices of TPUs, such as v5p:16x20x28 or 4*v5p:16x20x28.")
    batch: str = BATCH
    seq_len: Count = SEQ_NEEDED
    tensor: int | None = option("A tensor size to compare with the bounds; X is the chips divided by it.")
    tensor_axes: int = option("Torus axes that tensor takes: My.", default=1)
    dtype: str = option("Dtype of the products: their peak is C.", default="bf16")
    state: str = option(f"Training state: {', '.join(STATE_BYTES)}.", default=Strategy(mesh={}).state)


@verb(Given)
def command(given: Given) -> Answer:
    """Show when FSDP, tensor parallelism and both mixed are compute-bound for MODEL and what fits, without a plan."""
    model, cluster, job = load_model(given.model), parse_cluster(given.on), job_of(given.batch, given.seq_len, {})
    at = letters(model, cluster, job, given)
    found = limits_at(at)
    heading = (
        f"{model.name} on {cluster.short_name} ({cluster.num_chips:,} chips), {format_count(job.tokens_per_step)} "
        f"tokens a step = {job.batch_seqs:,} sequences of {job.seq_len:,}"
    )
    return Answer(
        {"model": model.name, "cluster": cluster.short_name, "job": job, "symbols": at, "limits": found},
        [heading, *limit_tables(found).values(), *_legend(at, found, cluster.num_slices)],
        raw=[found],
    )


def letters(model: Model, cluster: Cluster, job: Job, given: Given) -> Letters:
    """Returns the letters for one slice, tokens and chips as real numbers, at the data sheet's peak, none of a plan.

    Raises InputError for a cluster that is no torus of several chips. Source: How to Scale Your Model, section 5.
    """
    slices, width = cluster.num_slices, torus_width(cluster)
    chips = cluster.num_chips // slices
    if width is None:
        raise InputError(
            f"the closed forms are for torus axes, and {cluster.short_name} has none. Name a slice of TPUs, or explain "
            f"a plan."
        )
    axes, taken = len(width.axes), given.tensor_axes
    if not 1 <= taken <= max(1, axes - 1):
        raise InputError(
            f"--tensor-axes {given.tensor_axes}: {cluster.short_name} has {axes} axes. Leave one for the data."
        )
    if given.tensor is not None and not 1 <= given.tensor <= chips:
        raise InputError(f"--tensor {given.tensor} must be between 1 and the {chips:,} chips of a slice.")
    rate = peak(cluster.chip, given.dtype)
    return Letters(
        batch_tokens=job.tokens_per_step / slices,
        num_chips=chips,
        peak_flops=rate,
        alpha=ici_intensity(rate, width.bytes_per_s),
        fsdp_axes=sum(width.axes[taken:]) or width.axes[-1],
        tensor_axes=sum(width.axes[:taken]),
        tensor=given.tensor,
        data_ways=given.tensor and chips / given.tensor,
        memory_bytes=cluster.chip.memory_bytes,
        state_bytes=state_bytes(num_params(model), state=given.state),
        **shared_letters(model, cluster, job, slices),
    )


def _legend(at: Letters, found: tuple[Limit, ...], num_slices: int) -> Iterator[Piece]:
    yield from (f"{limit.name}: {limit.note}" for limit in found if limit.note)
    of = " of each slice" if num_slices > 1 else ""
    yield (
        f"B = {format_count(int(at.batch_tokens))} tokens{of}, N = {at.num_chips:,} chips{of}, F = {at.d_ff:,}, "
        f"C = {format_flops(at.peak_flops)}, alpha = C / W of a torus axis = {at.alpha:,.4g} FLOPs/byte with W "
        f"{at.width}, X = chips / tensor on Mx = {at.fsdp_axes:g} and tensor on My = {at.tensor_axes:g} torus axes, "
        f"root = square root of the discriminant"
    )
