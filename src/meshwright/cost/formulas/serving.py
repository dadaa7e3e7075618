"""Closed forms of serving: step time, batches that fit, limits of sharding, requests, speculation, caches of prefixes.

Explanations show them; no plan is priced with them. A batch is sequences that generate at once, each one token a step.
Bytes, FLOP/s and bytes/s are of one chip where a number of chips is given beside them; a link's rate is that of one
axis, both ways. Sizes may be NumPy arrays. Sections and exercises are those of How to Scale Your Model.
"""

import math
from collections.abc import Sequence

import msgspec
import numpy as np

from meshwright.algebra.sizes import Number
from meshwright.core.errors import CannotRunError, InputError
from meshwright.cost.formulas.training_budget import cost_usd, min_chips
from meshwright.spec.chip import Chip, known
from meshwright.spec.cluster import Cluster, make_cluster, slice_shapes
from meshwright.spec.cluster_shapes import is_offered

DRAFTS = np.arange(65)
"""Numbers of drafted tokens that are compared."""


# -- memory ---------------------------------------------------------------------------------------------


def weight_bytes(num_params: Number, element_bytes: Number) -> Number:
    """Returns the bytes of stored weights: N x bytes. Source: section 7.1.6."""
    return num_params * element_bytes


def cache_bytes(bytes_per_token: Number, *, num_positions: Number, batch_seqs: Number = 1) -> Number:
    """Returns the bytes of the KV caches of B sequences of S positions: B S x bytes of a token. Source: 7.1.6."""
    return bytes_per_token * num_positions * batch_seqs


def fractional_chips(num_bytes: Number, bytes_per_chip: Number) -> Number:
    """Returns how many chips these bytes fill: 8.75 of 16 GB for 140 GB. Source: section 8.1.1."""
    return num_bytes / bytes_per_chip


def free_bytes(bytes_per_chip: Number, *, num_chips: Number, weight_bytes: Number) -> Number:
    """Returns the bytes that weights leave to caches on all chips: n M - P; below 0 if they do not fit. 8.1.1."""
    return num_chips * bytes_per_chip - weight_bytes


def largest_batch(free_bytes: Number, kv_bytes: Number) -> Number:
    """Returns how many caches of ``kv_bytes`` fit whole into the bytes that are free; 0 if none. Source: 7.1.7."""
    return np.maximum(0, np.floor_divide(free_bytes, kv_bytes))


def smallest_slice(chip: Chip, num_bytes: float) -> Cluster:
    """Returns the smallest cluster on offer that holds these bytes: a power of two of chips, or of whole domains.

    Raises CannotRunError if a pod is too small. Source: section 8.1.1.
    """
    min_count = max(1, min_chips(num_bytes, known(chip, "memory_bytes")))
    num_chips, max_count, domain_chips = 2 ** math.ceil(math.log2(min_count)), chip.max_chips, chip.domain_chips
    if chip.topology != "torus":
        if domain_chips is None or min_count <= domain_chips:
            return make_cluster(chip, (min(domain_chips or num_chips, num_chips),))
        return make_cluster(chip, (domain_chips, 2 ** math.ceil(math.log2(min_count / domain_chips))))
    while max_count is None or num_chips <= max_count:
        cluster = slice_shapes(chip, num_chips)[0]
        if is_offered(chip, cluster.shape):
            return cluster
        num_chips *= 2
    raise CannotRunError(f"{num_bytes:.3g} bytes need {min_count:,} chips; no slice of {chip.name} has as many.")


# -- one step -------------------------------------------------------------------------------------------


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
        """Returns how many times faster each number of ``DRAFTS`` makes generation, see `speculation_speedup`; a step
        that checks K + 1 tokens takes the FLOPs of as many, and reads weights and caches once."""
        cost = msgspec.structs.replace(self, active_params=self.active_params * (DRAFTS + 1)).time_s / self.time_s
        return np.asarray(speculation_speedup(acceptance, DRAFTS, draft_cost=draft_cost, verify_cost=cost))


