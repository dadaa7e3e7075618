"""One replica that serves, in closed form: bytes of weights and caches, steps, requests, prefixes.

For `serving` and explanations only; plans are not priced with it. A batch is the sequences that generate at once, one
token a step each. Sections are of How to Scale Your Model. Sizes may be NumPy arrays.
"""

import math
from collections.abc import Sequence

import msgspec
import numpy as np

from meshwright.algebra.sizes import Number
from meshwright.core.errors import CannotRunError, InputError
from meshwright.cost.formulas.accounting import kv_cache_bytes
from meshwright.cost.formulas.roofline import critical_batch, dtype_bytes
from meshwright.cost.formulas.serving import expected_tokens, experts_read, waiting_s
from meshwright.cost.formulas.training_budget import cost_usd, min_chips
from meshwright.report.answer import Facts
from meshwright.spec.chip import Chip, known
from meshwright.spec.cluster import Cluster, make_cluster, slice_shapes
from meshwright.spec.cluster_shapes import is_offered
from meshwright.spec.model import Model
from meshwright.spec.weights import num_active_params, num_params, params_by_part, weight_table

DRAFTS = np.arange(65)
"""Numbers of drafted tokens that are compared."""

_OF_SOURCES = ("encoder", *(f"layers.cross_{letter}{part}" for letter in "wb" for part in "kv"))


class DecodeStep(msgspec.Struct, frozen=True, kw_only=True):
    """One step of generation: T = B KV / (n W) + max(2 B N / (n C), P / (n W)). Source: section 7.1.5, equation 4.

    ``kv_bytes`` is the cache of one sequence, ``weight_bytes`` what is read of the weights, ``active_params`` the
    parameters that a token uses. Without FLOPs (0 active parameters) it is the shortest step, (B KV + P) / (n W).
    Attention is always bound by memory, and reading caches does not overlap with the products, as in the book.
    """

    batch_seqs: Number
    kv_bytes: Number
    weight_bytes: Number
    active_params: Number = 0
    num_chips: Number = 1
    peak_flops: Number = math.inf
    hbm_bytes_per_s: Number

    @property
    def kv_s(self) -> Number:
        """Seconds to read the caches: B KV / (n W)."""
        return self.batch_seqs * self.kv_bytes / (self.num_chips * self.hbm_bytes_per_s)

    @property
    def weights_s(self) -> Number:
        """Seconds to read the weights, the least of any step: P / (n W)."""
        return self.weight_bytes / (self.num_chips * self.hbm_bytes_per_s)

    @property
    def flops_s(self) -> Number:
        """Seconds of the products with weights at peak: 2 B N / (n C)."""
        return 2 * self.batch_seqs * self.active_params / (self.num_chips * self.peak_flops)

    @property
    def time_s(self) -> Number:
        """Seconds of the step."""
        return self.kv_s + np.maximum(self.flops_s, self.weights_s)

    @property
    def longest(self) -> Number:
        """The part that takes longest: "kv_cache", "weights" or "compute"; an array of them for array sizes."""
        longest_product = np.where(self.flops_s > self.weights_s, "compute", "weights")
        longest_part = np.where(self.kv_s > np.maximum(self.flops_s, self.weights_s), "kv_cache", longest_product)
        return longest_part if longest_part.ndim else str(longest_part)

    @property
    def tokens_per_s(self) -> Number:
        """Tokens per second of all chips: B / T."""
        return self.batch_seqs / self.time_s

    @property
    def tokens_per_s_per_chip(self) -> Number:
        """Tokens per second per chip: B / (n T)."""
        return self.tokens_per_s / self.num_chips

    def speedups(self, acceptance: Number, *, draft_cost: Number) -> np.ndarray:
        """Returns the speed-up of generation for each number K of drafts in ``DRAFTS``: expected tokens / (v + K c).

        c is the time of a draft model's step and v of a step that checks K + 1 tokens, both relative to the model's
        usual step. A checking step has the FLOPs of K + 1 tokens and reads weights and caches once. Source: Leviathan
        et al. 2022, 3.8.
        """
        check_step_s = msgspec.structs.replace(self, active_params=self.active_params * (DRAFTS + 1)).time_s
        return np.asarray(expected_tokens(acceptance, DRAFTS) / (check_step_s / self.time_s + DRAFTS * draft_cost))


