"""One copy of a model on a cluster that serves: bytes of weights and caches, steps of any batch, limits of sharding."""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import asdict, replace

from meshwright.core.errors import CannotRunError, InputError
from meshwright.cost.formulas import serving
from meshwright.cost.formulas.accounting import kv_cache_bytes
from meshwright.cost.formulas.limits import ici_intensity, tensor_max_size
from meshwright.cost.formulas.roofline import critical_batch, dtype_bytes
from meshwright.cost.letters import feed_forward_width
from meshwright.cost.network.collectives import latency_bound_bytes
from meshwright.cost.network.links import torus_width
from meshwright.report.answer import Facts
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
        num_chips = self.cluster.num_chips
        return serving.free_bytes(self.memory_bytes, num_chips=num_chips, weight_bytes=self.weight_bytes)

    @property
    def critical_batch(self) -> float:
        """Sequences from which products with weights, of which all experts' are read, are bound by FLOPs."""
        sparsity = num_params(self.model) / self.active_params if self.model and self.model.num_experts else 1
        weight_width = dtype_bytes(self.weights)
        return critical_batch(self.peak_flops, self.hbm_bytes_per_s, weight_bytes=weight_width, num_experts=sparsity)

    def usd_per_million_tokens(self, tokens_per_s: float) -> float | None:
        """Returns the dollars of a million tokens at this rate of all chips; None where a chip has no price."""
        num_chips, price = self.cluster.num_chips, self.price_usd_per_hour or self.cluster.chip.price_usd_per_hour
        return price and serving.usd_per_million_tokens(tokens_per_s, num_chips=num_chips, price_usd_per_hour=price)

    def kv_bytes(self, num_positions: Any) -> Any:
        """Returns the bytes of one cache of that many positions."""
        if self.model is None or self.kv_token_bytes is not None:
            return serving.cache_bytes(self.kv_token_bytes, num_positions=num_positions)
        return kv_cache_bytes(self.model, num_positions, element_bytes=dtype_bytes(self.kv)) / self.layers_per_cache

    def batch_that_fits(self, kv_bytes: float) -> int:
        """Returns the most caches that fit beside the weights. Raises CannotRunError if none does, InputError if one
        has no bytes."""
        if kv_bytes <= 0:
            raise InputError("caches of 0 bytes fit without end. Give --kv-per-token of at least 1 byte.")
        max_batch = int(serving.largest_batch(self.free_bytes, kv_bytes))
        if max_batch:
            return max_batch
        smallest = serving.smallest_slice(self.cluster.chip, self.weight_bytes + kv_bytes)
        raise CannotRunError(
            f"weights of {self.weight_bytes / 1e9:,.3g} GB and a cache of {kv_bytes / 1e9:,.3g} GB do not fit "
            f"{self.cluster.short_name}. Use {smallest.short_name}, fewer positions, or narrower --weights and --kv."
        )

    def step(self, batch_seqs: Any, kv_bytes: Any) -> serving.DecodeStep:
        """Returns one step of generation; of experts, those that the batch reaches in the mean are read."""
        read_share: Any = 1.0
        if self.model and self.model.num_experts:
            experts, num_active = self.model.num_experts, self.model.experts_per_token
            unread = 1 - serving.experts_read(batch_seqs, num_experts=experts, active_experts=num_active) / experts
            read_share = 1 - params_by_part(self.model)["experts"] / num_params(self.model) * unread
        return serving.DecodeStep(
            batch_seqs=batch_seqs,
            kv_bytes=kv_bytes,
            weight_bytes=self.weight_bytes * read_share,
            active_params=self.active_params,
            num_chips=self.cluster.num_chips,
            peak_flops=self.peak_flops,
            hbm_bytes_per_s=self.hbm_bytes_per_s,
        )

    def points(self, batches: Sequence[int], kv_bytes: float) -> Facts:
        """Returns an array for each figure of a step, with an entry for every batch.

        Source: How to Scale Your Model, section 8.2, whose interactive figures these are.
        """
        step = self.step(np.asarray(batches), kv_bytes)
        figures = ("weights_s", "kv_s", "flops_s", "time_s", "tokens_per_s", "tokens_per_s_per_chip", "longest")
        arrays = {name: np.broadcast_to(getattr(step, name), step.batch_seqs.shape) for name in figures}
        return {"batch": step.batch_seqs, **arrays, "fits": step.batch_seqs <= self.batch_that_fits(kv_bytes)}

    def sharding(self, batch_seqs: int) -> Facts | None:
        """Returns bounds on sharding, and seconds of one product and of a layer's collectives; None without links.

        W is a torus axis as in `limits`, or a chip's own link in a switched domain.
        """
        width, chip, num_chips = torus_width(self.cluster), self.cluster.chip, self.cluster.num_chips
        link, hop_s = chip.nvlink_bytes_per_s, chip.nvlink_hop_s
        if width:
            link, hop_s = chip.ici_link_bytes_per_s, chip.ici_hop_s
        if self.model is None or link is None or num_chips == 1:
            return None
        rate, axes, hbm = width.bytes_per_s if width else link, sum(width.axes) if width else 1, self.hbm_bytes_per_s
        d_model, d_ff, weight_width = self.model.d_model, feed_forward_width(self.model), dtype_bytes(self.weights)
        product = serving.TensorProduct(
            batch_seqs=batch_seqs, d_model=d_model, d_ff=d_ff, tensor=num_chips, weight_element_bytes=weight_width
        )
        layer = serving.WeightStationary(d_model=d_model, d_ff=d_ff, num_chips=num_chips, num_axes=axes)
        beta, best_size = serving.hbm_over_link(hbm, rate), layer.best_size
        max_tensor = serving.decode_max_tensor(d_ff, batch_seqs, beta=beta, weight_element_bytes=weight_width)
        max_shards = serving.latency_bound_shards(2 * batch_seqs * d_model, link, hop_s=hop_s)
        over_d_text, over_f_text = ("((M - 1) D)", "((M - 1) F)") if axes > 1 else ("D", "F")
        bounds = {
            "tensor, prefill": ("< M F / alpha", tensor_max_size(d_ff, ici_intensity(self.peak_flops, rate), axes)),
            "tensor, generation": ("< w F / (2 B beta)", max_tensor),
            "chips, two dims send less": (f"> 4 M^2 F / {over_d_text}", layer.min_chips),
            "shards over D, two dims": (f"= sqrt(N D / {over_f_text})", best_size),
            "shards, gather not by latency": ("< 2 B D / (W hop)", max_shards),
        }
        return {
            "letters": {"alpha": ici_intensity(self.peak_flops, rate), "beta": beta, "M": axes, "N": num_chips,
                        "D": d_model, "F": d_ff, "B": batch_seqs, "w": weight_width, "W": rate, "hop": hop_s},
            "beta": beta,
            "bounds": [{"name": name, "formula": formula, "bound": bound} for name, (formula, bound) in bounds.items()],
            "product": {"links_s": product.link_s(rate), "hbm_s": product.hbm_s(hbm),
                        "math_s": product.math_s(self.peak_flops)},
            "layer": {"tensor_s": layer.tensor_comms_s(batch_seqs, axis_bytes_per_s=rate),
                      "two_dims_s": layer.comms_s(batch_seqs, over_d=best_size, axis_bytes_per_s=rate)},
            "latency_bound_bytes": latency_bound_bytes(link, hop_s=hop_s, num_shards=num_chips),
        }  # fmt: skip