def experts_read(num_tokens: Number, *, num_experts: Number, active_experts: Number) -> Number:
    """Returns the mean number of experts that tokens reach if each picks k of E at random: E (1 - (1 - k/E)^B)."""
    return num_experts * (1 - (1 - active_experts / num_experts) ** num_tokens)


def prefill_s(
    num_tokens: Number, active_params: Number, *, num_chips: Number, peak_flops: Number, mfu: Number = 1.0
) -> Number:
    """Returns the seconds of a prefill that is bound by FLOPs: 2 N T / (n C u), scores not counted. Source: 8.1.2."""
    return 2 * active_params * num_tokens / (num_chips * peak_flops * mfu)


# -- sharding -------------------------------------------------------------------------------------------


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


class TensorProduct(msgspec.Struct, frozen=True, kw_only=True):
    """One matmul of [B, D] with [D, F] over a tensor axis of size Y: its links, memory and FLOPs. Source: 8.1.1."""

    batch_seqs: Number
    d_model: Number
    d_ff: Number
    tensor: Number = 1
    weight_element_bytes: Number = 2
    activation_bytes: Number = 2

    def link_s(self, axis_bytes_per_s: Number) -> Number:
        """Returns the seconds of its result on the links: a B D / W_ici, whatever the size of the axis."""
        return self.activation_bytes * self.batch_seqs * self.d_model / axis_bytes_per_s

    def hbm_s(self, hbm_bytes_per_s: Number) -> Number:
        """Returns the seconds to read its weights: w D F / (Y W_hbm)."""
        return self.weight_element_bytes * self.d_model * self.d_ff / (self.tensor * hbm_bytes_per_s)

    def math_s(self, peak_flops: Number) -> Number:
        """Returns the seconds of its FLOPs: 2 B D F / (Y C)."""
        return 2 * self.batch_seqs * self.d_model * self.d_ff / (self.tensor * peak_flops)


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
        wide_dim, narrow_dim = self.d_model / (self.wide_axes * over_d), self.d_ff * over_d / self.num_chips
        return 4 * batch_seqs * (wide_dim + narrow_dim) / axis_bytes_per_s

    def tensor_comms_s(self, batch_seqs: Number, *, axis_bytes_per_s: Number) -> Number:
        """Returns the seconds of the gather and scatter if F alone is split, over all axes: 4 B D / (M W)."""
        return 4 * batch_seqs * self.d_model / (self.num_axes * axis_bytes_per_s)

    @property
    def min_chips(self) -> Number:
        """Chips from which this beats splitting F alone: 4 M^2 F / (A D), 72 for F = 4 D (the book prints 81)."""
        return 4 * self.num_axes**2 * self.d_ff / (self.wide_axes * self.d_model)


def latency_bound_shards(array_bytes: Number, link_bytes_per_s: Number, *, hop_s: Number = 1e-6) -> Number:
    """Returns the shards above which gathering an array is bound by latency: B D / (W x hop), W one way. 7.6.3."""
    return array_bytes / (link_bytes_per_s * hop_s)


# -- requests -------------------------------------------------------------------------------------------


