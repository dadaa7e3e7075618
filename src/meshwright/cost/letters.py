"""The letters of "How to Scale Your Model": numbers of a plan, or of a model on a cluster, that closed forms read."""

import math

import msgspec

from meshwright.cost.formulas import limits
from meshwright.spec.model import Model


class Letters(msgspec.Struct, frozen=True, kw_only=True):
    """The letters of the formulas, for one slice and stage; None if a letter is unknown or has no meaning here.

    B is ``batch_tokens`` of one microbatch: weights are gathered anew for each, so its tokens have to hide them. N is
    ``num_chips``, X is ``data_ways`` = data x fsdp x expert x context, Y is ``tensor``, F is ``d_ff``, C is
    ``peak_flops``, alpha is C / W in FLOPs per byte with W of one torus axis, which ``width`` describes, and
    ``sheet_alpha`` is alpha by the data sheet. M_X and M_Y are the torus axes of X and Y, each at least one; if other
    axes are rings, a line counts as a half. ``sparsity`` is E / k: hiding the same weights takes that many times the
    tokens. ``num_slices`` counts slices that divide the batch.
    """

    batch_tokens: float
    num_microbatches: int = 1
    num_chips: int
    num_stages: int = 1
    num_slices: int = 1
    d_ff: int
    data_ways: float | None = None
    peak_flops: float
    alpha: float | None = None
    sheet_alpha: float | None = None
    width: str = ""
    num_axes: float
    fsdp_axes: float = 1
    tensor_axes: float = 1
    tensor: int | None = None
    sparsity: float = 1.0

    # links of a switched cluster: C / W of the domain or node, C / W of a domain, and the slowest link of a chip
    link: str = ""
    link_alpha: float | None = None
    domain_alpha: float | None = None
    domain: int | None = None
    flat_bytes_per_s: float | None = None
    num_params: float | None = None
    num_active_params: float | None = None

    # the data-centre network; its gradients cross once per step, whatever the microbatches
    slice_tokens: float | None = None
    dcn_bytes_per_s_per_host: float | None = None
    chips_per_host: int | None = None
    pod_chips: int | None = None

    # from the priced steps of a plan, for the pass that needs the most tokens
    chip_tokens: float | None = None
    weights_s: float | None = None
    weights_layer_s: float | None = None
    gradients_s: float | None = None
    gradients_layer_s: float | None = None
    schedule: str = ""
    bubble_s: float | None = None
    microbatch_s: float | None = None
    ring_bytes_per_s: float | None = None
    ring_positions: float | None = None
    num_heads: int = 1
    num_kv_heads: int = 1
    causal: bool = True
    num_experts: int = 0
    experts_per_token: int = 1
    copy_tokens: float | None = None
    hbm_tokens: float | None = None
    expert_width: int | None = None
    exchange_s: float | None = None
    experts_s: float | None = None

    # sizes, of the whole cluster
    all_chips: int
    step_tokens: float
    seq_len: int
    context: int | None = None
    batch_seqs: int | None = None
    replicas: int | None = None
    memory_bytes: float | None = None
    needed_bytes: float | None = None
    shared_bytes: float | None = None
    state_bytes: float | None = None
    train_tokens: int | None = None
    run_days: float | None = None

    @property
    def fsdp_alpha(self) -> float | None:
        """C / W of the links that FSDP uses; None for one torus chip, or if it is not known."""
        return self.link_alpha if self.alpha is None else self.alpha if self.num_chips > 1 else None

    @property
    def tensor_most(self) -> float | None:
        """The size of ``tensor`` up to which compute hides its collectives; None where no closed form gives it."""
        if self.alpha is not None:
            max_size = limits.tensor_max_size(self.d_ff, self.alpha, self.tensor_axes)
            return None if self.mixed_alpha is None else max_size
        return None if self.domain_alpha is None else limits.tensor_max_size(self.d_ff, self.domain_alpha)

    @property
    def tokens_per_chip(self) -> float:
        return self.batch_tokens / self.num_chips

    @property
    def mixed_alpha(self) -> float | None:
        """C / W for mixed FSDP and tensor parallelism of a dense model on several torus chips; None elsewhere."""
        return self.alpha if self.sparsity == 1 and self.num_chips > 1 else None

    @property
    def mixed_most_chips(self) -> float:
        """Chips up to which some `mixture` is compute-bound; only for dense models on tori."""
        axis_counts = {"fsdp_axes": self.fsdp_axes, "tensor_axes": self.tensor_axes}
        return self.batch_tokens / float(limits.mixed_min_tokens_per_chip(self.mixed_alpha, self.d_ff, **axis_counts))

    @property
    def fsdp_most_chips(self) -> float:
        """Chips up to which FSDP without tensor parallelism is compute-bound; needs `fsdp_alpha`."""
        num_links = 1 if self.alpha is None else self.num_axes  # torus axes that FSDP uses at once
        return float(limits.fsdp_max_chips(self.batch_tokens / self.sparsity, self.fsdp_alpha, num_links))

    @property
    def mixture(self) -> limits.Mixture:
        """Mixed FSDP and tensor parallelism with these letters."""
        return limits.Mixture(
            self.batch_tokens, self.d_ff, self.num_chips, self.mixed_alpha, self.fsdp_axes, self.tensor_axes
        )

    @property
    def roots(self) -> limits.Roots | None:
        """The sizes X between which the mixture is compute-bound; None if there are none, or no `mixed_alpha`."""
        if self.mixed_alpha is None:
            return None
        roots = self.mixture.roots
        return None if math.isnan(roots.lower) else roots


def feed_forward_width(model: Model) -> int:
    """Returns F of a dense block, or the sum over all experts that one token uses, shared ones included."""
    return model.experts_per_token * model.d_ff_expert + model.d_ff_shared if model.num_experts else model.d_ff


def sparsity(model: Model) -> float:
    """Returns E / k, experts over experts per token: hiding weights takes that many times the tokens. 1 if dense."""
    return model.num_experts / model.experts_per_token if model.num_experts else 1.0
