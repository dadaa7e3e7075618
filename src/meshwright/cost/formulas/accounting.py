"""Counts of a whole transformer: FLOPs, sequence lengths at which attention matters, bytes; sizes may be NumPy arrays.

Plans are priced from derived steps (`cost.train_step`). Sections and exercises are those of How to Scale Your Model.
"""

import math
from fractions import Fraction
from typing import Literal

import numpy as np

from meshwright.algebra.derive import derive
from meshwright.algebra.ops.attention import keys_per_query
from meshwright.algebra.rewrites.repeated_heads import strategy_of_heads
from meshwright.algebra.sizes import Number
from meshwright.algebra.transformer import transformer
from meshwright.core.errors import InputError, require_known
from meshwright.cost.formulas.roofline import Work
from meshwright.spec.model import Model
from meshwright.spec.strategy import STATE_BYTES, Strategy, held_dims, standard_assignment
from meshwright.spec.weights import Weight, weight_table

StatePart = Literal["weights", "gradients", "optimizer"]
ZeroStage = Literal[0, 1, 2, 3]

ZERO_SHARDS: dict[int, tuple[StatePart, ...]] = {
    0: (),
    1: ("optimizer",),
    2: ("optimizer", "gradients"),
    3: ("optimizer", "gradients", "weights"),
}
"""ZeRO stage -> the parts of the state that it splits over data-parallel devices; 3 is FSDP. Source: section 5.4.1."""


# -- FLOPs ----------------------------------------------------------------------------------------------


def train_flops_per_param(*, recomputed_forwards: Number = 0) -> Number:
    """Returns the FLOPs per parameter and token of training: 2 forward, 4 backward, 2 for each recomputed forward pass.

    6 for MFU; 8 with block remat, which runs the whole forward pass twice. Source: sections 4.2 and 4.4.
    """
    return 2 + 4 + 2 * recomputed_forwards


def attention_work(
    *,
    queries: Number,
    keys: Number,
    heads: Number,
    kv_heads: Number,
    head_dim: Number,
    batch_seqs: Number = 1,
    element_bytes: Number = 2,
) -> Work:
    """Returns FLOPs and bytes of one layer's dot-product attention in one kernel: 4 B T S N H, no causal discount.

    q, k, v are read and the result is written once; scores stay on chip. The intensity in bf16 is T S G / (T G + S):
    T G / (G + 1) in prefill, where T = S, and near G in generation, where T = 1. Source: exercise 4.4.
    """
    moved_bytes = 2 * batch_seqs * head_dim * (queries * heads + keys * kv_heads) * element_bytes
    return Work(flops=4 * batch_seqs * queries * keys * heads * head_dim, num_bytes=moved_bytes)


def attention_equal_len(model: Model) -> float:
    """Returns the sequence length at which attention's own products take as many FLOPs as all matrices of the layers.

    6 P T = 6 T^2 N (H + Hv) L with P the matrix parameters that a token uses in the layers, so T = P / (N (H + Hv) L):
    8 D if F = 4 D with a gate, K = N and N H = D. There is no causal discount. A layer with a window sees at most that
    many positions; the length is infinite if all layers have a window that is too short. Source: section 4.3.
    """
    return _equal_len(model, _layer_matrices(model))


def projection_equal_len(model: Model) -> float:
    """Returns the sequence length at which attention's own products take as many FLOPs as its projections.

    This is ``attention_equal_len`` with only the attention matrices: 24 B T D N H = 12 B T^2 N H gives 2 D with as many
    kv heads as heads. Source: exercise 4.5.
    """
    return _equal_len(model, [row for row in _layer_matrices(model) if row.part == "attention"])


def _layer_matrices(model: Model) -> list[Weight]:
    return [row for row in weight_table(model) if row.kind == "matrix" and row.layers]


def _equal_len(model: Model, weight_rows: list[Weight]) -> float:
    key_widths = sum(row.num_active_params for row in weight_rows) / model.num_heads
    window, (near_widths, full_widths) = model.sliding_window or math.inf, _head_widths(model)
    if not near_widths or key_widths / (near_widths + full_widths) <= window:
        return key_widths / (near_widths + full_widths)
    return (key_widths - near_widths * window) / full_widths if full_widths else math.inf


def _head_widths(model: Model) -> tuple[int, int]:
    """Returns the sums of H + Hv over layers with a window, and over layers without one."""
    num_near = len(model.sliding_layers) if model.sliding_window else 0
    near_widths = model.head_dim + (model.v_head_dim if model.latent_attention else model.head_dim)
    full_widths = near_widths if model.latent_attention else 2 * model.full_heads[1]
    return num_near * near_widths, (model.num_layers - num_near) * full_widths


