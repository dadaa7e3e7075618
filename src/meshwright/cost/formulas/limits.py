"""The closed forms of the book's chapter on training: when a form of sharding stops being compute-bound.

They are the reasons that explanations give and the tests that derived costs must meet; no plan is priced with
them. ``batch_tokens`` counts tokens (the book's B, with T inside), ``alpha`` is C / W_ici: FLOP/s of one chip over
the two-way bytes/s of one torus axis. ``num_chips`` is N = X Y; X chips share by FSDP over ``fsdp_axes`` torus axes,
Y by tensor parallelism over ``tensor_axes``. Sizes may be NumPy arrays, but those of a `Mixture`.
Source: How to Scale Your Model, section 5.
"""

import math

import msgspec

from meshwright.algebra.sizes import Number
from meshwright.core.errors import InputError

MAX_BUBBLE = 0.1
"""Share of a step that may be idle before more microbatches are asked for."""


class Roots(msgspec.Struct, frozen=True, kw_only=True):
    """The FSDP sizes between which mixed FSDP and tensor parallelism is compute-bound; NaN when there are none."""

    lower: Number
    upper: Number


def ici_intensity(peak_flops: Number, axis_bytes_per_s: Number) -> Number:
    """alpha = C / W_ici in FLOPs per byte, per chip: 2550 for a v5p in bf16. Source: section 5.1.1."""
    return peak_flops / axis_bytes_per_s


def data_parallel_min_tokens_per_chip(alpha: Number, num_axes: Number = 1) -> Number:
    """Tokens per chip above which DP and FSDP are compute-bound: B/X > alpha / n_axes. Source: section 5.1.1."""
    return alpha / num_axes


def data_parallel_min_batch(alpha: Number, num_axes: Number, num_chips: Number) -> Number:
    """Tokens per step above which DP and FSDP are compute-bound on all chips."""
    return data_parallel_min_tokens_per_chip(alpha, num_axes) * num_chips


def fsdp_max_chips(batch_tokens: Number, alpha: Number, num_axes: Number) -> Number:
    """Chips up to which DP or FSDP is compute-bound at a batch: B n_axes / alpha. Source: section 5.1.2."""
    return batch_tokens / data_parallel_min_tokens_per_chip(alpha, num_axes)


def tensor_max_size(d_ff: Number, alpha: Number, num_axes: Number = 1) -> Number:
    """Largest compute-bound tensor axis: Y < n_axes F / alpha, whatever the batch. Source: section 5.1.3.

    The precision cancels: int8 doubles alpha and halves the bytes.
    """
    return num_axes * d_ff / alpha


def mixed_min_tokens_per_chip(alpha: Number, d_ff: Number, *, fsdp_axes: Number, tensor_axes: Number) -> Number:
    """Tokens per chip below which no split of FSDP and tensor is compute-bound: 4 alpha^2 / (M_X M_Y F)."""
    return 4 * alpha**2 / (fsdp_axes * tensor_axes * d_ff)


class Mixture(msgspec.Struct, frozen=True):
    """FSDP and tensor parallelism of a batch of tokens on N chips, by FSDP over X of them."""

    batch_tokens: Number
    d_ff: Number
    num_chips: Number
    alpha: Number
    fsdp_axes: Number
    tensor_axes: Number

    @property
    def best_size(self) -> Number:
        """X_opt = sqrt(B/F x M_X/M_Y x N): least communication. Source: section 5.1.4."""
        return (self.batch_tokens / self.d_ff * self.fsdp_axes / self.tensor_axes * self.num_chips) ** 0.5

    @property
    def math_over_comms(self) -> Number:
        """T_math / T_comms at X_opt: sqrt(B F M_X M_Y) / (2 alpha sqrt(N)). It grows as the square ROOT of B."""
        product = self.batch_tokens * self.d_ff * self.fsdp_axes * self.tensor_axes
        return product**0.5 / (2 * self.alpha * self.num_chips**0.5)

    @property
    def discriminant(self) -> Number:
        """(B F / alpha)^2 - 4 F B N / (M_X M_Y): negative when no split is compute-bound.

        The discriminant of F/M_X X^2 - (B F / alpha) X + B N / M_Y < 0, which is T_comms < T_math times X N.
        """
        linear, axes = self.batch_tokens * self.d_ff / self.alpha, self.fsdp_axes * self.tensor_axes
        return linear**2 - 4 * self.d_ff * self.batch_tokens * self.num_chips / axes

    @property
    def roots(self) -> Roots:
        """X = M_X/(2F) x (B F / alpha -+ sqrt(discriminant)): compute-bound between the two.

        Source: section 6.3, whose 1927 is the upper root.
        """
        root = math.sqrt(self.discriminant) if self.discriminant >= 0 else math.nan
        width = root * self.fsdp_axes / (2 * self.d_ff)
        middle = fsdp_roots_middle(self.batch_tokens, self.alpha, fsdp_axes=self.fsdp_axes)
        return Roots(lower=middle - width, upper=middle + width)


