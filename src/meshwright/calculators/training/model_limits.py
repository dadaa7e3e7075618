"""The closed forms for a model, a cluster and a batch before there is a plan: also where no mesh divides the work.

They count tokens and chips as real numbers, with the data sheet's peak. Source: How to Scale Your Model, section 5.
"""

from collections.abc import Iterator

import msgspec

from meshwright.core.errors import InputError
from meshwright.cost.formulas import limits
from meshwright.cost.formulas.accounting import state_bytes
from meshwright.cost.formulas.training_budget import min_chips
from meshwright.plan.why.torus_limits import Limit, dcn_limit, feed_forward_width, sparsity, torus_limits
from meshwright.spec.chip import known, peak
from meshwright.spec.cluster import Cluster
from meshwright.spec.job import Job
from meshwright.spec.model import Model
from meshwright.spec.weights import num_params


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """What the forms are of, for one slice: B tokens on N chips, C / W of a torus axis, and how axes are shared out.

    ``tensor`` is a size to compare with the bounds, None to leave it open. A dense feed-forward block is F wide, one of
    experts as wide as those that a token passes; ``sparsity`` is E / k, so many more tokens hide the same weights.
    """

    batch_tokens: float
    num_chips: int
    d_ff: int
    peak_flops: float
    alpha: float
    num_axes: int
    tensor_axes: int
    tensor: int | None = None
    sparsity: float = 1.0

    @property
    def fsdp_axes(self) -> int:
        """M_X: the axes that tensor leaves."""
        return max(1, self.num_axes - self.tensor_axes)

    @property
    def data_ways(self) -> float | None:
        """X, the chips over the tensor size, where that is given."""
        return None if self.tensor is None else self.num_chips / self.tensor


def setting(
    model: Model, cluster: Cluster, job: Job, *, dtype: str, tensor_axes: int = 1, tensor: int | None = None
) -> Setting:
    """The letters of the forms. Raises InputError for a cluster that is no torus of several chips."""
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
    rate = peak(cluster.chip, dtype)
    return Setting(
        batch_tokens=job.tokens_per_step / cluster.num_slices,
        num_chips=chips,
        d_ff=feed_forward_width(model),
        peak_flops=rate,
        alpha=limits.ici_intensity(rate, 2 * known(cluster.chip, "ici_link_bytes_per_s")),
        num_axes=axes,
        tensor_axes=tensor_axes,
        tensor=tensor,
        sparsity=sparsity(model),
    )


def model_limits(model: Model, cluster: Cluster, job: Job, at: Setting, *, state: str) -> tuple[Limit, ...]:
    """Limits of speed, then those of size; ``here`` is NaN where it would take a plan."""
    slices = cluster.num_slices
    over = dcn_limit(cluster.chip, peak_flops=at.peak_flops, tokens_per_slice=at.batch_tokens) if slices > 1 else ()
    return (*torus_limits(at, at.alpha), *over, *_sizes(model, cluster, job, state))


def _sizes(model: Model, cluster: Cluster, job: Job, state: str) -> Iterator[Limit]:
    most = limits.sequence_limit_chips(job.tokens_per_step, job.seq_len)
    yield Limit(
        name="chips, FSDP of whole sequences",
        formula="<= sequences",
        limit=most,
        here=cluster.num_chips,
        holds=cluster.num_chips <= most,
        kind="size",
    )
    room = cluster.chip.memory_bytes
    if room is not None:
        whole = state_bytes(num_params(model), state=state)
        yield Limit(
            name="state on each, no FSDP",
            formula="<= memory of a chip",
            limit=room,
            here=whole,
            holds=whole <= room,
            kind="size",
            unit="bytes",
        )
        fewest = min_chips(whole, room)
        yield Limit(
            name="chips, by state alone",
            formula=">= state / memory",
            limit=fewest,
            here=cluster.num_chips,
            holds=cluster.num_chips >= fewest,
            kind="size",
        )