class ServingReplica(msgspec.Struct, frozen=True, kw_only=True):
    """A model on a cluster, or only its ``params`` and ``kv_token_bytes``; given with a model, they replace the
    model's.

    ``layers_per_cache`` consecutive layers share one cache. The price is of one chip-hour, None for the catalogue's.
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
        """Parameters that an output token uses, scaled to ``params`` if it is given; without the parameters that only
        read a source (`source_params`)."""
        active_share = num_active_params(self.model) / num_params(self.model) if self.model else 1
        return self.num_params * active_share - self.source_params

    @property
    def source_params(self) -> float:
        """Parameters that read a source once: the encoder, and the keys and values of cross-attention."""
        if not (self.model and self.model.encoder):
            return 0.0
        rows = (row for row in weight_table(self.model) if row.name.startswith(_OF_SOURCES))
        return self.num_params * sum(row.num_params for row in rows) / num_params(self.model)

    @property
    def weight_bytes(self) -> float:
        """Bytes of all weights, P. Source: section 7.1.6."""
        return self.num_params * dtype_bytes(self.weights)

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
        """Bytes that weights leave to caches on all chips, n M - P; below 0 if they do not fit. Source: 8.1.1."""
        return self.cluster.num_chips * self.memory_bytes - self.weight_bytes

    @property
    def critical_batch(self) -> float:
        """Sequences from which products with weights, of which all experts' are read, are bound by FLOPs."""
        sparsity = num_params(self.model) / self.active_params if self.model and self.model.num_experts else 1
        bounds = {"weight_bytes": dtype_bytes(self.weights), "num_experts": sparsity}
        return float(critical_batch(self.peak_flops, self.hbm_bytes_per_s, **bounds))

    def usd_per_million_tokens(self, tokens_per_s: float) -> float | None:
        """Returns the dollars of a million tokens at this rate of all chips; None where a chip has no price."""
        num_chips, hour_usd = self.cluster.num_chips, self.price_usd_per_hour or self.cluster.chip.price_usd_per_hour
        return hour_usd and cost_usd(1e6 / tokens_per_s, num_chips=num_chips, price_usd_per_hour=hour_usd)

    def kv_bytes(self, num_positions: Number) -> Number:
        """Returns the bytes of one cache of that many positions. Source: section 7.1.6."""
        if self.model is None or self.kv_token_bytes is not None:
            return (self.kv_token_bytes or 0) * num_positions
        return kv_cache_bytes(self.model, num_positions, element_bytes=dtype_bytes(self.kv)) / self.layers_per_cache

    def batch_that_fits(self, kv_bytes: float) -> int:
        """Returns the most caches of ``kv_bytes`` that fit in memory with the weights (section 7.1.7).

        Raises CannotRunError if not even one fits, InputError if a cache has 0 bytes.
        """
        if kv_bytes <= 0:
            raise InputError("caches of 0 bytes fit without end. Give --kv-per-token of at least 1 byte.")
        max_batch = int(self.free_bytes // kv_bytes)
        if max_batch > 0:
            return max_batch
        min_cluster = smallest_slice(self.cluster.chip, self.weight_bytes + kv_bytes)
        raise CannotRunError(
            f"weights of {self.weight_bytes / 1e9:,.3g} GB and a cache of {kv_bytes / 1e9:,.3g} GB do not fit "
            f"{self.cluster.short_name}. Use {min_cluster.short_name}, fewer positions, or narrower --weights and --kv."
        )

    def step(self, batch_seqs: Number, kv_bytes: Number) -> DecodeStep:
        """Returns one decode step; of the experts, it reads as many as the batch activates on average."""
        read_share: Number = 1.0
        if self.model and self.model.num_experts:
            num_experts, num_active = self.model.num_experts, self.model.experts_per_token
            unread_part = 1 - experts_read(batch_seqs, num_experts=num_experts, active_experts=num_active) / num_experts
            read_share = 1 - params_by_part(self.model)["experts"] / num_params(self.model) * unread_part
        return DecodeStep(
            batch_seqs=batch_seqs,
            kv_bytes=kv_bytes,
            weight_bytes=self.weight_bytes * read_share - self.source_params * dtype_bytes(self.weights),
            active_params=self.active_params,
            num_chips=self.cluster.num_chips,
            peak_flops=self.peak_flops,
            hbm_bytes_per_s=self.hbm_bytes_per_s,
        )

    def prefill_s(self, num_tokens: Number, mfu: float = 1.0) -> Number:
        """Returns the seconds of a compute-bound prefill, without scores: 2 N T / (n C u), with N the active
        parameters, in a model with an encoder the source parameters. Source: 8.1.2."""
        params = self.source_params or self.active_params
        return 2 * params * num_tokens / (self.cluster.num_chips * self.peak_flops * mfu)

    def points(self, batches: Sequence[int], kv_bytes: float) -> Facts:
        """Returns an array for each figure of a step, with an entry for every batch.

        Source: How to Scale Your Model, section 8.2, whose interactive figures these are.
        """
        step = self.step(np.asarray(batches), kv_bytes)
        figure_names = ("weights_s", "kv_s", "flops_s", "time_s", "tokens_per_s", "tokens_per_s_per_chip", "longest")
        array_by_name = {name: np.broadcast_to(getattr(step, name), step.batch_seqs.shape) for name in figure_names}
        return {"batch": step.batch_seqs, **array_by_name, "fits": step.batch_seqs <= self.batch_that_fits(kv_bytes)}


def request_rates(
    batch_seqs: Number,
    step_s: Number,
    *,
    prompt_len: Number,
    output_len: Number,
    prefill_s: Number = 0.0,
    num_chips: Number = 1,
) -> dict[str, Number]:
    """Returns rates of requests with P prompt tokens and G output tokens, B at once, steps of T seconds, in steady
    state.

    A request generates for G T; B / (G T) requests finish per second, B / G per step, and free B (P + G) / G cached
    tokens per step. ``prefill_servers`` keep one generating server busy: T_prefill B / (G T). If the same chips also
    prefill, a token takes T + T_prefill (B - 1) / G on average. Source: sections 8.1.1 and 8.1.2.
    """
    generation_s, finished_per_step = output_len * step_s, batch_seqs / output_len
    requests_per_s = batch_seqs / generation_s
    return {
        "tpot_interleaved_s": step_s + waiting_s(prefill_s, batch=batch_seqs, output_len=output_len),
        "generation_s": generation_s,
        "per_s": requests_per_s,
        "per_s_per_chip": requests_per_s / num_chips,
        "tokens_per_s_per_chip": batch_seqs / step_s / num_chips,
        "finished_per_step": finished_per_step,
        "evicted_per_step": finished_per_step * (prompt_len + output_len),
        "prefill_servers": requests_per_s * prefill_s,
    }


def smallest_slice(chip: Chip, num_bytes: float) -> Cluster:
    """Returns the smallest cluster on offer that holds these bytes: a power of two of chips, or of whole domains.

    Raises CannotRunError if a pod is too small. Source: section 8.1.1.
    """
    fewest_chips = max(1, min_chips(num_bytes, known(chip, "memory_bytes")))
    num_chips, max_chips, domain_chips = 2 ** math.ceil(math.log2(fewest_chips)), chip.max_chips, chip.domain_chips
    if chip.topology != "torus":
        if domain_chips is None or fewest_chips <= domain_chips:
            return make_cluster(chip, (min(domain_chips or num_chips, num_chips),))
        return make_cluster(chip, (domain_chips, 2 ** math.ceil(math.log2(fewest_chips / domain_chips))))
    while max_chips is None or num_chips <= max_chips:
        cluster = slice_shapes(chip, num_chips)[0]
        if is_offered(chip, cluster.shape):
            return cluster
        num_chips *= 2
    raise CannotRunError(f"{num_bytes:.3g} bytes need {fewest_chips:,} chips; no slice of {chip.name} has as many.")


def uncached_share(cached_tokens: Number, num_tokens: Number) -> Number:
    """Returns the share of a prompt that is left to prefill if its first tokens are cached. Source: section 7.4.2."""
    return (num_tokens - cached_tokens) / num_tokens


def lru_hit_share(num_cached: float, popularity: Sequence[float]) -> float:
    """Returns the share of requests whose prefix is in an LRU cache with room for ``num_cached`` prefixes.

    Che's approximation: a prefix with share p of the requests is cached with probability 1 - exp(-p t), where t makes
    the probabilities add up to ``num_cached``. Raises InputError for a negative room or a popularity that is not
    positive.
    """
    shares = np.asarray(popularity, dtype=float) / np.sum(popularity)
    if num_cached < 0 or not (shares > 0).all():
        raise InputError("a cache of prefixes needs room of at least 0 and popularities above 0.")
    if num_cached >= len(shares):
        return 1.0
    t_low, t_high = 0.0, 1.0
    while -np.expm1(-shares * t_high).sum() < num_cached:
        t_high *= 2
    for _ in range(100):
        t_mid = (t_low + t_high) / 2
        t_low, t_high = (t_mid, t_high) if -np.expm1(-shares * t_mid).sum() < num_cached else (t_low, t_mid)
    return float(-shares @ np.expm1(-shares * t_high))
