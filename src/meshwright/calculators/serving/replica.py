"""One copy of a model on a cluster that serves: bytes of weights and caches, steps of any batch, limits of sharding."""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from meshwright.core.errors import CannotRunError
from meshwright.cost.formulas import serving
from meshwright.cost.formulas.accounting import kv_cache_bytes
from meshwright.cost.formulas.limit_table import feed_forward_width, sparsity
from meshwright.cost.formulas.limits import ici_intensity, tensor_max_size
from meshwright.cost.formulas.roofline import critical_batch, dtype_bytes
from meshwright.cost.network.collectives import latency_bound_bytes
from meshwright.cost.network.links import torus_width
from meshwright.spec.chip import known
from meshwright.spec.cluster import Cluster
from meshwright.spec.model import Model
from meshwright.spec.weights import num_active_params, num_params, params_by_part


class ServingReplica(msgspec.Struct, frozen=True, kw_only=True):
    """A model, or bare numbers of one: without ``model`` the two numbers are needed, with it they replace its own.

    ``layers_per_cache`` neighbours of the model's layers keep one cache. The price is that of a chip, instead of the
    catalogue's.
    """

    cluster: Cluster
    model: Model | None = None
    params: float | None = None
    kv_token_bytes: float | None = None
    weights: str = "bf16"
    kv: str = "bf16"
    layers_per_cache: int = 1
    peak_flops: float
    price_usd_per_hour: float | None = None

    @property
    def num_params(self) -> float:
        """Parameters of the model."""
        return num_params(self.model) if self.model and self.params is None else float(self.params or 0)

    @property
    def active_params(self) -> float:
        """Parameters that a token uses, shared in proportion where their number is given."""
        return self.num_params * (num_active_params(self.model) / num_params(self.model) if self.model else 1)

    @property
    def weight_bytes(self) -> float:
        """Bytes of all weights."""
        return serving.weight_bytes(self.num_params, dtype_bytes(self.weights))

    @property
    def memory_bytes(self) -> float:
        """Bytes that programs may fill on a chip."""
        return known(self.cluster.chip, "memory_bytes")

    @property
    def hbm_bytes_per_s(self) -> float:
        """Memory bandwidth of a chip."""
        return known(self.cluster.chip, "hbm_bytes_per_s")

    @property
    def free_bytes(self) -> float:
        """Bytes that weights leave to caches."""
        chips = self.cluster.num_chips
        return serving.free_bytes(self.memory_bytes, num_chips=chips, weight_bytes=self.weight_bytes)

    @property
    def critical_batch(self) -> float:
        """Sequences from which products with weights are bound by FLOPs."""
        experts = sparsity(self.model) if self.model else 1
        width = dtype_bytes(self.weights)
        return critical_batch(self.peak_flops, self.hbm_bytes_per_s, weight_bytes=width, num_experts=experts)

    def usd_per_million_tokens(self, tokens_per_s: float) -> float | None:
        """Returns the dollars of a million tokens at this rate of all chips; None where a chip has no price."""
        chips, price = self.cluster.num_chips, self.price_usd_per_hour or self.cluster.chip.price_usd_per_hour
        return price and serving.usd_per_million_tokens(tokens_per_s, num_chips=chips, price_usd_per_hour=price)

    def kv_bytes(self, num_positions: Any) -> Any:
        """Returns the bytes of one cache of that many positions."""
        if self.model is None or self.kv_token_bytes is not None:
            return serving.cache_bytes(self.kv_token_bytes, num_positions=num_positions)
        return kv_cache_bytes(self.model, num_positions, element_bytes=dtype_bytes(self.kv)) / self.layers_per_cache

    def batch_that_fits(self, kv_bytes: float) -> int:
        """Returns the most caches that fit beside the weights. Raises CannotRunError if none does."""
        found = int(serving.largest_batch(self.free_bytes, kv_bytes))
        if found:
            return found
        least = serving.smallest_slice(self.cluster.chip, self.weight_bytes + kv_bytes)
        raise CannotRunError(
            f"weights of {self.weight_bytes / 1e9:,.3g} GB and a cache of {kv_bytes / 1e9:,.3g} GB do not fit "
            f"{self.cluster.short_name}. Use {least.short_name}, fewer positions, or narrower --weights and --kv."
        )

    def step(self, batch_seqs: Any, kv_bytes: Any) -> serving.DecodeStep:
        """Returns one step of generation; of experts, those that the batch reaches in the mean are read."""
        share: Any = 1.0
        if self.model and self.model.num_experts:
            count, each = self.model.num_experts, self.model.experts_per_token
            unread = 1 - serving.experts_read(batch_seqs, num_experts=count, active_experts=each) / count
            share = 1 - params_by_part(self.model)["experts"] / num_params(self.model) * unread
        return serving.DecodeStep(
            batch_seqs=batch_seqs,
            kv_bytes=kv_bytes,
            weight_bytes=self.weight_bytes * share,
            active_params=self.active_params,
            num_chips=self.cluster.num_chips,
            peak_flops=self.peak_flops,
            hbm_bytes_per_s=self.hbm_bytes_per_s,
        )

    def points(self, batches: Sequence[int], kv_bytes: float) -> dict[str, Any]:
        """Returns an array for each figure of a step, with an entry for every batch.

        Source: How to Scale Your Model, section 8.2, whose interactive figures these are.
        """
        step = self.step(np.asarray(batches), kv_bytes)
        names = ("weights_s", "kv_s", "flops_s", "time_s", "tokens_per_s", "tokens_per_s_per_chip", "longest")
        every = {name: np.broadcast_to(getattr(step, name), step.batch_seqs.shape) for name in names}
        return {"batch": step.batch_seqs, **every, "fits": step.batch_seqs <= self.batch_that_fits(kv_bytes)}

    def sharding(self, batch_seqs: int) -> dict[str, Any] | None:
        """Returns bounds on sharding, and seconds of one product and of a layer's collectives; None without links.

        W is a torus axis as in `limits`, or a chip's own link in a switched domain.
        """
        width, chip, chips = torus_width(self.cluster), self.cluster.chip, self.cluster.num_chips
        link, hop_s = chip.nvlink_bytes_per_s, chip.nvlink_hop_s
        if width:
            link, hop_s = chip.ici_link_bytes_per_s, chip.ici_hop_s
        if self.model is None or link is None or chips == 1:
            return None
        rate, axes, hbm = width.bytes_per_s if width else link, sum(width.axes) if width else 1, self.hbm_bytes_per_s
        d_model, d_ff, width_bytes = self.model.d_model, feed_forward_width(self.model), dtype_bytes(self.weights)
        product = serving.TensorProduct(
            batch_seqs=batch_seqs, d_model=d_model, d_ff=d_ff, tensor=chips, weight_element_bytes=width_bytes
        )
        layer = serving.WeightStationary(d_model=d_model, d_ff=d_ff, num_chips=chips, num_axes=axes)
        beta, best = serving.hbm_over_link(hbm, rate), layer.best_size
        most = serving.decode_max_tensor(d_ff, batch_seqs, beta=beta, weight_element_bytes=width_bytes)
        shards = serving.latency_bound_shards(2 * batch_seqs * d_model, link, hop_s=hop_s)
        rows = {
            "tensor, prefill": ("< M F / alpha", tensor_max_size(d_ff, ici_intensity(self.peak_flops, rate), axes)),
            "tensor, generation": ("< w F / (2 B beta)", most),
            "chips, two dims send less": ("> 4 M^2 F / (G D)", layer.min_chips),
            "shards over D, two dims": ("= sqrt(N D / (G F))", best),
            "shards, gather not by latency": ("< 2 B D / (W hop)", shards),
        }
        return {
            "beta": beta,
            "bounds": [{"name": name, "formula": formula, "bound": bound} for name, (formula, bound) in rows.items()],
            "product": {"links_s": product.link_s(rate), "hbm_s": product.hbm_s(hbm),
                        "math_s": product.math_s(self.peak_flops)},
            "layer": {"tensor_s": layer.tensor_comms_s(batch_seqs, axis_bytes_per_s=rate),
                      "two_dims_s": layer.comms_s(batch_seqs, over_d=best, axis_bytes_per_s=rate)},
            "latency_bound_bytes": latency_bound_bytes(link, hop_s=hop_s, num_shards=chips),
        }  # fmt: skip
