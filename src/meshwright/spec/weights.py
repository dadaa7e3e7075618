"""The weight table: one row per array of a model. Counting, sharding, initialising and saving all read these rows."""

import math
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Literal, get_args

import msgspec

from meshwright.spec.hf.families import formats
from meshwright.spec.model import Model

Part = Literal["embedding", "attention", "mlp", "norm", "router", "experts", "shared_experts", "unembedding"]

Row = tuple[str, str, str, Part, str]
"""Name, dims, name in a llama's checkpoint, part, and the fields of the model that must be set (``!``: must not)."""

_FIRST_ROWS: tuple[Row, ...] = (
    ("embed", "V D", "{prefix}embed_tokens.weight", "embedding", ""),
    ("position_table", "P D", "{prefix}", "embedding", "learned_positions"),
)
_LAYER_ROWS: tuple[Row, ...] = (
    ("attn_norm", "D", "input_layernorm.weight", "norm", ""),
    ("attn_norm_bias", "D", "input_layernorm.bias", "norm", "layer_norm"),
    ("wq_a", "D Rq", "self_attn.q_a_proj.weight", "attention", "latent_queries"),
    ("wq_b", "Rq N H", "self_attn.q_b_proj.weight", "attention", "latent_queries"),
    ("wq", "D N H", "self_attn.q_proj.weight", "attention", "!latent_queries"),
    ("wk", "D K H", "self_attn.k_proj.weight", "attention", "!latent"),
    ("wv", "D K H", "self_attn.v_proj.weight", "attention", "!latent"),
    # latent attention: DeepSeek-V2, section 2.1
    ("wkv_a", "D Rkv", "self_attn.kv_a_proj_with_mqa.weight", "attention", "latent"),
    ("wk_rope", "D Hr", "self_attn.kv_a_proj_with_mqa.weight", "attention", "latent"),
    ("wk_b", "Rkv N Hn", "self_attn.kv_b_proj.weight", "attention", "latent"),
    ("wv_b", "Rkv N Hv", "self_attn.kv_b_proj.weight", "attention", "latent"),
    ("wo", "N Hv D", "self_attn.o_proj.weight", "attention", "latent"),
    ("wo", "N H D", "self_attn.o_proj.weight", "attention", "!latent"),
    ("bq", "N H", "self_attn.q_proj.bias", "attention", "qkv_bias !latent"),
    ("bk", "K H", "self_attn.k_proj.bias", "attention", "qkv_bias !latent"),
    ("bv", "K H", "self_attn.v_proj.bias", "attention", "qkv_bias !latent"),
    ("bkv_a", "Rkv", "self_attn.kv_a_proj_with_mqa.bias", "attention", "qkv_bias latent"),
    ("bk_rope", "Hr", "self_attn.kv_a_proj_with_mqa.bias", "attention", "qkv_bias latent"),
    ("bq_a", "Rq", "self_attn.q_a_proj.bias", "attention", "qkv_bias latent_queries"),
    ("bo", "D", "self_attn.o_proj.bias", "attention", "out_bias"),
    ("sinks", "N", "self_attn.sinks", "attention", "attention_sinks !latent"),
    ("relative_bias", "R N", "self_attn.relative_attention_bias.weight", "attention", "relative_buckets !latent"),
    ("q_norm", "H", "self_attn.q_norm.weight", "norm", "qk_norm !latent"),
    ("k_norm", "H", "self_attn.k_norm.weight", "norm", "qk_norm !latent"),
    ("q_a_norm", "Rq", "self_attn.q_a_layernorm.weight", "norm", "latent_queries"),
    ("kv_a_norm", "Rkv", "self_attn.kv_a_layernorm.weight", "norm", "latent"),
    ("post_attn_norm", "D", "post_attention_layernorm.weight", "norm", "post_norms"),
    ("post_attn_norm_bias", "D", "post_attention_layernorm.bias", "norm", "post_norms layer_norm"),
    ("mlp_norm", "D", "post_attention_layernorm.weight", "norm", "!post_norms"),
    ("mlp_norm", "D", "pre_feedforward_layernorm.weight", "norm", "post_norms"),
    ("mlp_norm_bias", "D", "post_attention_layernorm.bias", "norm", "layer_norm"),
    ("w_gate", "D F", "mlp.gate_proj.weight", "mlp", "gated"),
    ("w_up", "D F", "mlp.up_proj.weight", "mlp", ""),
    ("w_down", "F D", "mlp.down_proj.weight", "mlp", ""),
    ("b_gate", "F", "mlp.gate_proj.bias", "mlp", "mlp_bias gated"),
    ("b_up", "F", "mlp.up_proj.bias", "mlp", "mlp_bias"),
    ("b_down", "D", "mlp.down_proj.bias", "mlp", "mlp_bias"),
    ("router", "D E", "mlp.gate.weight", "router", ""),
    ("router_bias", "E", "mlp.gate.bias", "router", "router_bias"),
    ("experts.w_gate", "E D Fe", "mlp.experts.{expert}.gate_proj.weight", "experts", ""),
    ("experts.w_up", "E D Fe", "mlp.experts.{expert}.up_proj.weight", "experts", ""),
    ("experts.w_down", "E Fe D", "mlp.experts.{expert}.down_proj.weight", "experts", ""),
    ("experts.b_gate", "E Fe", "mlp.experts.{expert}.gate_proj.bias", "experts", "mlp_bias"),
    ("experts.b_up", "E Fe", "mlp.experts.{expert}.up_proj.bias", "experts", "mlp_bias"),
    ("experts.b_down", "E D", "mlp.experts.{expert}.down_proj.bias", "experts", "mlp_bias"),
    ("shared.w_gate", "D Fs", "mlp.shared_experts.gate_proj.weight", "shared_experts", "d_ff_shared"),
    ("shared.w_up", "D Fs", "mlp.shared_experts.up_proj.weight", "shared_experts", "d_ff_shared"),
    ("shared.w_down", "Fs D", "mlp.shared_experts.down_proj.weight", "shared_experts", "d_ff_shared"),
    ("shared.gate", "D", "mlp.shared_expert_gate.weight", "shared_experts", "shared_expert_gate"),
    ("post_mlp_norm", "D", "post_feedforward_layernorm.weight", "norm", "post_norms"),
    ("post_mlp_norm_bias", "D", "post_feedforward_layernorm.bias", "norm", "post_norms layer_norm"),
)
"""Every weight that a layer may have, in the order of the forward pass."""

