"""The closed forms for a model, a cluster and a batch before there is a plan: also where no mesh divides the work.

They count tokens and chips as real numbers, with the data sheet's peak. Source: How to Scale Your Model, section 5.
"""

import math
from collections.abc import Iterator

import msgspec

from meshwright.core.errors import InputError
from meshwright.cost import limits
from meshwright.cost.accounting import state_bytes
from meshwright.cost.training_budget import min_chips
from meshwright.plan.bounds import Limit
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
        d_ff=_width(model),
        peak_flops=rate,
        alpha=limits.ici_intensity(rate, 2 * known(cluster.chip, "ici_link_bytes_per_s")),
        num_axes=axes,
        tensor_axes=tensor_axes,
        tensor=tensor,
        sparsity=model.num_experts / model.experts_per_token if model.num_experts else 1.0,
    )


def _width(model: Model) -> int:
    return model.experts_per_token * model.d_ff_expert + model.d_ff_shared if model.num_experts else model.d_ff


def model_limits(model: Model, cluster: Cluster, job: Job, at: Setting, *, state: str) -> tuple[Limit, ...]:
    """Limits of speed, then those of size; ``here`` is NaN where it would take a plan."""
    return (
        *_fsdp(at),
        *(_mixed(at) if at.sparsity == 1 else ()),
        *_dcn(cluster, job, at),
        *_sizes(model, cluster, job, state),
    )


def _fsdp(at: Setting) -> Iterator[Limit]:
    each = at.batch_tokens / at.num_chips
    least = limits.data_parallel_min_tokens_per_chip(at.alpha, at.num_axes) * at.sparsity
    sparse = " x E/k" if at.sparsity > 1 else ""
    yield Limit(
        name="tokens/chip, FSDP alone",
        formula=f"> alpha / {at.num_axes}{sparse}",
        limit=least,
        here=each,
        holds=each > least,
    )
    most = limits.fsdp_max_chips(at.batch_tokens / at.sparsity, at.alpha, at.num_axes)
    yield Limit(
        name="chips, FSDP alone",
        formula=f"< {at.num_axes} B / (alpha{sparse})" if sparse else f"< {at.num_axes} B / alpha",
        limit=most,
        here=at.num_chips,
        holds=at.num_chips < most,
    )


def _mixed(at: Setting) -> Iterator[Limit]:
    axes = {"fsdp_axes": at.fsdp_axes, "tensor_axes": at.tensor_axes}
    sizes = (at.batch_tokens, at.d_ff, at.num_chips)
    each = at.batch_tokens / at.num_chips
    least = limits.mixed_min_tokens_per_chip(at.alpha, at.d_ff, **axes)
    yield Limit(
        name="tokens/chip, with tensor", formula="> 4 alpha^2 / (Mx My F)", limit=least, here=each, holds=each > least
    )
    ratio = limits.mixed_math_over_comms(*sizes, at.alpha, **axes)
    yield Limit(
        name="T_math/T_comms at X_opt", formula="sqrt(BF MxMy/N)/(2 alpha)", limit=1.0, here=ratio, holds=ratio > 1
    )
    square = limits.mixed_discriminant(*sizes, at.alpha, **axes)
    yield Limit(name="discriminant", formula="(BF/alpha)^2 - 4FBN/MxMy", limit=0.0, here=square, holds=square > 0)
    roots = limits.fsdp_roots(*sizes, at.alpha, **axes)
    ways = math.nan if at.data_ways is None else at.data_ways
    if not math.isnan(roots.lower):
        yield _open("X, lower root", "> Mx(BF/alpha - root)/2F", roots.lower, ways, ways > roots.lower)
        yield _open("X, upper root", "< Mx(BF/alpha + root)/2F", roots.upper, ways, ways < roots.upper)
    best = limits.fsdp_best_size(*sizes, **axes)
    split = limits.round_split(best, at.num_chips)
    yield Limit(
        name="X_opt",
        formula="sqrt(B/F x Mx/My x N)",
        limit=best,
        here=ways,
        holds=None,
        note=f"in powers of two: {split.fsdp:,} x tensor {split.tensor:,}",
    )
    tensor = math.nan if at.tensor is None else at.tensor
    most = limits.tensor_max_size(at.d_ff, at.alpha, at.tensor_axes)
    yield _open("tensor", "< My F / alpha", most, tensor, tensor < most)


def _open(name: str, formula: str, limit: float, here: float, holds: bool) -> Limit:
    """A limit whose own number takes a choice: a hint where none was made."""
    return Limit(name=name, formula=formula, limit=limit, here=here, holds=None if math.isnan(here) else holds)


def _dcn(cluster: Cluster, job: Job, at: Setting) -> Iterator[Limit]:
    chip = cluster.chip
    if cluster.num_slices > 1 and chip.dcn_bytes_per_s_per_host and chip.chips_per_host:
        least = limits.dcn_min_batch_per_pod(at.peak_flops, chip.dcn_bytes_per_s_per_host, chip.chips_per_host)
        tokens = job.tokens_per_step / cluster.num_slices
        yield Limit(
            name="tokens/slice, over DCN",
            formula="> C x host chips / W_dcn",
            limit=least,
            here=tokens,
            holds=tokens > least,
        )


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
