"""The weight table: one row per array of a model. Counting, sharding, initialising and saving all read these rows."""

import math
import re
import tomllib
from collections.abc import Collection, Mapping
from functools import cache, lru_cache
from pathlib import Path
from typing import Literal, get_args

import msgspec
from msgspec.structs import replace

from meshwright.core.errors import InputError
from meshwright.spec.hf.families import formats
from meshwright.spec.model import Model

WeightPart = Literal[
    "embedding",
    "convolution",
    "attention",
    "mlp",
    "norm",
    "router",
    "experts",
    "shared_experts",
    "unembedding",
    "buffer",
    "adapter",
    "scale",
]
"""The part of the model that a weight belongs to."""

_UNCOUNTED = ("buffer", "scale")
"""Parts whose arrays are not parameters: buffers, and the scales of integer matrices."""

_FILE = Path(__file__).parent / "data" / "weights.toml"
_Row = tuple[str, str, str, WeightPart, str]
"""Name, dims, stored name in a llama checkpoint, part, and the model fields that must be set (``!``: unset)."""

_VECTOR = re.compile(r"(^|\.)b|_bias$")
"""Pattern of the names of vectors that may have several dims: biases."""


class Weight(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One array of a model, alike in every layer of ``layers``.

    A ``frozen`` weight is not trained. ``dtype`` is its stored dtype if that is not the training state's; the part
    "scale" is for scales of integer matrices. ``dims`` and ``shape`` are of one layer, in einsum order; ``hf_name`` is
    the name in published checkpoints, with ``{layer}`` and ``{expert}`` to fill in; without ``{layer}`` all layers are
    one stored array. Rows with the same ``hf_name`` are parts of one stored array. A row that is ``tied_to`` another
    row takes its values from there, and counts 0 parameters.
    """

    name: str
    hf_name: str
    dims: tuple[str, ...]
    shape: tuple[int, ...]
    part: WeightPart
    kind: Literal["matrix", "vector"]
    layers: tuple[int, ...] = ()
    active_fraction: float = 1.0
    tied_to: str | None = None
    frozen: bool = False
    dtype: str = ""

    @property
    def inputs(self) -> tuple[str, ...]:
        """Input dims of its matrices, of which each layer and expert has one; () for a vector.

        If the last dim is D (the stream), Dc (between convolutions) or Ra (the rank of an adapter), all dims before it
        are inputs; otherwise only the first dim is.
        """
        if self.kind == "vector":
            return ()
        dims = tuple(dim for dim in self.dims if dim != "An" and not (dim == "E" and self.part == "experts"))
        return dims[:-1] if dims[-1] in ("D", "Dc", "Ra") else dims[:1]

    def stored_name(self, names: Collection[str]) -> str:
        """Returns the name in a folder with the tensors ``names``: ``hf_name`` or, if that stacks experts and the
        folder stores each expert by itself, the name of one expert's weight, with ``{expert}`` to fill in."""
        stem, _, last = self.hf_name.partition(".experts.")
        if last not in ("gate_up_proj", "down_proj") or not any(".experts.0.gate_proj." in name for name in names):
            return self.hf_name
        return f"{stem}.experts.{{expert}}.{self.name.rpartition('w_')[2]}_proj.weight"

    @property
    def repeat(self) -> int:
        """Number of layers that have this weight; 1 for a weight outside the layers."""
        return len(self.layers) or 1

    @property
    def num_params(self) -> int:
        """Elements over all layers; 0 for a tied row, a buffer and a scale."""
        return 0 if self.tied_to or self.part in _UNCOUNTED else math.prod(self.shape) * self.repeat

    @property
    def num_active_params(self) -> int:
        """Elements that one token uses: routed experts count ``experts_per_token / num_experts``."""
        return round(self.num_params * self.active_fraction)


@cache
def _tables() -> dict[str, tuple[_Row, ...]]:
    """Returns the rows of the data file by its tables."""
    return msgspec.convert(tomllib.loads(_FILE.read_text(encoding="utf-8")), dict[str, tuple[_Row, ...]])


@lru_cache(maxsize=32)
def weight_table(model: Model) -> tuple[Weight, ...]:
    """Returns every weight of the model, in the order of the forward pass.

    Extra parts (a vision tower; without ``mtp_weight`` the layers of `mtp_params`) are left out.
    """
    if model.lora:
        base_weights = weight_table(frozen_base(model))
        frozen_weights = (frozen_row for row in base_weights for frozen_row in _frozen(model, row))
        return (*frozen_weights, *_adapters(model, base_weights))
    encoder_rows = _encoder(model) if model.encoder else ()
    return (*_rows(model, "first"), *encoder_rows, *_layers(model), *_rows(model, "last"))


def without_mtp(model: Model) -> Model:
    """Returns the model without its layer that predicts tokens after the next, which only training uses."""
    return replace(model, mtp_weight=0.0)


def without_mtp_words(model: Model) -> str:
    """Returns a clause that the weights of the layer for the token after the next are not read; "" if they are."""
    is_left_out = model.num_mtp_layers and not model.mtp_weight
    return "; without the layer for the token after the next (model.mtp_weight)" if is_left_out else ""


def fixed_tables(model: Model) -> tuple[str, ...]:
    """Returns the names of the position tables that are sinusoids, which are not trained."""
    has_encoders = model.sinusoids or (model.encoder is not None and model.encoder.sinusoids)
    return (*["position_table"] * model.sinusoids, *["encoder_position_table"] * has_encoders)


def unsaved_tables(model: Model) -> list[Weight]:
    """Returns the weights of fixed position tables that transformers does not save: Marian's, of both stacks."""
    return [row for row in weight_table(model) if model.sinusoids and row.name in fixed_tables(model)]


def frozen_base(model: Model) -> Model:
    """Returns the model without its adapters."""
    return replace(model, lora=None)


def has_frozen_matrices(model: Model) -> bool:
    """True if the model has frozen matrices, which no step changes and no checkpoint of a run stores."""
    return any(row.frozen and row.kind == "matrix" for row in weight_table(model))


def adapted(model: Model) -> dict[str, str]:
    """Maps each weight that has an adapter to the name of its A; weights stored as one array share an A, as in PEFT.
    Raises InputError for a target that the model lacks, or that is only a part of a stored array."""
    if model.lora is None:
        return {}
    row_of = {row.name.removeprefix("layers."): row for row in weight_table(frozen_base(model)) if row.layers}
    first_name_of: dict[str, str] = {}
    for name, is_named_alone in model.lora.weights.items():
        if name in row_of:
            first_name_of.setdefault(row_of[name].hf_name, name)
        elif is_named_alone:
            raise InputError(f"lora.targets: {model.name} has no {name}. Leave it out.")
    for name in (name for name, row in row_of.items() if row.hf_name in first_name_of and row.kind == "matrix"):
        if name not in model.lora.weights:
            joined_names = ", ".join(n for n, row in row_of.items() if row.hf_name == row_of[name].hf_name)
            raise InputError(f"lora.targets: {model.name} stores {joined_names} as one array. Target all of them.")
    return {name: f"{first_name_of[row_of[name].hf_name]}_lora_a" for name in model.lora.weights if name in row_of}


def group_dims(dims: tuple[str, ...], inputs: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the dims of the scales of a matrix: the last input dim is replaced by its groups, D by Dg."""
    return tuple(f"{dim}g" if dim == inputs[-1] else dim for dim in dims)


def _frozen(model: Model, row: Weight) -> tuple[Weight, ...]:
    """Returns the row as frozen; if adapters have an integer ``base`` and it is a matrix of a layer, its scales too."""
    assert model.lora is not None
    if not (model.lora.base and row.layers) or row.kind == "vector" or row.part not in ("attention", "mlp"):
        return (replace(row, frozen=True),)
    dims = group_dims(row.dims, row.inputs)
    scale_row = Weight(
        name=f"{row.name}_scale",
        hf_name=f"{row.hf_name}_scale",
        dims=dims,
        shape=tuple(model.dims[dim] for dim in dims),
        part="scale",
        kind="vector",
        layers=row.layers,
        frozen=True,
        dtype="fp32",
    )
    return replace(row, frozen=True, dtype=model.lora.base), scale_row


def _adapters(model: Model, base_weights: tuple[Weight, ...]) -> list[Weight]:
    """Returns the rows of the adapters, named as PEFT names them: A has the input dims of its weight and the rank, B
    the rank and the output dims."""
    layer_rows = [row for row in base_weights if row.layers]
    adapter_by_place: dict[tuple[str, tuple[int, ...]], Weight] = {}
    pairs = adapted(model).items()
    for name, a_name, row in ((n, a, row) for n, a in pairs for row in layer_rows if row.name == f"layers.{n}"):
        output_dims = tuple(dim for dim in row.dims if dim not in row.inputs)
        for adapter_name, dims, letter in (
            (a_name, (*row.inputs, "Ra"), "A"),
            (f"{name}_lora_b", ("Ra", *output_dims), "B"),
        ):
            adapter_by_place[adapter_name, row.layers] = Weight(
                name=f"layers.{adapter_name}",
                hf_name="base_model.model." + row.hf_name.replace(".weight", f".lora_{letter}.weight"),
                dims=dims,
                shape=tuple(model.dims[dim] for dim in dims),
                part="adapter",
                kind="matrix",
                layers=row.layers,
            )
    return list(adapter_by_place.values())


def num_params(model: Model) -> int:
    """Counts the model's parameters, tied weights once."""
    return sum(row.num_params for row in weight_table(model))


def num_active_params(model: Model) -> int:
    """Counts the parameters one token uses: all but routed experts that are not chosen; embeddings included."""
    return sum(row.num_active_params for row in weight_table(model))


def params_by_part(model: Model) -> dict[str, int]:
    """Counts parameters by part of the model, in the order of the table; they add up to `num_params`."""
    count_by_part: dict[str, int] = {}
    for row in (row for row in weight_table(model) if row.part not in _UNCOUNTED):
        count_by_part[row.part] = count_by_part.get(row.part, 0) + row.num_params
    return count_by_part


def mtp_params(model: Model) -> int:
    """Counts the parameters of the layers that predict tokens after the next; 0 if `num_params` counts them already.

    Each is a layer like the model's last with three norms and a projection from 2 D to D; embedding and head are the
    model's. Source: DeepSeek-AI, DeepSeek-V3 (2024), section 2.2.
    """
    if model.mtp_weight or not model.num_mtp_layers:
        return 0
    return model.num_mtp_layers * (num_params(replace(model, num_mtp_layers=1, mtp_weight=1.0)) - num_params(model))


def _layers(model: Model, stored_prefix: str = "") -> list[Weight]:
    """Returns the rows of the layers. In the decoder of an encoder-decoder cross-attention follows self-attention.
    ``stored_prefix`` + a weight's name is its key in the family's table of stored names."""
    all_layers = tuple(range(model.num_layers))
    ids_by_part = dict.fromkeys(get_args(WeightPart), all_layers)
    ids_by_part |= dict.fromkeys(("router", "experts", "shared_experts", "buffer"), model.moe_layers)
    ids_by_part["mlp"] = model.dense_layers if model.num_experts else all_layers
    own_values = tuple(n for n in model.kv_layers if not model.values_from_keys or n in model.sliding_layers)
    ids_by_part |= {"layer_scale": all_layers, "wv": own_values, "bv": own_values}
    ids_by_part |= dict.fromkeys(("wk", "bk", "k_norm"), model.kv_layers)
    branch_names = ("router_norm", "expert_norm", "post_expert_norm", "post_shared_norm", "expert_scale")
    ids_by_part |= dict.fromkeys(branch_names, model.moe_layers)
    own_names = ("layer_proj", "layer_gate", "layer_out", "laurel_in", "laurel_out")
    ids_by_part |= dict.fromkeys((*own_names, "mix_router", "mix_predict", "mix_correct"), all_layers)
    # a layer that predicts the token after the next is like the last one
    ids_by_part = {part: ids + model.mtp_layers if all_layers[-1] in ids else ids for part, ids in ids_by_part.items()}
    rows = _rows(model, "layers", layers=ids_by_part, stored_prefix=stored_prefix)
    rows += _rows(model, "mtp", layers=dict.fromkeys(ids_by_part, model.mtp_layers))
    rows = [part for row in rows for part in _by_dims(model, row)]
    if model.encoder is None:
        return rows
    attention_names = {"attn_norm", "attn_norm_bias", "wq", "wk", "wv", "bq", "bk", "bv", "bo", "wo"}
    # keys and values of cross-attention come from the encoder
    form, cross_rows = formats()[model.family], list[Weight]()
    for row in rows:
        if (name := row.name.removeprefix("layers.")) in attention_names:
            cross_name = f"cross_{name.removeprefix('attn_')}"
            stored_name = form.layers.replace("{prefix}", model.weights_prefix) + form.weights.get(cross_name, "")
            hf_name = stored_name if cross_name in form.weights else row.hf_name.replace("{layer}.", "{layer}.cross.")
            cross_rows.append(replace(row, name=f"layers.{cross_name}", hf_name=hf_name))
    mlp_index = next(i for i, row in enumerate(rows) if row.name == "layers.mlp_norm")
    return [*rows[:mlp_index], *cross_rows, *rows[mlp_index:]]


def _by_dims(model: Model, row: Weight) -> list[Weight]:
    """Splits the row of a weight into one row for each group of layers in which it has the same dims."""
    layers_by_dims: dict[tuple[str, ...], list[int]] = {}
    for layer in row.layers:
        dim_of = model.dims_of_layer(layer)
        layers_by_dims.setdefault(tuple(dim_of.get(dim, dim) for dim in row.dims), []).append(layer)
    return [
        replace(row, dims=dims, shape=tuple(model.dims[dim] for dim in dims), layers=tuple(layers))
        for dims, layers in layers_by_dims.items()
    ]


def _rows(
    model: Model, table: str, *, layers: Mapping[str, tuple[int, ...]] = {}, stored_prefix: str = ""
) -> list[Weight]:
    """Returns the weights of a table's rows whose needs the model meets. ``layers`` maps a weight's name, or its part,
    to the layers that have it; rows without layers are left out. The family's stored name is looked up by
    ``stored_prefix`` + name, then by name."""
    size_by_letter = model.dims
    is_true_by_fact = {name: bool(getattr(model, name)) for name in model.__struct_fields__} | {
        "norm_biases": model.norm == "layer_norm" and model.norm_bias,
        "features": model.encoder is not None and model.encoder.features > 0,
        "stream_norms": model.pre_norms or model.sum_norms,
        "latent": model.latent_attention,
        "latent_queries": model.latent_attention and model.q_lora_rank > 0,
    }
    facts_met = {name if is_true else f"!{name}" for name, is_true in is_true_by_fact.items()}
    form = formats()[model.family]
    keys = ((key.split(), hf_name) for key, hf_name in form.weights.items())
    own_name_of = {name: hf_name for (name, *needs), hf_name in keys if facts_met.issuperset(needs)}
    layer_prefix = (form.encoder_layers if stored_prefix else form.layers) if layers else ""
    prefix = model.weights_prefix
    replacement_by_field = {"{prefix}": prefix, "{outer}": head_prefix(prefix), "{beside_gate}": "_1" * model.gated}
    fixed_names = fixed_tables(model)

    def is_vector(name: str) -> bool:
        return name in fixed_names or _VECTOR.search(name) is not None

    def stored(name: str, llama_name: str) -> str:
        text = own_name_of.get(stored_prefix + name, own_name_of.get(name, llama_name))
        text = text if text.startswith("{prefix}") else layer_prefix + text  # else stored as one for all layers
        for field, replacement in replacement_by_field.items():
            text = text.replace(field, replacement)
        return text

    return [
        Weight(
            name=f"layers.{name}" if layers else name,
            hf_name=stored(name, llama_name),
            dims=tuple(dims_text.split()),
            shape=tuple(size_by_letter[letter] for letter in dims_text.split()),
            part=part,
            kind="vector" if len(dims_text.split()) < 2 or part == "norm" or is_vector(name) else "matrix",
            layers=layers.get(name, layers.get(part, ())),
            active_fraction=model.experts_per_token / model.num_experts if part == "experts" else 1.0,
            tied_to="embed" if name == "unembed" and model.tied_embeddings else None,
            frozen=part == "buffer" or name in fixed_names,
            dtype="fp32" if part == "buffer" else "",
        )
        for name, dims_text, llama_name, part, needs in _tables()[table]
        if facts_met.issuperset(needs.split()) and (not layers or layers.get(name, layers[part]))
    ]


def head_prefix(prefix: str) -> str:
    """Returns the prefix of the head's stored name: the decoder's prefix without ``model.`` at its end; else ""."""
    return prefix.removesuffix("model.") if f".{prefix}".endswith(".model.") else ""


def _encoder(model: Model) -> list[Weight]:
    """Returns the encoder's weights: tables of positions, layers (as in a dense decoder) and its last norm."""
    assert model.encoder is not None
    letters, size_by_letter = model.encoder_letters, model.dims
    num_heads, num_kv_heads, head_dim, d_ff = (size_by_letter[letters.get(letter, letter)] for letter in "NKHF")
    decoder = replace(
        model,
        encoder=None,
        num_layers=model.encoder.num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        d_ff=d_ff,
        attention_sinks=False,
        num_experts=0,
        sliding_layers=(),
        dense_layers=(),
        num_shared_kv_layers=0,
        layer_embed_dim=0,
    )
    layer_rows = [
        replace(
            row, name=row.name.replace("layers.", "encoder."), dims=tuple(letters.get(dim, dim) for dim in row.dims)
        )
        for row in _layers(decoder, "encoder.")
    ]
    return [*_rows(model, "encoder_first"), *layer_rows, *_rows(model, "encoder_last")]
