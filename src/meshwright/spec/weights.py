"""The weight table: one row per array of a model. Counting, sharding, initialising and saving all read these rows."""

import math
from functools import lru_cache
from typing import Literal

import msgspec

from meshwright.spec.model import Model

Part = Literal["embedding", "attention", "mlp", "norm", "router", "experts", "shared_experts", "unembedding"]

_LLAMA_NAMES = {
    "attn_norm": "input_layernorm.weight",
    "wq": "self_attn.q_proj.weight",
    "wk": "self_attn.k_proj.weight",
    "wv": "self_attn.v_proj.weight",
    "wo": "self_attn.o_proj.weight",
    "bq": "self_attn.q_proj.bias",
    "bk": "self_attn.k_proj.bias",
    "bv": "self_attn.v_proj.bias",
    "bo": "self_attn.o_proj.bias",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "sinks": "self_attn.sinks",
    "relative_bias": "self_attn.relative_attention_bias.weight",
    "wq_a": "self_attn.q_a_proj.weight",
    "q_a_norm": "self_attn.q_a_layernorm.weight",
    "wq_b": "self_attn.q_b_proj.weight",
    "wkv_a": "self_attn.kv_a_proj_with_mqa.weight",
    "wk_rope": "self_attn.kv_a_proj_with_mqa.weight",
    "bkv_a": "self_attn.kv_a_proj_with_mqa.bias",
    "bk_rope": "self_attn.kv_a_proj_with_mqa.bias",
    "bq_a": "self_attn.q_a_proj.bias",
    "kv_a_norm": "self_attn.kv_a_layernorm.weight",
    "wk_b": "self_attn.kv_b_proj.weight",
    "wv_b": "self_attn.kv_b_proj.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "w_gate": "mlp.gate_proj.weight",
    "w_up": "mlp.up_proj.weight",
    "w_down": "mlp.down_proj.weight",
    "b_gate": "mlp.gate_proj.bias",
    "b_up": "mlp.up_proj.bias",
    "b_down": "mlp.down_proj.bias",
    "router": "mlp.gate.weight",
    "experts.w_gate": "mlp.experts.{expert}.gate_proj.weight",
    "experts.w_up": "mlp.experts.{expert}.up_proj.weight",
    "experts.w_down": "mlp.experts.{expert}.down_proj.weight",
    "shared.w_gate": "mlp.shared_experts.gate_proj.weight",
    "shared.w_up": "mlp.shared_experts.up_proj.weight",
    "shared.w_down": "mlp.shared_experts.down_proj.weight",
    "shared.gate": "mlp.shared_expert_gate.weight",
}
_POST_NORM_NAMES = {
    "post_attn_norm": "post_attention_layernorm.weight",
    "mlp_norm": "pre_feedforward_layernorm.weight",
    "post_mlp_norm": "post_feedforward_layernorm.weight",
}
_FUSED = dict.fromkeys(("wq", "wk", "wv"), "self_attn.qkv_proj.weight")
_FAMILY_NAMES: dict[str, dict[str, str]] = {
    "gemma2": _POST_NORM_NAMES,
    "gemma3": _POST_NORM_NAMES,
    "phi3": _FUSED | dict.fromkeys(("w_gate", "w_up"), "mlp.gate_up_proj.weight"),
    "mixtral": {
        "router": "block_sparse_moe.gate.weight",
        "experts.w_gate": "block_sparse_moe.experts.{expert}.w1.weight",
        "experts.w_up": "block_sparse_moe.experts.{expert}.w3.weight",
        "experts.w_down": "block_sparse_moe.experts.{expert}.w2.weight",
    },
    "qwen2_moe": {f"shared.w_{part}": f"mlp.shared_expert.{part}_proj.weight" for part in ("gate", "up", "down")},
    "gpt_oss": {
        "router": "mlp.router.weight",
        "router_bias": "mlp.router.bias",
        "experts.w_gate": "mlp.experts.gate_up_proj",
        "experts.w_up": "mlp.experts.gate_up_proj",
        "experts.w_down": "mlp.experts.down_proj",
        "experts.b_gate": "mlp.experts.gate_up_proj_bias",
        "experts.b_up": "mlp.experts.gate_up_proj_bias",
        "experts.b_down": "mlp.experts.down_proj_bias",
    },
    "gpt2": {
        "attn_norm": "ln_1.weight",
        "attn_norm_bias": "ln_1.bias",
        "mlp_norm": "ln_2.weight",
        "mlp_norm_bias": "ln_2.bias",
        **{f"w{letter}": "attn.c_attn.weight" for letter in "qkv"},
        **{f"b{letter}": "attn.c_attn.bias" for letter in "qkv"},
        "wo": "attn.c_proj.weight",
        "bo": "attn.c_proj.bias",
        "w_up": "mlp.c_fc.weight",
        "b_up": "mlp.c_fc.bias",
        "w_down": "mlp.c_proj.weight",
        "b_down": "mlp.c_proj.bias",
    },
}


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
    every = tuple(range(model.num_layers))
    moe = model.moe_layers
    dense = every if not moe else model.dense_layers
    rows = [*_embedding(model), *(_encoder(model) if model.encoder else [])]
    rows += [*_norms(model, ("attn_norm",), every), *_attention(model, every)]
    rows += _norms(model, ("post_attn_norm",) if model.post_norms else (), every)
    rows += _cross_attention(model, every) if model.encoder else []
    rows += _norms(model, ("mlp_norm",), every)
    rows += _dense_mlp(model, dense) if dense else []
    rows += _experts(model, moe) if moe else []
    rows += _norms(model, ("post_mlp_norm",) if model.post_norms else (), every)
    return (*rows, *_head(model))


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


