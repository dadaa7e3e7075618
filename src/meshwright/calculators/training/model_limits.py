"""The closed forms for a model, a cluster and a batch before there is a plan: also where no mesh divides the work.

They count tokens and chips as real numbers, with the data sheet's peak. Source: How to Scale Your Model, section 5.
"""

from meshwright.core.errors import InputError
from meshwright.cost.formulas import limits
from meshwright.cost.formulas.accounting import state_bytes
from meshwright.cost.formulas.limit_table import Letters, feed_forward_width, sparsity
from meshwright.spec.chip import known, peak
from meshwright.spec.cluster import Cluster
from meshwright.spec.job import Job
from meshwright.spec.model import Model
from meshwright.spec.weights import num_params


def letters(
    model: Model,
    cluster: Cluster,
    job: Job,
    *,
    dtype: str,
    state: str,
    tensor_axes: int = 1,
    tensor: int | None = None,
) -> Letters:
    """The letters for one slice; those that take a plan are left open.

    Raises InputError for a cluster that is no torus of several chips.
    """
    axes = sum(size > 1 for size in cluster.shape)
    if cluster.kind != "torus" or axes == 0:
        raise InputError(
            f"the closed forms are of torus axes and {cluster.short_name} has none. Name a slice of TPUs, or explain a "
            f"plan."
        )
    if not 1 <= tensor_axes <= max(1, axes - 1):
        raise InputError(f"--tensor-axes {tensor_axes}: {cluster.short_name} has {axes} axes. Leave one for the data.")
    chips = cluster.num_chips // cluster.num_slices
    if tensor is not None and not 1 <= tensor <= chips:
        raise InputError(f"--tensor {tensor} must be between 1 and the {chips:,} chips of a slice.")
    rate, tokens = peak(cluster.chip, dtype), job.tokens_per_step / cluster.num_slices
    return Letters(
        batch_tokens=tokens,
        num_chips=chips,
        d_ff=feed_forward_width(model),
        peak_flops=rate,
        alpha=limits.ici_intensity(rate, 2 * known(cluster.chip, "ici_link_bytes_per_s")),
        num_axes=axes,
        fsdp_axes=max(1, axes - tensor_axes),
        tensor_axes=tensor_axes,
        tensor=tensor,
        data_ways=None if tensor is None else chips / tensor,
        sparsity=sparsity(model),
        num_slices=cluster.num_slices,
        slice_tokens=tokens if cluster.num_slices > 1 else None,
        dcn_bytes_per_s_per_host=cluster.chip.dcn_bytes_per_s_per_host or None,
        chips_per_host=cluster.chip.chips_per_host or None,
        all_chips=cluster.num_chips,
        step_tokens=job.tokens_per_step,
        seq_len=job.seq_len,
        memory_bytes=cluster.chip.memory_bytes,
        state_bytes=state_bytes(num_params(model), state=state),
    )
