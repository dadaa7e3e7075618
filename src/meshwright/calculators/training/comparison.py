"""Figures that models are compared by: sizes, ratios and the cost of a token; and the chips that hold their training.

Counts before anything is split, from the same weight table and formulas as every plan.
"""

import msgspec

from meshwright.algebra.ops.attention import keys_per_query
from meshwright.cost.formulas.accounting import bytes_per_param, kv_cache_bytes, saved_bytes
from meshwright.cost.formulas.limit_table import feed_forward_width
from meshwright.cost.formulas.training_budget import Number, min_chips
from meshwright.cost.work.ops import token_flops
from meshwright.spec.chip import Chip
from meshwright.spec.model import Model
from meshwright.spec.weights import num_active_params, num_params

AVERAGE_BYTES = {"none": 0, "bf16": 2, "fp32": 4}
"""Bytes per parameter of a running average of the weights."""

RESULTS_PER_LAYER = 4
"""Results of the model's width that a layer keeps. How to Scale Your Model: section 6.3 four, exercise 5.2 three."""

EXPERT_FIELDS = ("num_experts", "experts_per_token", "d_ff_expert", "d_ff_shared")
"""Fields of a model that are 0 without experts; its row then has None."""


class ModelRow(msgspec.Struct, frozen=True, kw_only=True):
    """One model of the comparison; ``None`` where a model has no such part.

    ``ff_ratio`` is the feed-forward width that a token passes over D: F / D, or (k Fe + Fs) / D with experts, and
    ``aspect`` is D / L. FLOPs per token are 6 per active parameter, and attention's own products come on top:
    ``attention_share`` is their part of both.
    """

    name: str
    family: str
    num_layers: int
    d_model: int
    d_ff: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    num_experts: int | None
    experts_per_token: int | None
    d_ff_expert: int | None
    d_ff_shared: int | None
    num_params: int
    num_active_params: int
    ff_ratio: float
    aspect: float
    kv_bytes_per_token: float
    train_flops_per_token: float
    attention_flops_per_token: float
    attention_share: float


def model_row(model: Model, *, seq_len: int) -> ModelRow:
    """Returns the row of a model at a sequence length."""
    active = num_active_params(model)
    matmuls = token_flops(model)
    attention = attention_train_flops(model, seq_len) / seq_len
    own = {name: getattr(model, name) for name in ModelRow.__struct_fields__ if hasattr(model, name)}
    own |= {name: own[name] or None for name in EXPERT_FIELDS}
    return ModelRow(
        **own,
        num_params=num_params(model),
        num_active_params=active,
        ff_ratio=feed_forward_width(model) / model.d_model,
        aspect=model.d_model / model.num_layers,
        kv_bytes_per_token=kv_cache_bytes(model, 1),
        train_flops_per_token=matmuls,
        attention_flops_per_token=attention,
        attention_share=attention / (attention + matmuls),
    )


def attention_train_flops(model: Model, seq_len: Number) -> Number:
    """Returns FLOPs of attention's own products for one sequence of training: 6 T S N (H + Hv) a layer.

    12 T^2 N H with values as wide as keys; a layer with a window sees at most that many keys. No causal discount.
    Source: How to Scale Your Model, section 4.3.
    """
    value_dim = model.v_head_dim if model.latent_attention else model.head_dim
    sliding = len(model.sliding_layers) if model.sliding_window else 0
    near = keys_per_query(seq_len, window=model.sliding_window)
    keys = (model.num_layers - sliding) * keys_per_query(seq_len) + sliding * near
    return 6 * seq_len * keys * model.num_heads * (model.head_dim + value_dim)


# -- what holds the training of a model -----------------------------------------------------------------


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """The fewest chips of a kind whose memory holds a training run, shared evenly; None where its size is unknown."""

    chip: str
    memory_bytes: float | None
    min_chips: int | None
    max_params_one_chip: float | None


def training_bytes(
    model: Model,
    *,
    state: str,
    average: str = "none",
    batch_tokens: int = 0,
    results_per_layer: float = RESULTS_PER_LAYER,
) -> float:
    """Returns bytes of the training state and of a step's kept results: some of the model's width a layer, in bf16.

    Source: How to Scale Your Model, sections 5.1.1 and 6.3: 2 x 8192 x 80 x 4e6 x 4 for LLaMA-3 70B.
    """
    kept = saved_bytes(batch_tokens, num_layers=model.num_layers, width=results_per_layer * model.d_model)
    return float(num_params(model) * state_bytes_per_param(state, average=average) + kept)


def state_bytes_per_param(state: str, *, average: str = "none") -> float:
    """Returns the bytes per parameter of a training state, with a running average of the weights if one is kept."""
    return bytes_per_param(state) + AVERAGE_BYTES[average]


def fewest_chips(chip: Chip, num_bytes: float, *, state: str, average: str = "none") -> Held:
    """Returns chips of a kind by memory alone, and the largest model whose state fills one of them: memory / bytes."""
    room = chip.memory_bytes
    each = state_bytes_per_param(state, average=average)
    return Held(
        chip=chip.name,
        memory_bytes=room,
        min_chips=None if room is None else min_chips(num_bytes, room),
        max_params_one_chip=None if room is None else room / each,
    )