FLOP_PARTS = {
    "attention": "projections",
    **dict.fromkeys(("mlp", "router", "experts", "shared_experts"), "feed-forward"),
    "unembedding": "vocabulary",
}
"""Part of the weight table -> the item of `forward_flops` that counts its products; the embedding look-up is free."""


def forward_flops(model: Model, seq_len: int, *, causal: bool = False) -> dict[str, float]:
    """Returns the FLOPs of the forward pass of one sequence by item: matrices 2 P T, scores 2 T S N (H + Hv) a layer.

    The backward pass has twice as many. S are the keys of a query, see `keys_per_query`; only chosen experts count.
    MFU counts three times their sum. Source: How to Scale Your Model, section 4.3.
    """
    flops_by_item = dict.fromkeys(("projections", "scores", "feed-forward", "vocabulary"), 0.0)
    for row in weight_table(model):
        if row.kind == "matrix" and row.part in FLOP_PARTS:
            num_used_params = math.prod(row.shape) if row.tied_to else row.num_active_params
            flops_by_item[FLOP_PARTS[row.part]] += 2.0 * num_used_params * seq_len
    flops_by_item["scores"] = float(score_flops(model, seq_len, causal=causal))
    return flops_by_item


def score_flops(model: Model, seq_len: Number, *, causal: bool = False) -> Number:
    """Returns the FLOPs of attention's own products in the forward pass of one sequence, see `forward_flops`."""
    window_keys = keys_per_query(seq_len, window=model.sliding_window, causal=causal, chunked=model.chunked_windows)
    near_widths, full_widths = _head_widths(model)
    key_widths = full_widths * keys_per_query(seq_len, causal=causal) + near_widths * window_keys
    return 2.0 * seq_len * key_widths * model.num_heads


def layer_traffic(model: Model, num_tokens: Number) -> dict[str, tuple[str, Number, str, Number]]:
    """Maps a strategy to (formula, bytes) forward and backward of what one layer sends for ``num_tokens`` in bf16.

    Whole arrays count, as on a ring: once for a gather or a scatter, twice for an all-reduce. P are the mean weights of
    a layer. Source: How to Scale Your Model, sections 5.1 to 5.3.
    """
    weight_bytes = 2 * sum(row.num_params for row in weight_table(model) if row.layers) / model.num_layers
    act_bytes = 2 * num_tokens * model.d_model
    traffic_by_strategy: dict[str, tuple[str, Number, str, Number]] = {
        "data": ("nothing", 0, "sum 4P", 2 * weight_bytes),
        "fsdp": ("gather 2P", weight_bytes, "gather 2P, scatter 2P", 2 * weight_bytes),
        "tensor": ("gather 4BD, scatter 4BD", 4 * act_bytes, "gather 4BD, scatter 4BD", 4 * act_bytes),
        "pipeline": ("send 2BD", act_bytes, "send 2BD", act_bytes),
    }
    if not model.latent_attention:
        ring_bytes = 4 * num_tokens * model.num_kv_heads * model.head_dim
        traffic_by_strategy["context ring"] = ("keys, values 4BKH", ring_bytes, "and gradients 8BKH", 2 * ring_bytes)
    if model.num_experts:
        sent_bytes = 2 * model.experts_per_token * act_bytes
        traffic_by_strategy["expert"] = ("to and from 4kBD", sent_bytes, "to and from 4kBD", sent_bytes)
    return traffic_by_strategy


# -- bytes of the training state ------------------------------------------------------------------------


def bytes_per_param(state: str, *, part: StatePart | None = None) -> float:
    """Returns the bytes per parameter of a training state, or of one part. Raises InputError for an unknown state.

    Without a part it is the number by which a state is known: 10 for bf16-adam, which leaves out the short-lived bf16
    gradient, 16, 18 or 20 with a master copy. Source: How to Scale Your Model, section 5.1.1.
    """
    require_known("the training state", state, STATE_BYTES)
    return STATE_BYTES[state][part or "counted"]


def state_bytes(num_params: Number, *, state: str, part: StatePart | None = None, num_shards: Number = 1) -> Number:
    """Returns the bytes per device of the training state, or of one part, split evenly over ``num_shards`` devices."""
    return num_params * bytes_per_param(state, part=part) / num_shards


def zero_bytes(num_params: Number, *, state: str, stage: ZeroStage, num_shards: Number) -> Number:
    """Returns the bytes per device of weights, gradients and optimizer at a ZeRO stage. Raises InputError unless it is
    0 to 3.

    Gradients count in every state, although `bytes_per_param` of bf16-adam leaves them out. Source: section 5.4.1."""
    if stage not in ZERO_SHARDS:
        raise InputError(f"ZeRO stage {stage} does not exist. Choose 0, 1, 2 or 3.")
    parts: tuple[StatePart, ...] = ("weights", "gradients", "optimizer")
    split = ZERO_SHARDS[stage]
    return sum(state_bytes(num_params, state=state, part=p, num_shards=num_shards if p in split else 1) for p in parts)