LOCAL_OF, WINDOW = 6, 1024
"""Of so many layers all but the last see a window of so many positions: as in Gemma 3."""
SHARED_BY = 2
"""Neighbouring layers that keep one cache (Brandon et al., Cross-Layer Attention, 2024)."""
PAGE_LEN = 16
"""Positions of a page, as in vLLM."""
FIGURES = ("step_s", "tpot_s", "tokens_per_s_per_chip", "usd_per_million_output")


class _Way(ServingReplica, frozen=True, kw_only=True):
    """A replica and how it keeps caches and makes tokens."""

    paged: bool = False
    drafts: bool = False

    def changed(self, of_model: Facts, own: Facts) -> "_Way":
        """Returns it with other fields of the model, and other fields of its own."""
        return replace(self, model=self.model and replace(self.model, **of_model), **own)


def tricks(
    at: ServingReplica, *, prompt_len: int, output_len: int, acceptance: float, draft_cost: float
) -> list[Facts]:
    """Returns a row for the model without tricks, one for each of them alone, and one for all together.

    Without tricks every head has its own keys and values, all layers see and keep all positions, weights and caches are
    in 16 bits, and a cache is as long as the longest sequence, of which every position is read. A row has the bytes of
    a token's cache, the largest batch that fits, its step, and what follows: seconds and dollars of tokens, and the
    tokens of a chip over those without tricks; None where nothing fits. Drafts are as many as pay off at that batch;
    one is right with probability ``acceptance``, and takes ``draft_cost`` of the model's own step.
    Raises InputError without a model, or if its caches are given as a number.
    """
    model = at.model
    if model is None or at.kv_token_bytes is not None:
        raise InputError("--tricks changes a model's caches. Name a model, and leave out --kv-per-token.")
    # as many kv heads as heads, no windows; latent attention stays
    head_fields = {} if model.latent_attention else {"num_kv_heads": model.num_heads}
    dense_model = replace(model, **head_fields, sliding_window=None, sliding_layers=())
    plain_way = combined = _Way(**asdict(at) | {"model": dense_model, "weights": "bf16", "kv": "bf16"})
    way_by_trick = {"none of these": plain_way}
    for name, change in _changes(model).items():
        way_by_trick[name] = plain_way.changed(*change)
        if not name.startswith("one kv head") and name != "int8 weights":
            combined = combined.changed(*change)
    way_by_trick["all together*"] = combined
    base_rate, rows = None, []
    for name, trick_way in way_by_trick.items():
        row = {"trick": name, **_figures(trick_way, prompt_len, output_len, acceptance, draft_cost)}
        tokens_per_s = row["tokens_per_s_per_chip"]
        base_rate = tokens_per_s if name == "none of these" else base_rate
        rows.append({**row, "times": tokens_per_s / base_rate if tokens_per_s and base_rate else None})
    return rows