_LAST_ROWS: tuple[Row, ...] = (
    ("final_norm", "D", "{prefix}norm.weight", "norm", ""),
    ("final_norm_bias", "D", "{prefix}norm.bias", "norm", "layer_norm"),
    ("unembed", "D V", "lm_head.weight", "unembedding", ""),
)
_ENCODER_ROWS: tuple[Row, ...] = (
    ("encoder_position_table", "Ps D", "encoder.positions", "embedding", "learned_positions"),
    ("encoder_final_norm", "D", "encoder.norm", "norm", ""),
    ("encoder_final_norm_bias", "D", "encoder.norm_bias", "norm", "layer_norm"),
)
"""What an encoder has beside its layers: before them the table, after them the norm."""

_VECTOR = re.compile(r"(^|\.)b|_bias$|^sinks$|^shared\.gate$")
"""Names of vectors besides norms."""


class Weight(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One array of a model, the same in every layer of ``layers``.

    ``dims`` and ``shape`` are those of one layer, in einsum order; ``hf_name`` is its name in published
    checkpoints with ``{layer}`` and ``{expert}`` to fill in, where several rows of one name are parts of one
    stored array. ``tied_to`` names the row that holds the values; such a row counts nothing.
    """

    name: str
    hf_name: str
    dims: tuple[str, ...]
    shape: tuple[int, ...]
    part: Part
    kind: Literal["matrix", "vector"]
    layers: tuple[int, ...] = ()
    active_fraction: float = 1.0
    tied_to: str | None = None

    @property
    def repeat(self) -> int:
        """Number of layers that have this weight; 1 for a weight outside the layers."""
        return len(self.layers) or 1

    @property
    def num_params(self) -> int:
        """Elements over all layers; 0 for a tied row."""
        return 0 if self.tied_to else math.prod(self.shape) * self.repeat

    @property
    def num_active_params(self) -> int:
        """Elements that one token uses: routed experts count ``experts_per_token / num_experts``."""
        return round(self.num_params * self.active_fraction)


@lru_cache(maxsize=32)
def weight_table(model: Model) -> tuple[Weight, ...]:
    """Every weight of the model, in the order of the forward pass.

    Buffers that are no parameters (DeepSeek-V3's routing correction) and extra heads (its multi-token
    prediction layer, a vision tower) are left out.
    """
    encoder = _encoder(model) if model.encoder else ()
    return (*_rows(model, _FIRST_ROWS), *encoder, *_layers(model), *_rows(model, _LAST_ROWS))


def num_params(model: Model) -> int:
    """Parameters of the model, tied weights once."""
    return sum(row.num_params for row in weight_table(model))


def num_active_params(model: Model) -> int:
    """Parameters that one token uses: all but the routed experts it is not sent to; embeddings included."""
    return sum(row.num_active_params for row in weight_table(model))


def params_by_part(model: Model) -> dict[str, int]:
    """Parameters by part of the model, in the order of the table; the sum is `num_params`."""
    parts: dict[str, int] = {}
    for row in weight_table(model):
        parts[row.part] = parts.get(row.part, 0) + row.num_params
    return parts


def _layers(model: Model) -> list[Weight]:
    """The rows of the layers; the cross-attention of a decoder beside an encoder follows its own attention."""
    every = tuple(range(model.num_layers))
    layers = dict.fromkeys(get_args(Part), every)
    layers |= dict.fromkeys(("router", "experts", "shared_experts"), model.moe_layers)
    layers["mlp"] = model.dense_layers if model.num_experts else every
    rows = _rows(model, tuple(row for row in _LAYER_ROWS if layers[row[3]]), layers=layers)
    if model.encoder is None:
        return rows
    attention = {"attn_norm", "attn_norm_bias", "wq", "wk", "wv", "bq", "bk", "bv", "bo", "wo"}
    crossed = [_cross(row) for row in rows if row.name.removeprefix("layers.") in attention]
    first = next(number for number, row in enumerate(rows) if row.name == "layers.mlp_norm")
    return [*rows[:first], *crossed, *rows[first:]]


def _rows(model: Model, table: tuple[Row, ...], *, layers: Mapping[str, tuple[int, ...]] = {}) -> list[Weight]:
    """The weights of those rows whose needs the model meets; ``layers`` has the layers of each part."""
    sizes = model.dims
    facts = {name: bool(getattr(model, name)) for name in model.__struct_fields__} | {
        "layer_norm": model.norm == "layer_norm",
        "latent": model.latent_attention,
        "latent_queries": model.latent_attention and model.q_lora_rank > 0,
    }
    met = {name if holds else f"!{name}" for name, holds in facts.items()}
    names = formats()[model.family].weights
    block = f"{{prefix}}{'h' if model.family == 'gpt2' else 'layers'}.{{layer}}." if layers else ""
    return [
        Weight(
            name=f"layers.{name}" if layers else name,
            hf_name=f"{block}{names.get(name, llama_name)}".replace("{prefix}", model.weights_prefix),
            dims=tuple(dims.split()),
            shape=tuple(sizes[letter] for letter in dims.split()),
            part=part,
            kind="vector" if part == "norm" or _VECTOR.search(name) else "matrix",
            layers=layers.get(part, ()),
            active_fraction=model.experts_per_token / model.num_experts if part == "experts" else 1.0,
            tied_to="embed" if part == "unembedding" and model.tied_embeddings else None,
        )
        for name, dims, llama_name, part, needs in table
        if met.issuperset(needs.split())
    ]


def _cross(row: Weight) -> Weight:
    """Queries of the decoder, keys and values of the encoder's result; no positions."""
    name = row.name.removeprefix("layers.").removeprefix("attn_")
    return msgspec.structs.replace(
        row, name=f"layers.cross_{name}", hf_name=row.hf_name.replace("{layer}.", "{layer}.cross.")
    )


def _encoder(model: Model) -> list[Weight]:
    """The encoder's table of positions, its layers, as a dense decoder's are, and its last norm."""
    assert model.encoder is not None
    plain = msgspec.structs.replace(
        model,
        encoder=None,
        num_layers=model.encoder.num_layers,
        attention_sinks=False,
        num_experts=0,
        sliding_layers=(),
        dense_layers=(),
    )
    outside = _rows(model, _ENCODER_ROWS)
    first = 1 if model.learned_positions else 0
    layers = [
        msgspec.structs.replace(row, name=row.name.replace("layers.", "encoder."), hf_name=f"encoder.{row.hf_name}")
        for row in _layers(plain)
    ]
    return [*outside[:first], *layers, *outside[first:]]
