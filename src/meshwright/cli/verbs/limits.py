"""`meshwright limits`: the closed forms of a model, a cluster and a batch, whether a plan divides the work or not."""

from meshwright.cli.fields import job_of
from meshwright.cli.sweeps.crossover import mlp_work
from meshwright.cli.verb import BATCH, SEQ_NEEDED, Count, Options, argument, option, verb
from meshwright.cli.verbs.explain import limits_text
from meshwright.core.errors import InputError
from meshwright.core.units import counted, format_count, format_seconds
from meshwright.cost.formulas.accounting import state_bytes
from meshwright.cost.formulas.limit_table import limits_at
from meshwright.cost.formulas.limits import MixedLayer, ici_intensity
from meshwright.cost.letters import Letters
from meshwright.cost.network.links import require_joined, torus_width
from meshwright.plan.why.bounds import model_letters, shared_letters, switched_letters
from meshwright.report.answer import Answer, Facts
from meshwright.spec.calibration import Efficiency
from meshwright.spec.catalogue import load_model
from meshwright.spec.chip import peak
from meshwright.spec.cluster import Cluster, parse_cluster
from meshwright.spec.job import Job
from meshwright.spec.strategy import STATE_BYTES, Strategy
from meshwright.spec.weights import num_params

LAYER = (
    "two matrices D x F forward: T_math {}, T_comms {}, the longer of weights (Mx axes) and activations (My axes), "
    "which overlap; the roots and X_opt take the sum of both, so that all may be hidden where a root is broken"
)


class Given(Options):
    model: str = argument()
    on: str = option("A cluster, such as v5p:16x20x28, 4*v5p:16x20x28 or h100:8x128.")
    batch: str = BATCH
    seq_len: Count = SEQ_NEEDED
    tensor: Count | None = option("A tensor size to compare with the bounds; X is the chips divided by it.")
    tensor_axes: Count = option("Torus axes that tensor takes: My.", default=1)
    dtype: str = option("Dtype of the products: their peak is C.", default="bf16")
    state: str = option(f"Training state: {', '.join(STATE_BYTES)}.", default=Strategy(mesh={}).state)


@verb(Given)
def command(given: Given) -> Answer:
    """Show when FSDP, tensor parallelism and both mixed are compute-bound for MODEL and what fits, without a plan.

    MODEL is a name, a config.json, or mlp:8192x32768: a layer of two matrices D x F.
    """
    cluster, job = parse_cluster(given.on), job_of(given.batch, given.seq_len, {})
    require_joined(cluster)
    name, d_model, size_by_letter = layer_letters(given.model, given.state)
    sym = letters(size_by_letter, cluster, job, given)
    limits = limits_at(sym)
    heading = (
        f"{name} on {cluster.short_name} ({counted(cluster.num_chips, 'chip')}), {format_count(job.tokens_per_step)} "
        f"tokens a step = {counted(job.batch_seqs, 'sequence')} of {job.seq_len:,}"
    )
    layer_s: dict[str, float] | None = None
    if sym.tensor is not None and sym.mixed_alpha is not None:
        # seconds of two matrices with the tensor size that is given, in a dense model on a torus
        mesh_sizes = {"fsdp": sym.data_ways, "tensor": sym.tensor}
        mixed_layer = MixedLayer(batch_tokens=sym.batch_tokens, d_model=d_model, d_ff=sym.d_ff, **mesh_sizes)
        axis_rate, axes = sym.peak_flops / sym.mixed_alpha, {"fsdp_axes": sym.fsdp_axes, "tensor_axes": sym.tensor_axes}
        layer_s = {"math_s": mixed_layer.math_s(sym.peak_flops), "comms_s": mixed_layer.comms_s(axis_rate, **axes)}
    return Answer(
        {"model": name, "cluster": cluster.short_name, "job": job, "symbols": sym, "limits": limits, "layer": layer_s},
        [
            heading,
            *limits_text(limits, sym, "chips / tensor"),
            *([LAYER.format(*map(format_seconds, layer_s.values()))] if layer_s else []),
        ],
        raw=[limits],
    )


def layer_letters(text: str, state: str) -> tuple[str, int, Facts]:
    """Returns the name, D and the letters of a model or of ``mlp:DxF``, whose training state is left out."""
    work = mlp_work(text)
    if work is not None:
        params = 2 * work.dims["D"] * work.d_ff
        return work.name, work.dims["D"], {"d_ff": work.d_ff, "num_params": params, "num_active_params": params}
    model = load_model(text)
    state_letters = {"state_bytes": state_bytes(num_params(model), state=state)}
    return model.name, model.d_model, model_letters(model) | state_letters


def letters(sizes: Facts, cluster: Cluster, job: Job, given: Given) -> Letters:
    """Returns the letters for one slice, tokens and chips as real numbers, at the data sheet's peak, none of a plan.

    ``sizes`` are the model's. Raises InputError for a cluster without links. Source: How to Scale Your Model, 5.
    """
    num_slices, torus = cluster.num_slices, torus_width(cluster)
    slice_size, peak_rate = cluster.num_chips // num_slices, peak(cluster.chip, given.dtype)
    link_letters = switched_letters(cluster, peak_rate, Efficiency()) if slice_size > 1 else {}
    if torus is None and not link_letters:
        raise InputError(f"{cluster.short_name} has no links in the catalogue. Name several TPUs, or several GPUs.")
    axes, num_tensor_axes = torus.axes if torus else (1.0,), given.tensor_axes
    if not 1 <= num_tensor_axes <= max(1, len(axes) - 1):
        raise InputError(
            f"--tensor-axes {given.tensor_axes}: {cluster.short_name} has {len(axes)} axes. Leave one for the data."
        )
    if given.tensor is not None and not 1 <= given.tensor <= slice_size:
        raise InputError(f"--tensor {given.tensor} must be between 1 and the {counted(slice_size, 'chip')} of a slice.")
    return Letters(
        batch_tokens=job.tokens_per_step / num_slices,
        num_chips=slice_size,
        peak_flops=peak_rate,
        alpha=ici_intensity(peak_rate, torus.bytes_per_s) if torus else None,
        fsdp_axes=sum(axes[num_tensor_axes:]) or axes[-1],
        tensor_axes=sum(axes[:num_tensor_axes]),
        tensor=given.tensor,
        data_ways=given.tensor and slice_size / given.tensor,
        memory_bytes=cluster.chip.memory_bytes,
        **shared_letters(cluster, job, num_slices),
        **link_letters,
        **sizes,
    )