def _changes(model: Model) -> dict[str, tuple[Facts, Facts]]:
    """Returns what each trick changes: fields of the model, and of a `_Way`."""
    changes: dict[str, tuple[Facts, Facts]] = {}
    if not model.latent_attention:
        num_kv_heads = model.num_kv_heads if model.num_kv_heads < model.num_heads else max(1, model.num_heads // 8)
        changes[f"{num_kv_heads} kv head{'s' * (num_kv_heads > 1)}"] = {"num_kv_heads": num_kv_heads}, {}
        if num_kv_heads > 1:
            changes["one kv head"] = {"num_kv_heads": 1}, {}
    sliding, window = model.sliding_layers, model.sliding_window
    if not sliding or not window:
        sliding, window = tuple(layer for layer in range(model.num_layers) if (layer + 1) % LOCAL_OF), WINDOW
    changes[f"window {window:,}, {len(sliding)} layers"] = {"sliding_layers": sliding, "sliding_window": window}, {}
    return changes | {
        f"{SHARED_BY} layers a cache": ({}, {"layers_per_cache": SHARED_BY}),
        "int8 caches": ({}, {"kv": "int8"}),
        "int8 weights": ({}, {"weights": "int8"}),
        "int4 weights": ({}, {"weights": "int4"}),
        f"pages of {PAGE_LEN}": ({}, {"paged": True}),
        "drafts": ({}, {"drafts": True}),
    }


def _figures(at: _Way, prompt_len: int, output_len: int, acceptance: float, draft_cost: float) -> Facts:
    """Returns the figures of one row."""
    max_positions = prompt_len + output_len
    # in the steady state a sequence has made half of its output, and its last page is half full
    kv_bytes = at.kv_bytes(prompt_len + output_len / 2 + PAGE_LEN / 2 if at.paged else max_positions)
    row: Facts = {"kv_token_bytes": at.kv_bytes(max_positions) / max_positions, "largest_batch": 0, "drafts": 0}
    try:
        batch = at.batch_that_fits(kv_bytes)
    except CannotRunError:
        return row | dict.fromkeys(FIGURES)
    step = at.step(batch, kv_bytes)
    token_s, num_drafts = step.time_s, 0
    if at.drafts:
        speedups = step.speedups(acceptance, draft_cost=draft_cost)
        num_drafts = int(speedups.argmax())
        token_s = step.time_s / speedups[num_drafts]
    tokens_per_s = batch / token_s
    figures = (step.time_s, token_s, tokens_per_s / at.cluster.num_chips, at.usd_per_million_tokens(tokens_per_s))
    return row | {"largest_batch": batch, "drafts": num_drafts} | dict(zip(FIGURES, figures, strict=True))