def _weight(
    model: Model,
    name: str,
    dims: str,
    part: Part,
    *,
    layers: tuple[int, ...],
    vector: bool = False,
    active: float = 1.0,
) -> Weight:
    """One row inside the layers; its stored name comes from the family's names, else llama's."""
    letters = tuple(dims.split())
    sizes = model.dims
    names = _LLAMA_NAMES | _FAMILY_NAMES.get(model.family, {})
    block = "h" if model.family == "gpt2" else "layers"
    return Weight(
        name=f"layers.{name}",
        hf_name=f"{model.weights_prefix}{block}.{{layer}}.{names[name]}",
        dims=letters,
        shape=tuple(sizes[letter] for letter in letters),
        part=part,
        kind="vector" if vector else "matrix",
        layers=layers,
        active_fraction=active,
    )


def _norms(model: Model, names: tuple[str, ...], layers: tuple[int, ...]) -> list[Weight]:
    suffixes = ("", "_bias") if model.norm == "layer_norm" else ("",)
    return [
        _weight(model, name + suffix, "D", "norm", layers=layers, vector=True) for name in names for suffix in suffixes
    ]


def _attention(model: Model, layers: tuple[int, ...]) -> list[Weight]:
    if model.latent_attention:
        return _latent_attention(model, layers)
    rows = [("wq", "D N H"), ("wk", "D K H"), ("wv", "D K H")]
    biases = [("bq", "N H"), ("bk", "K H"), ("bv", "K H")] if model.qkv_bias else []
    biases += [("bo", "D")] if model.out_bias else []
    biases += [("sinks", "N")] if model.attention_sinks else []
    norms = [("q_norm", "H"), ("k_norm", "H")] if model.qk_norm else []
    biases += [("relative_bias", "R N")] if model.relative_buckets else []
    return (
        [_weight(model, name, dims, "attention", layers=layers) for name, dims in [*rows, ("wo", "N H D")]]
        + [_weight(model, name, dims, "attention", layers=layers, vector=True) for name, dims in biases]
        + [_weight(model, name, dims, "norm", layers=layers, vector=True) for name, dims in norms]
    )


def _latent_attention(model: Model, layers: tuple[int, ...]) -> list[Weight]:
    """Multi-head latent attention. Source: DeepSeek-V2, section 2.1."""
    query = [("wq_a", "D Rq"), ("wq_b", "Rq N H")] if model.q_lora_rank else [("wq", "D N H")]
    rest = [("wkv_a", "D Rkv"), ("wk_rope", "D Hr"), ("wk_b", "Rkv N Hn"), ("wv_b", "Rkv N Hv"), ("wo", "N Hv D")]
    norms = [("q_a_norm", "Rq")] if model.q_lora_rank else []
    biases = [("bkv_a", "Rkv"), ("bk_rope", "Hr")] if model.qkv_bias else []
    biases += [("bq_a", "Rq")] if model.qkv_bias and model.q_lora_rank else []
    biases += [("bo", "D")] if model.out_bias else []
    return (
        [_weight(model, name, dims, "attention", layers=layers) for name, dims in query + rest]
        + [_weight(model, name, dims, "attention", layers=layers, vector=True) for name, dims in biases]
        + [
            _weight(model, name, dims, "norm", layers=layers, vector=True)
            for name, dims in [*norms, ("kv_a_norm", "Rkv")]
        ]
    )


def _cross_attention(model: Model, layers: tuple[int, ...]) -> list[Weight]:
    """Queries of the decoder, keys and values of the encoder's result; no positions."""
    of_attention = ("wq", "wk", "wv", "bq", "bk", "bv", "bo", "wo")
    norms = _norms(model, ("attn_norm",), layers)
    rows = [row for row in _attention(model, layers) if row.name.removeprefix("layers.") in of_attention]
    return [
        msgspec.structs.replace(
            row,
            name=f"layers.cross_{row.name.removeprefix('layers.').removeprefix('attn_')}",
            hf_name=row.hf_name.replace("{layer}.", "{layer}.cross."),
        )
        for row in (*norms, *rows)
    ]


