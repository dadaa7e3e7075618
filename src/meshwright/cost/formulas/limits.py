"""Closed forms of training: the sizes at which a form of sharding stops being compute-bound.

Explanations show them and tests compare derived costs with them; no plan is priced with them. ``batch_tokens`` is B in
tokens, ``alpha`` is C / W_ici: FLOP/s of one chip over the two-way bytes/s of one torus axis. ``num_chips`` is N = X Y:
FSDP over X chips on ``fsdp_axes`` torus axes, tensor parallelism over Y chips on ``tensor_axes``. Sizes may be NumPy
arrays, except in a `Mixture`. Source: How to Scale Your Model, section 5.
"""

import math

import msgspec
import numpy as np

from meshwright.algebra.sizes import Number
from meshwright.core.errors import InputError

MAX_BUBBLE = 0.1
"""Largest share of a step that a bubble may take in the limit on microbatches."""


class Roots(msgspec.Struct, frozen=True, kw_only=True):
    """The FSDP sizes between which mixed FSDP and tensor parallelism is compute-bound; NaN if there are none."""

    lower: Number
    upper: Number


def ici_intensity(peak_flops: Number, axis_bytes_per_s: Number) -> Number:
    """Returns alpha = C / W_ici in FLOPs per byte, per chip: 2550 for a v5p in bf16. Source: section 5.1.1."""
    return peak_flops / axis_bytes_per_s


def data_parallel_min_tokens_per_chip(alpha: Number, num_axes: Number = 1) -> Number:
    """Returns the tokens per chip above which DP and FSDP are compute-bound: alpha / n_axes. Source: section 5.1.1."""
    return alpha / num_axes


def data_parallel_min_batch(alpha: Number, num_axes: Number, num_chips: Number) -> Number:
    """Returns the tokens per step above which DP and FSDP over ``num_chips`` are compute-bound."""
    return data_parallel_min_tokens_per_chip(alpha, num_axes) * num_chips


def fsdp_max_chips(batch_tokens: Number, alpha: Number, num_axes: Number) -> Number:
    """Returns the chips up to which DP or FSDP is compute-bound at a batch: B n_axes / alpha. Source: section 5.1.2."""
    return batch_tokens / data_parallel_min_tokens_per_chip(alpha, num_axes)


def tensor_max_size(d_ff: Number, alpha: Number, num_axes: Number = 1) -> Number:
    """Returns the size below which a tensor axis is compute-bound at any batch: n_axes F / alpha. Section 5.1.3.

    The precision cancels: int8 doubles alpha and halves the bytes.
    """
    return num_axes * d_ff / alpha


def mixed_min_tokens_per_chip(alpha: Number, d_ff: Number, *, fsdp_axes: Number, tensor_axes: Number) -> Number:
    """Returns the tokens per chip below which no mix of FSDP and tensor is compute-bound: 4 alpha^2 / (M_X M_Y F)."""
    return 4 * alpha**2 / (fsdp_axes * tensor_axes * d_ff)


class Mixture(msgspec.Struct, frozen=True):
    """FSDP over X of N chips and tensor parallelism over N / X for a batch of tokens; its properties solve for X."""

    batch_tokens: Number
    d_ff: Number
    num_chips: Number
    alpha: Number
    fsdp_axes: Number
    tensor_axes: Number

    @property
    def best_size(self) -> Number:
        """X_opt = sqrt(B/F x M_X/M_Y x N), which has the least communication. Source: section 5.1.4."""
        return (self.batch_tokens / self.d_ff * self.fsdp_axes / self.tensor_axes * self.num_chips) ** 0.5

    @property
    def math_over_comms(self) -> Number:
        """T_math / T_comms at X_opt: sqrt(B F M_X M_Y) / (2 alpha sqrt(N)). It grows as the square ROOT of B."""
        product = self.batch_tokens * self.d_ff * self.fsdp_axes * self.tensor_axes
        return product**0.5 / (2 * self.alpha * self.num_chips**0.5)

    @property
    def discriminant(self) -> Number:
        """(B F / alpha)^2 - 4 F B N / (M_X M_Y), negative if no X is compute-bound.

        It is the discriminant of F/M_X X^2 - (B F / alpha) X + B N / M_Y < 0: T_comms < T_math, multiplied by X N.
        """
        linear_term, axes_product = self.batch_tokens * self.d_ff / self.alpha, self.fsdp_axes * self.tensor_axes
        return linear_term**2 - 4 * self.d_ff * self.batch_tokens * self.num_chips / axes_product

    @property
    def roots(self) -> Roots:
        """X = M_X/(2F) x (B F / alpha -+ sqrt(discriminant)); between the two the mix is compute-bound.

        Source: section 6.3, whose 1927 is the upper root.
        """
        sqrt_discriminant = math.sqrt(self.discriminant) if self.discriminant >= 0 else math.nan
        half_width = sqrt_discriminant * self.fsdp_axes / (2 * self.d_ff)
        middle = fsdp_roots_middle(self.batch_tokens, self.alpha, fsdp_axes=self.fsdp_axes)
        return Roots(lower=middle - half_width, upper=middle + half_width)


