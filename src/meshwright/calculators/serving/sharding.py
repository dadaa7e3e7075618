"""Bounds on sharding a model that serves, in closed form: weights sharded over one dim, and over two dims.

Bytes, FLOP/s and bytes/s are of one chip; link rates are of one axis, both directions. Sizes may be NumPy arrays.
Sections and exercises are of How to Scale Your Model.
"""

import msgspec
import numpy as np

from meshwright.algebra.sizes import Number
from meshwright.calculators.serving.replica import DecodeStep, ServingReplica
from meshwright.cost.formulas.limits import ici_intensity, tensor_max_size
from meshwright.cost.formulas.roofline import dtype_bytes
from meshwright.cost.letters import feed_forward_width
from meshwright.cost.network.collectives import latency_bound_bytes
from meshwright.cost.network.links import torus_width
from meshwright.report.answer import Facts


def hbm_over_link(hbm_bytes_per_s: Number, axis_bytes_per_s: Number) -> Number:
    """Returns beta = W_hbm / W_ici, 9 for a v5e. Source: section 7.3.2."""
    return hbm_bytes_per_s / axis_bytes_per_s


def decode_max_tensor(
    d_ff: Number, batch_seqs: Number, *, beta: Number, weight_element_bytes: Number = 2, activation_bytes: Number = 2
) -> Number:
    """Returns the size of a tensor axis up to which reading weights hides its communication: F / (B beta).

    w D F / (Y W_hbm) > a B D / W_ici, so narrow weights lower it: by w / a. Prefill is bound as training is, by
    `limits.tensor_max_size`. Source: section 7.3.2.
    """
    return weight_element_bytes / activation_bytes * d_ff / (batch_seqs * beta)


def product_link_s(
    batch_seqs: Number, d_model: Number, *, axis_bytes_per_s: Number, activation_bytes: Number = 2
) -> Number:
    """Returns the seconds of a product's result [B, D] on links of a tensor axis of any size: a B D / W_ici. 8.1.1."""
    return activation_bytes * batch_seqs * d_model / axis_bytes_per_s


class WeightStationary(msgspec.Struct, frozen=True, kw_only=True):
    """A layer whose weights stay, split over D (X chips on one axis) and over F (N / X chips) on M torus axes.

    In 16 bits: a gather and a scatter of [B, D] over F's axes, an AllReduce of [B, F] over D's. A switch counts as
    one axis for both. Source: exercise 7.7 and section 7.6.2.
    """

    d_model: Number
    d_ff: Number
    num_chips: Number
    num_axes: Number = 3

    @property
    def wide_axes(self) -> Number:
        """Axes that split F: A = M - 1, at least 1."""
        return np.maximum(self.num_axes - 1, 1)

    @property
    def best_size(self) -> Number:
        """The X that communicates least: sqrt(N D / (A F)), which is sqrt(N / 8) for F = 4 D on three axes."""
        return (self.num_chips * self.d_model / (self.wide_axes * self.d_ff)) ** 0.5

    def comms_s(self, batch_seqs: Number, *, over_d: Number, axis_bytes_per_s: Number) -> Number:
        """Returns the seconds of the collectives: 4 B D / (A X W) + 4 B F X / (N W), 8 sqrt(D F / (A N)) B / W at best.

        Three axes and F = 4 D give sqrt(128 / N) B D / W.
        """
        d_model_shard, d_ff_shard = self.d_model / (self.wide_axes * over_d), self.d_ff * over_d / self.num_chips
        return 4 * batch_seqs * (d_model_shard + d_ff_shard) / axis_bytes_per_s

    def tensor_comms_s(self, batch_seqs: Number, *, axis_bytes_per_s: Number) -> Number:
        """Returns the seconds of the gather and scatter if only F is split, over all axes: 4 B D / (M W)."""
        return 4 * batch_seqs * self.d_model / (self.num_axes * axis_bytes_per_s)

    @property
    def min_chips(self) -> Number:
        """Chips from which splitting D and F beats splitting F only: 4 M^2 F / (A D), 72 for F = 4 D (81 in the
        book)."""
        return 4 * self.num_axes**2 * self.d_ff / (self.wide_axes * self.d_model)


def sharding(replica: ServingReplica, batch_seqs: int) -> Facts | None:
    """Returns bounds on sharding, and seconds of one product and of a layer's collectives; None without chip links.

    W is the rate of a torus axis as in `limits`, or of a chip's link in a switched domain.
    """
    torus, chip, num_chips = torus_width(replica.cluster), replica.cluster.chip, replica.cluster.num_chips
    link, hop_s = chip.nvlink_bytes_per_s, chip.nvlink_hop_s
    if torus:
        link, hop_s = chip.ici_link_bytes_per_s, chip.ici_hop_s
    if replica.model is None or link is None or num_chips == 1:
        return None
    rate, num_axes, hbm = torus.bytes_per_s if torus else link, sum(torus.axes) if torus else 1, replica.hbm_bytes_per_s
    d_model, d_ff, weight_bytes = replica.model.d_model, feed_forward_width(replica.model), dtype_bytes(replica.weights)
    product = DecodeStep(
        batch_seqs=batch_seqs, kv_bytes=0, weight_bytes=weight_bytes * d_model * d_ff, active_params=d_model * d_ff,
        num_chips=num_chips, peak_flops=replica.peak_flops, hbm_bytes_per_s=hbm,
    )  # fmt: skip
    layer = WeightStationary(d_model=d_model, d_ff=d_ff, num_chips=num_chips, num_axes=num_axes)
    beta, best_over_d = hbm_over_link(hbm, rate), layer.best_size
    max_tensor = decode_max_tensor(d_ff, batch_seqs, beta=beta, weight_element_bytes=weight_bytes)
    max_shards = 2 * batch_seqs * d_model / (link * hop_s)
    over_d_text, over_f_text = ("((M - 1) D)", "((M - 1) F)") if num_axes > 1 else ("D", "F")
    bound_of = {
        "tensor, prefill": ("< M F / alpha", tensor_max_size(d_ff, ici_intensity(replica.peak_flops, rate), num_axes)),
        "tensor, generation": ("< w F / (2 B beta)", max_tensor),
        "chips, two dims send less": (f"> 4 M^2 F / {over_d_text}", layer.min_chips),
        "shards over D, two dims": (f"= sqrt(N D / {over_f_text})", best_over_d),
        "shards, gather not by latency": ("< 2 B D / (W hop)", max_shards),
    }
    return {
        "letters": {"alpha": ici_intensity(replica.peak_flops, rate), "beta": beta, "M": num_axes, "N": num_chips,
                    "D": d_model, "F": d_ff, "B": batch_seqs, "w": weight_bytes, "W": rate, "hop": hop_s},
        "beta": beta,
        "bounds": [{"name": name, "formula": formula, "bound": bound} for name, (formula, bound) in bound_of.items()],
        "product": {"links_s": product_link_s(batch_seqs, d_model, axis_bytes_per_s=rate),
                    "hbm_s": product.weights_s, "math_s": product.flops_s},
        "layer": {"tensor_s": layer.tensor_comms_s(batch_seqs, axis_bytes_per_s=rate),
                  "two_dims_s": layer.comms_s(batch_seqs, over_d=best_over_d, axis_bytes_per_s=rate)},
        "latency_bound_bytes": latency_bound_bytes(link, hop_s=hop_s, num_shards=num_chips),
    }  # fmt: skip
