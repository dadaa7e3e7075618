"""One copy of a model on a cluster that serves: bytes of weights and caches, steps of any batch, limits of sharding."""

from typing import Any

import msgspec
import numpy as np

from meshwright.calculators.training.kv_cache import cache_designs
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


class Replica(msgspec.Struct, frozen=True, kw_only=True):
    """A model, or bare numbers of one: without ``model`` the two numbers are needed, with it they replace its own."""

    cluster: Cluster
    model: Model | None = None
    params: float | None = None
    kv_token_bytes: float | None = None
    weights: str = "bf16"
    kv: str = "bf16"
    peak_flops: float

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
    def free_bytes(self) -> float:
        """Bytes that weights leave to caches."""
        chips = self.cluster.num_chips
        return serving.free_bytes(self.memory_bytes, num_chips=chips, weight_bytes=self.weight_bytes)

    @property
    def critical_batch(self) -> float:
        """Sequences from which products with weights are bound by FLOPs."""
        rates, width = (self.peak_flops, known(self.cluster.chip, "hbm_bytes_per_s")), dtype_bytes(self.weights)
        return critical_batch(*rates, weight_bytes=width, num_experts=sparsity(self.model) if self.model else 1)

    def kv_bytes(self, num_positions: Any) -> Any:
        """Returns the bytes of one cache of that many positions."""
        if self.model is None or self.kv_token_bytes is not None:
            return serving.cache_bytes(self.kv_token_bytes, num_positions=num_positions)
        return kv_cache_bytes(self.model, num_positions, element_bytes=dtype_bytes(self.kv))

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
        return serving.DecodeStep(
            batch_seqs=batch_seqs,
            kv_bytes=kv_bytes,
            weight_bytes=self.weight_bytes * self._read_share(batch_seqs),
            active_params=self.active_params,
            num_chips=self.cluster.num_chips,
            peak_flops=self.peak_flops,
            hbm_bytes_per_s=known(self.cluster.chip, "hbm_bytes_per_s"),
        )

    def _read_share(self, batch_seqs: Any) -> Any:
        if self.model is None or not self.model.num_experts:
            return 1.0
        count, each = self.model.num_experts, self.model.experts_per_token
        unread = 1 - serving.experts_read(batch_seqs, num_experts=count, active_experts=each) / count
        return 1 - params_by_part(self.model)["experts"] / num_params(self.model) * unread

    def points(self, num_positions: int, most: int) -> dict[str, Any]:
        """Returns every batch up to the largest that fits, at most ``most``: time split in three, and throughput.

        Source: How to Scale Your Model, section 8.2, whose interactive figures these are.
        """
        kv_bytes = self.kv_bytes(num_positions)
        step = self.step(np.arange(1, min(self.batch_that_fits(kv_bytes), most) + 1), kv_bytes)
        names = ("weights_s", "kv_s", "flops_s", "time_s", "tokens_per_s_per_chip")
        return {"context": num_positions, "batch": step.batch_seqs, "longest": step.longest} | {
            name: np.broadcast_to(getattr(step, name), step.batch_seqs.shape) for name in names
        }

    def designs(self, num_positions: int) -> list[dict[str, Any]]:
        """Returns each design of the cache: bytes, the largest batch, and its step; none without a model."""
        found = []
        for design in cache_designs(self.model) if self.model else ():
            each = design.elements(num_positions) * dtype_bytes(self.kv)
            batch = int(serving.largest_batch(self.free_bytes, each))
            # layers that share a cache each read it
            step = self.step(batch, each * design.layers_per_cache) if batch else None
            found.append(
                {"design": design.name, "own": design.own, "kv_bytes": each, "largest_batch": batch,
                 "step_s": step and step.time_s, "tokens_per_s_per_chip": step and step.tokens_per_s_per_chip}
            )  # fmt: skip
        return found

    def sharding(self, batch_seqs: int) -> dict[str, Any] | None:
        """Returns the limits of tensor parallelism, and sizes of arrays bound by latency; None without links."""
        width, chip = torus_width(self.cluster), self.cluster.chip
        rate = width.bytes_per_s if width else chip.nvlink_bytes_per_s
        if self.model is None or rate is None or self.cluster.num_chips == 1:
            return None
        axes = sum(width.axes) if width else 1
        one_way = chip.ici_link_bytes_per_s if width else rate
        hop_s = chip.ici_hop_s if width else chip.nvlink_hop_s
        d_model, d_ff = self.model.d_model, feed_forward_width(self.model)
        beta = serving.hbm_over_link(known(chip, "hbm_bytes_per_s"), rate)
        chips, x = self.cluster.num_chips, serving.weight_stationary_best_size
        product = serving.TensorProduct(batch_seqs=batch_seqs, d_model=d_model, d_ff=d_ff, tensor=chips)
        best = x(chips, d_model=d_model, d_ff=d_ff)
        layer = {"d_model": d_model, "d_ff": d_ff, "num_chips": chips, "axis_bytes_per_s": rate}
        return {
            "prefill_max_tensor": tensor_max_size(d_ff, ici_intensity(self.peak_flops, rate), axes),
            "beta": beta,
            "decode_max_tensor": serving.decode_max_tensor(
                d_ff, batch_seqs, beta=beta, weight_element_bytes=dtype_bytes(self.weights)
            ),
            "product": {
                "link_s": product.link_s(rate),
                "hbm_s": product.hbm_s(known(chip, "hbm_bytes_per_s")) * dtype_bytes(self.weights) / 2,
                "math_s": product.math_s(self.peak_flops),
            },
            "two_dims": {
                "best_x": best,
                "min_chips": serving.weight_stationary_min_chips(d_model, d_ff, num_axes=axes),
                "comms_s": serving.weight_stationary_comms_s(batch_seqs, over_d=best, **layer),
                "tensor_comms_s": serving.tensor_comms_s(batch_seqs, d_model, num_axes=axes, axis_bytes_per_s=rate),
            },
            "latency_bound_bytes": latency_bound_bytes(one_way, hop_s=hop_s, num_shards=chips),
            "latency_bound_shards": serving.latency_bound_shards(2 * batch_seqs * d_model, one_way, hop_s=hop_s),
        }