def _encoder(model: Model) -> list[Weight]:
    """The encoder's layers, as a dense decoder's are, its last norm, and its table of positions."""
    assert model.encoder is not None
    every = tuple(range(model.encoder.num_layers))
    plain = msgspec.structs.replace(model, attention_sinks=False, num_experts=0)
    rows = [*_norms(plain, ("attn_norm",), every), *_attention(plain, every)]
    rows += _norms(plain, ("post_attn_norm",) if plain.post_norms else (), every)
    rows += [*_norms(plain, ("mlp_norm",), every), *_dense_mlp(plain, every)]
    rows += _norms(plain, ("post_mlp_norm",) if plain.post_norms else (), every)
    suffixes = ("", "_bias") if model.norm == "layer_norm" else ("",)
    tables = ["encoder_position_table"] if model.learned_positions else []
    return [
        *(_outside(model, name, "encoder.positions", "Ps D", "embedding") for name in tables),
        *(
            msgspec.structs.replace(row, name=row.name.replace("layers.", "encoder."), hf_name=f"encoder.{row.hf_name}")
            for row in rows
        ),
        *(_outside(model, f"encoder_final_norm{s}", f"encoder.norm{s}", "D", "norm") for s in suffixes),
    ]


def _dense_mlp(model: Model, layers: tuple[int, ...]) -> list[Weight]:
    gate = [("w_gate", "D F")] if model.gated else []
    rows = [*gate, ("w_up", "D F"), ("w_down", "F D")]
    gate_bias = [("b_gate", "F")] if model.gated else []
    biases = [*gate_bias, ("b_up", "F"), ("b_down", "D")] if model.mlp_bias else []
    return [_weight(model, name, dims, "mlp", layers=layers) for name, dims in rows] + [
        _weight(model, name, dims, "mlp", layers=layers, vector=True) for name, dims in biases
    ]


def _experts(model: Model, layers: tuple[int, ...]) -> list[Weight]:
    active = model.experts_per_token / model.num_experts
    routed = [("w_gate", "E D Fe"), ("w_up", "E D Fe"), ("w_down", "E Fe D")]
    biases = [("b_gate", "E Fe"), ("b_up", "E Fe"), ("b_down", "E D")] if model.mlp_bias else []
    shared = [("w_gate", "D Fs"), ("w_up", "D Fs"), ("w_down", "Fs D")] if model.d_ff_shared else []
    rows = [_weight(model, "router", "D E", "router", layers=layers)]
    if model.router_bias:
        rows.append(_weight(model, "router_bias", "E", "router", layers=layers, vector=True))
    rows += [_weight(model, f"experts.{name}", dims, "experts", layers=layers, active=active) for name, dims in routed]
    rows += [
        _weight(model, f"experts.{name}", dims, "experts", layers=layers, active=active, vector=True)
        for name, dims in biases
    ]
    rows += [_weight(model, f"shared.{name}", dims, "shared_experts", layers=layers) for name, dims in shared]
    if model.shared_expert_gate:
        rows.append(_weight(model, "shared.gate", "D", "shared_experts", layers=layers, vector=True))
    return rows


def _outside(model: Model, name: str, hf_name: str, dims: str, part: Part, tied_to: str | None = None) -> Weight:
    """One row outside the layers."""
    letters = tuple(dims.split())
    return Weight(
        name=name,
        hf_name=hf_name,
        dims=letters,
        shape=tuple(model.dims[letter] for letter in letters),
        part=part,
        kind="matrix" if len(letters) > 1 else "vector",
        tied_to=tied_to,
    )


def _embedding(model: Model) -> list[Weight]:
    token_name, position_name = ("wte.weight", "wpe.weight") if model.family == "gpt2" else ("embed_tokens.weight", "")
    rows = [_outside(model, "embed", model.weights_prefix + token_name, "V D", "embedding")]
    if model.learned_positions:
        rows.append(_outside(model, "position_table", model.weights_prefix + position_name, "P D", "embedding"))
    return rows


def _head(model: Model) -> list[Weight]:
    norm_name = "ln_f" if model.family == "gpt2" else "norm"
    rows = [_outside(model, "final_norm", f"{model.weights_prefix}{norm_name}.weight", "D", "norm")]
    if model.norm == "layer_norm":
        rows.append(_outside(model, "final_norm_bias", f"{model.weights_prefix}{norm_name}.bias", "D", "norm"))
    tied_to = "embed" if model.tied_embeddings else None
    return [*rows, _outside(model, "unembed", "lm_head.weight", "D V", "unembedding", tied_to)]