class MixedLayer(msgspec.Struct, frozen=True, kw_only=True):
    """The forward pass of two matrices D x F in 16 bits with FSDP over X and tensor parallelism over Y, M axes each.

    Weights and activations are sent at once, on separate links, so the longer of both counts. Source: section 5.1.4,
    whose figure 16 this is.
    """

    batch_tokens: Number
    d_model: Number
    d_ff: Number
    fsdp: Number = 1
    tensor: Number = 1

    def math_s(self, peak_flops: Number) -> Number:
        """Returns the seconds of compute: 4 B D F / (X Y C)."""
        return 4 * self.batch_tokens * self.d_model * self.d_ff / (self.fsdp * self.tensor * peak_flops)

    def comms_s(self, axis_bytes_per_s: Number, *, fsdp_axes: Number, tensor_axes: Number) -> Number:
        """Returns seconds: max(4 D F / (Y W M_X), 4 B D / (X W M_Y)), a term being 0 if its own X or Y is 1."""
        weights_s = 4 * self.d_model * self.d_ff / (self.tensor * axis_bytes_per_s * fsdp_axes) * (self.fsdp > 1)
        acts_s = 4 * self.batch_tokens * self.d_model / (self.fsdp * axis_bytes_per_s * tensor_axes) * (self.tensor > 1)
        return np.maximum(weights_s, acts_s)


def fsdp_roots_middle(batch_tokens: Number, alpha: Number, *, fsdp_axes: Number) -> Number:
    """Returns the mean of both roots of a `Mixture`: B M_X / (2 alpha)."""
    return batch_tokens * fsdp_axes / (2 * alpha)


def round_split(fsdp_size: float, num_chips: int) -> tuple[int, int]:
    """Returns the power of two nearest to X by ratio, but at most N, and the largest power of two up to N over it.

    Raises InputError for a size that is not positive.
    """
    if fsdp_size <= 0 or num_chips < 1:
        raise InputError(f"cannot split {num_chips} chips by {fsdp_size:g}. Give positive sizes.")
    max_size = 2 ** int(math.log2(num_chips))
    rounded_fsdp = min(max_size, 2 ** max(0, round(math.log2(fsdp_size))))
    return rounded_fsdp, 2 ** int(math.log2(num_chips / rounded_fsdp))


def dcn_min_batch_per_pod(peak_flops: Number, dcn_bytes_per_s_per_host: Number, chips_per_host: Number) -> Number:
    """Returns the tokens per pod above which data parallelism between pods is compute-bound: C_pod / W_dcn.

    The number of chips cancels: peak x chips per host / DCN per host. Source: section 5.1.6.
    """
    return peak_flops * chips_per_host / dcn_bytes_per_s_per_host


def sequence_limit_chips(batch_tokens: Number, seq_len: Number, *, context: Number = 1, tensor: Number = 1) -> Number:
    """Returns the most chips that a batch can use: sequences x context x tensor."""
    return batch_tokens / seq_len * context * tensor


def flat_fsdp_comms_s(
    num_params: Number, bytes_per_s: Number, *, bytes_per_param: Number = 2, num_collectives: Number = 3
) -> Number:
    """Returns the seconds of FSDP's communication in a step if each collective moves all weights at one rate per
    device.

    By default two gathers and a scatter. Source: Horace He's lecture on ML systems, 70e9 x 2 x 3 / 200e9."""
    return num_params * bytes_per_param * num_collectives / bytes_per_s


def flat_fsdp_max_chips(batch_tokens: Number, peak_flops: Number, bytes_per_s: Number) -> Number:
    """Returns the number of devices on which a step's 6 N B FLOPs take as long as `flat_fsdp_comms_s`; N cancels."""
    return 6 * batch_tokens * bytes_per_s / (peak_flops * 2 * 3)


def min_microbatches(bubble_s: float, each_s: float) -> float:
    """Returns the microbatches M above which the bubble takes less than s = ``MAX_BUBBLE`` of M passes and the bubble.

    With GPipe and 1F1B the bubble is (P - 1) x each on P stages: M > (P - 1) (1 - s) / s, nine times P - 1 for a tenth.
    """
    return bubble_s / each_s * (1 - MAX_BUBBLE) / MAX_BUBBLE


def ring_min_positions(
    peak_flops: float, link_bytes_per_s: float, *, num_heads: int, num_kv_heads: int, causal: bool
) -> float:
    """Returns the query positions t per device above which a send of ring attention hides behind its computation.

    A block takes 4 t^2 N H FLOPs, half with causal masks. A device sends keys and values of t positions, 2 x 2 t K H
    bytes in 16 bits, one way: t > C / W x K / N, twice that with causal masks. This follows from section 3.2.
    """
    return (1 + causal) * peak_flops / link_bytes_per_s * num_kv_heads / num_heads


def reduce_after_min_dim(alpha: Number) -> Number:
    """Returns the contracting size D above which multiplying slices, then an AllReduce, beats gathering first: 2 alpha.

    Source: exercise 3.4, which compares 4BF/W with 2BDF/C.
    """
    return 2 * alpha


def reduce_after_max_shards(d_contract: Number, alpha: Number) -> Number:
    """Returns the shards X up to which slicing and reducing is compute-bound: D / (2 alpha). Source: exercise 3.4."""
    return d_contract / reduce_after_min_dim(alpha)
