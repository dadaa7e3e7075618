"""The weight table: one row per array of a model. Counting, sharding, initialising and saving all read these rows."""

import math
import re
import tomllib
from collections.abc import Mapping
from functools import cache, lru_cache
from pathlib import Path
from typing import Literal, get_args

import msgspec
from msgspec.structs import replace

from meshwright.spec.hf.families import formats
from meshwright.spec.model import Model

WeightPart = Literal[
    "embedding", "attention", "mlp", "norm", "router", "experts", "shared_experts", "unembedding", "buffer"
]
"""Buffers are read and written with the weights; no gradient trains them, and they are no parameters."""

_FILE = Path(__file__).parent / "data" / "weights.toml"
_Row = tuple[str, str, str, WeightPart, str]
"""Name, dims, stored name in a llama checkpoint, part, and the model fields that must be set (``!``: unset)."""

_VECTOR = re.compile(r"(^|\.)b|_bias$")
"""Names of vectors of more than one dim."""


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
    part: WeightPart
    kind: Literal["matrix", "vector"]
    layers: tuple[int, ...] = ()
    active_fraction: float = 1.0
    tied_to: str | None = None

    @property
    def repeat(self) -> int:
        """Counts the layers that have this weight; 1 for a weight outside the layers."""
        return len(self.layers) or 1

    @property
    def num_params(self) -> int:
        """Elements over all layers; 0 for a tied row and a buffer."""
        return 0 if self.tied_to or self.part == "buffer" else math.prod(self.shape) * self.repeat

    @property
    def num_active_params(self) -> int:
        """Elements that one token uses: routed experts count ``experts_per_token / num_experts``."""
        return round(self.num_params * self.active_fraction)


@cache
def _tables() -> dict[str, tuple[_Row, ...]]:
    """Returns the rows of every part of a model, as the data file has them."""
    return msgspec.convert(tomllib.loads(_FILE.read_text(encoding="utf-8")), dict[str, tuple[_Row, ...]])


@lru_cache(maxsize=32)
def weight_table(model: Model) -> tuple[Weight, ...]:
    """Every weight of the model, in the order of the forward pass.

    Extra parts (layers that predict tokens after the next, see `mtp_params`; a vision tower) are left out.
    """
    encoder = _encoder(model) if model.encoder else ()
    return (*_rows(model, "first"), *encoder, *_layers(model), *_rows(model, "last"))


def num_params(model: Model) -> int:
    """Counts the model's parameters, tied weights once."""
    return sum(row.num_params for row in weight_table(model))


def num_active_params(model: Model) -> int:
    """Counts the parameters one token uses: all but routed experts that are not chosen; embeddings included."""
    return sum(row.num_active_params for row in weight_table(model))


def params_by_part(model: Model) -> dict[str, int]:
    """Counts parameters by part of the model, in the order of the table; they add up to `num_params`."""
    parts: dict[str, int] = {}
    for row in (row for row in weight_table(model) if row.part != "buffer"):
        parts[row.part] = parts.get(row.part, 0) + row.num_params
    return parts


def mtp_params(model: Model) -> int:
    """Counts the parameters of the layers that predict tokens after the next, beside `num_params`: each is a layer like
    the model's last with three norms and a projection from 2 D to D; embedding and head are the model's.

    Source: DeepSeek-V3, section 2.2.
    """
    rows = [row for row in weight_table(model) if model.num_layers - 1 in row.layers]
    of_layer = sum(row.num_params // row.repeat for row in rows)
    return model.num_mtp_layers * (of_layer + 2 * model.d_model**2 + 3 * model.d_model)


def _layers(model: Model) -> list[Weight]:
    """Returns the rows of the layers. In a decoder beside an encoder cross-attention follows self-attention."""
    every = tuple(range(model.num_layers))
    layers = dict.fromkeys(get_args(WeightPart), every)
    layers |= dict.fromkeys(("router", "experts", "shared_experts", "buffer"), model.moe_layers)
    layers["mlp"] = model.dense_layers if model.num_experts else every
    rows = _rows(model, "layers", layers=layers)
    if model.encoder is None:
        return rows
    attention = {"attn_norm", "attn_norm_bias", "wq", "wk", "wv", "bq", "bk", "bv", "bo", "wo"}
    crossed = [_cross(row) for row in rows if row.name.removeprefix("layers.") in attention]
    first = next(number for number, row in enumerate(rows) if row.name == "layers.mlp_norm")
    return [*rows[:first], *crossed, *rows[first:]]


def _rows(model: Model, table: str, *, layers: Mapping[str, tuple[int, ...]] = {}) -> list[Weight]:
    """Returns the weights of a table's rows whose needs the model meets; ``layers`` lists the layers of each part, of
    which those with any count."""
    sizes = model.dims
    facts = {name: bool(getattr(model, name)) for name in model.__struct_fields__} | {
        "layer_norm": model.norm == "layer_norm",
        "sigmoid_router": model.router_scores == "sigmoid",
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
            kind="vector" if len(dims.split()) == 1 or part == "norm" or _VECTOR.search(name) else "matrix",
            layers=layers.get(part, ()),
            active_fraction=model.experts_per_token / model.num_experts if part == "experts" else 1.0,
            tied_to="embed" if part == "unembedding" and model.tied_embeddings else None,
        )
        for name, dims, llama_name, part, needs in _tables()[table]
        if met.issuperset(needs.split()) and (not layers or layers[part])
    ]


def _cross(row: Weight) -> Weight:
    """Returns the cross-attention row of a self-attention row: keys and values come from the encoder."""
    name = row.name.removeprefix("layers.").removeprefix("attn_")
    return replace(row, name=f"layers.cross_{name}", hf_name=row.hf_name.replace("{layer}.", "{layer}.cross."))


def _encoder(model: Model) -> list[Weight]:
    """Returns the encoder's position table, its layers (those of a dense decoder) and its final norm."""
    assert model.encoder is not None
    plain = replace(
        model,
        encoder=None,
        num_layers=model.encoder.num_layers,
        attention_sinks=False,
        num_experts=0,
        sliding_layers=(),
        dense_layers=(),
    )
    outside = _rows(model, "encoder")
    first = 1 if model.learned_positions else 0
    layers = [
        replace(row, name=row.name.replace("layers.", "encoder."), hf_name=f"encoder.{row.hf_name}")
        for row in _layers(plain)
    ]
    return [*outside[:first], *layers, *outside[first:]]