def max_params(memory_bytes: Number, *, state: str) -> Number:
    """Returns the most parameters whose training state fits ``memory_bytes``: pure data parallelism, without
    activations.

    Source: How to Scale Your Model, section 5.1.1."""
    return memory_bytes / bytes_per_param(state)


# -- bytes of activations and caches --------------------------------------------------------------------


def saved_widths(
    model: Model, remat: str | tuple[str, ...], *, tensor: int = 1, sequence_parallel: bool = True
) -> dict[str, Number]:
    """Maps a result to the elements per token that each layer keeps of it for its backward pass under a remat policy.

    They are read off the derived steps of one device, or of each of ``tensor``: "block" keeps only the layer's input
    (D), the list ("g", "u") also keeps the outputs of the feed-forward matmuls (D + 2 F). Layers that differ count with
    their mean; a token has one slot in each of its experts. With an encoder a token is one of the target and one of the
    source, and widths of encoder layers are added per decoder layer.
    """
    assignment = standard_assignment(sequence_parallel=sequence_parallel)
    strategy = Strategy(mesh={"tensor": tensor}, remat=remat, assignment=assignment)
    derived = derive(transformer(model), strategy_of_heads(strategy, model.common_kv_heads))
    size_by_dim: dict[str, Number] = held_dims(model.dims, strategy.mesh) | {"B": 1, "T": 1}
    if model.encoder:
        size_by_dim |= {"S": 1, "Sf": 2}
    if model.num_experts:
        size_by_dim["C"] = Fraction(model.experts_per_token, model.num_experts)
    width_by_name: dict[str, Number] = {}
    for block in derived.blocks:
        for array in block.kept if block.is_layer else ():
            width = math.prod(size_by_dim[dim] for dim in array.dims)
            num_parts = model.num_layers * (tensor if "tensor" in array.spread else 1)
            width_by_name[array.name] = width_by_name.get(array.name, 0) + Fraction(block.repeat * width, num_parts)
    return {name: int(width) if width.denominator == 1 else float(width) for name, width in width_by_name.items()}


def saved_bytes(
    num_tokens: Number, *, num_layers: Number, width: Number, element_bytes: Number = 2, num_shards: Number = 1
) -> Number:
    """Returns the bytes per device of results kept for the backward pass: tokens x layers x elements x bytes.

    ``width`` is the sum of ``saved_widths``, or k D for k results of the model's width. Source: section 4.4.
    """
    return num_tokens * num_layers * width * element_bytes / num_shards


def kv_cache_bytes(model: Model, num_positions: Number, *, element_bytes: Number = 2) -> Number:
    """Returns the bytes of the keys and values of one sequence: 2 K H elements per position and layer with its own
    keys; a layer with a window keeps that many positions at most.

    With latent attention the latent and the rotary key are kept instead: Rkv + Hr. Source: section 7.1.
    """
    near_elements, full_elements = 2 * model.num_kv_heads * model.head_dim, 2 * math.prod(model.full_heads)
    if model.latent_attention:
        near_elements = full_elements = model.kv_lora_rank + model.qk_rope_head_dim
    num_near = len(set(model.sliding_layers) & set(model.kv_layers))
    num_full, window = len(model.kv_layers) - num_near, model.sliding_window
    num_elements = cached_elements(num_positions, per_position=full_elements, num_layers=num_full)
    if num_near:
        layers: dict[str, int] = {"num_layers": num_near, "num_local": num_near}
        num_elements = num_elements + cached_elements(
            num_positions, per_position=near_elements, window=window, **layers
        )
    return num_elements * element_bytes


def cached_elements(
    num_positions: Number,
    *,
    per_position: int,
    num_layers: int,
    window: int | None = None,
    num_local: int = 0,
    layers_per_cache: int = 1,
) -> Number:
    """Returns the elements that all layers keep of one sequence: L S x elements of a position, less where shared.

    Elements of a position and layer are 2 N H with MHA, 2 K H with GQA, 2 H with MQA, Rkv + Hr with MLA. ``num_local``
    layers keep at most a ``window``; ``layers_per_cache`` layers share one cache. Source: sections 7.1.6 and 7.2.
    """
    minimum = np.minimum if isinstance(num_positions, np.ndarray) else min
    window_positions = num_positions if window is None else minimum(num_positions, window)
    num_elements = ((num_layers - num_local) * num_positions + num_local * window_positions) * per_position
    return num_elements if layers_per_cache == 1 else num_elements / layers_per_cache