class RequestStream(msgspec.Struct, frozen=True, kw_only=True):
    """Requests with P tokens of prompt and G of output, B at once in steps of T on n chips. Source: 8.1.1, 8.1.2."""

    batch_seqs: Number
    step_s: Number
    prompt_len: Number = 0
    output_len: Number
    num_chips: Number = 1

    @property
    def generation_s(self) -> Number:
        """Seconds in which a request generates: G T."""
        return self.output_len * self.step_s

    @property
    def per_s(self) -> Number:
        """Requests finished per second: B / (G T)."""
        return self.batch_seqs / self.generation_s

    @property
    def per_s_per_chip(self) -> Number:
        """Requests finished per second and chip: B / (G T n)."""
        return self.per_s / self.num_chips

    @property
    def finished_per_step(self) -> Number:
        """Requests finished per step with continuous batching: B / G."""
        return self.batch_seqs / self.output_len

    @property
    def evicted_per_step(self) -> Number:
        """Cached tokens freed per step: B (P + G) / G."""
        return self.finished_per_step * (self.prompt_len + self.output_len)

    def prefill_servers(self, prefill_s: Number) -> Number:
        """Returns the prefill servers that keep one generating server busy: T_prefill B / (G T)."""
        return self.per_s * prefill_s

    def interleaved_step_s(self, prefill_s: Number) -> Number:
        """Returns the mean seconds per output token if the same chips prefill in between: T + T_prefill (B - 1) / G."""
        return self.step_s + waiting_s(prefill_s, batch=self.batch_seqs, output_len=self.output_len)


def waiting_s(prefill_s: Number, *, batch: Number, output_len: Number) -> Number:
    """Returns the seconds that each decode step waits for the prefill of new requests, in the mean.

    Under a steady load each of ``batch`` sequences is replaced every ``output_len`` steps: while a sequence makes its
    tokens the others' places are filled once, and it waits for these prefills, whole or in chunks.
    """
    seconds: Number = np.maximum(np.asarray(batch) - 1, 0) / output_len * prefill_s
    return seconds


def usd_per_million_tokens(tokens_per_s: Number, *, num_chips: Number, price_usd_per_hour: Number) -> Number:
    """Returns dollars per million tokens of chips that handle this many tokens per second together."""
    return cost_usd(1e6 / tokens_per_s, num_chips=num_chips, price_usd_per_hour=price_usd_per_hour)


# -- speculation and prefixes ---------------------------------------------------------------------------


def expected_tokens(acceptance: Number, num_drafts: Number) -> Number:
    """Returns the tokens of a step that checks K drafts, each right with probability a: (1 - a^(K+1)) / (1 - a).

    K + 1 if all are right. Source: Leviathan et al. 2022, equation 1; How to Scale Your Model, section 7.2.1.
    """
    a = np.asarray(acceptance, dtype=float)
    is_sure = a == 1
    tokens = np.where(is_sure, num_drafts + 1, (1 - a ** (num_drafts + 1)) / np.where(is_sure, 1, 1 - a))
    return tokens if tokens.ndim else float(tokens)


def speculation_speedup(
    acceptance: Number, num_drafts: Number, *, draft_cost: Number, verify_cost: Number = 1.0
) -> Number:
    """Returns how many times faster K drafts make generation: expected tokens / (v + K c).

    c is the time of a draft's step, v that of a step that checks K + 1 tokens, both over the model's own step: v is 1
    while memory binds. Source: Leviathan et al. 2022, theorem 3.8.
    """
    return expected_tokens(acceptance, num_drafts) / (verify_cost + num_drafts * draft_cost)


def uncached_share(cached_tokens: Number, num_tokens: Number) -> Number:
    """Returns the share of a prompt that is left to prefill if its first tokens are cached. Source: section 7.4.2."""
    return (num_tokens - cached_tokens) / num_tokens


def lru_hit_share(num_cached: float, popularity: Sequence[float]) -> float:
    """Returns the share of requests that find their prefix in an LRU cache with room for ``num_cached`` of them.

    A prefix is asked for in proportion to its popularity. Che's approximation: a prefix of share p is there with
    probability 1 - exp(-p t), with t such that these add up to the room; C / n where all are equally popular.
    """
    shares = np.asarray(popularity, dtype=float) / np.sum(popularity)
    if num_cached < 0 or not (shares > 0).all():
        raise InputError("a cache of prefixes needs room of at least 0 and popularities above 0.")
    if num_cached >= len(shares):
        return 1.0
    low, high = 0.0, 1.0
    while -np.expm1(-shares * high).sum() < num_cached:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if -np.expm1(-shares * middle).sum() < num_cached else (low, middle)
    return float(-shares @ np.expm1(-shares * high))