def fsdp_roots_middle(batch_tokens: Number, alpha: Number, *, fsdp_axes: Number) -> Number:
    """The first term of both roots: B M_X / (2 alpha)."""
    return batch_tokens * fsdp_axes / (2 * alpha)


def round_split(fsdp_size: float, num_chips: int) -> tuple[int, int]:
    """X as the power of two nearest to it (as a ratio), and the largest power of two that the other chips allow."""
    if fsdp_size <= 0 or num_chips < 1:
        raise InputError(f"cannot split {num_chips} chips by {fsdp_size:g}. Give positive sizes.")
    largest = 2 ** int(math.log2(num_chips))
    fsdp = min(largest, 2 ** max(0, round(math.log2(fsdp_size))))
    return fsdp, 2 ** int(math.log2(num_chips / fsdp))


def dcn_min_batch_per_pod(peak_flops: Number, dcn_bytes_per_s_per_host: Number, chips_per_host: Number) -> Number:
    """Tokens per pod above which data parallelism between pods is compute-bound: C_pod / W_dcn.

    The number of chips cancels: peak x chips per host / DCN per host. Source: section 5.1.6.
    """
    return peak_flops * chips_per_host / dcn_bytes_per_s_per_host


def sequence_limit_chips(batch_tokens: Number, seq_len: Number, *, context: Number = 1, tensor: Number = 1) -> Number:
    """Most chips a batch can use when each holds at least one sequence, or 1/context of one."""
    return batch_tokens / seq_len * context * tensor


def flat_fsdp_comms_s(
    num_params: Number, bytes_per_s: Number, *, bytes_per_param: Number = 2, num_collectives: Number = 3
) -> Number:
    """FSDP seconds per step when each collective moves all weights at one flat rate per device.

    Two gathers and a scatter. Source: the GPU lecture's estimate, 70e9 x 2 x 3 / 200e9.
    """
    return num_params * bytes_per_param * num_collectives / bytes_per_s


def flat_fsdp_max_chips(batch_tokens: Number, peak_flops: Number, bytes_per_s: Number) -> Number:
    """Devices at which the 6 N B FLOPs of a step take as long as ``flat_fsdp_comms_s``; the model cancels."""
    return 6 * batch_tokens * bytes_per_s / (peak_flops * 2 * 3)


def min_microbatches(bubble_s: float, each_s: float) -> float:
    """Microbatches M from which a bubble is less than s = ``MAX_BUBBLE`` of a step: bubble / (M each + bubble) < s.

    Of GPipe and 1F1B, whose bubble is (K - 1) x each: M > (K - 1) (1 - s) / s, nine times K - 1 for a tenth.
    """
    return bubble_s / each_s * (1 - MAX_BUBBLE) / MAX_BUBBLE


def ring_min_positions(
    peak_flops: float, link_bytes_per_s: float, *, num_heads: int, num_kv_heads: int, causal: bool
) -> float:
    """Query positions t of a device from which a hop of ring attention hides behind the attention of a hop.

    A hop is 4 t^2 N H FLOPs, half with causal masks, and sends t positions of K heads' keys and values, 2 x 2 t K H
    bytes in 16 bits, one way: t > C / W x K / N, twice that with causal masks. Follows from section 3.2's rules.
    """
    return (1 + causal) * peak_flops / link_bytes_per_s * num_kv_heads / num_heads


def reduce_after_min_dim(alpha: Number) -> Number:
    """Contracting size D above which computing on slices and an AllReduce beats gathering first: 2 alpha.

    Source: exercise 3.4: 4BF/W against 2BDF/C.
    """
    return 2 * alpha


def reduce_after_max_shards(d_contract: Number, alpha: Number) -> Number:
    """Shards X up to which slicing and reducing is still compute-bound: D / (2 alpha). Source: exercise 3.4."""
    return d_contract / reduce_after_min_dim(alpha)
