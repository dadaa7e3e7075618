"""The fields of a sweep and their values as a person writes them: ``batch=1Mi..16Mi``, ``h100:8x1..8x512``."""

import itertools
import math
import re
from collections.abc import Iterable, Sequence
from typing import get_args

from meshwright.algebra.schedules.registry import searched_schedules
from meshwright.cli.fields import SECTION_OF, field_name, split_values
from meshwright.core.errors import InputError, nearest
from meshwright.core.units import format_count, format_params, parse_count
from meshwright.plan.legal import divisors
from meshwright.report.answer import Facts
from meshwright.spec.catalogue import load_model
from meshwright.spec.cluster import Cluster, make_cluster, parse_cluster
from meshwright.spec.model import Model
from meshwright.spec.strategy import REMAT_POLICIES, STATE_BYTES, ContextAttention
from meshwright.spec.weights import num_params

SweptFields = dict[str, Facts]
"""Field -> value as it is shown -> the value."""

OWN = ("model", "on", "batch", "seq_len", "micro")
"""Fields that are no key of ``--set``."""
MAX_VALUES = 64
MAX_POINTS = 600
_RANGE = re.compile(r"([^/]+?)\.\.([^/]+)")
_SIZE = re.compile(r"\d+(\.\d+)?[MBT]")
_USUAL: dict[str, Iterable[str]] = {
    "remat": REMAT_POLICIES,
    "state": STATE_BYTES,
    "schedule": searched_schedules(every=True),
    "zero": "123",
    "context_attention": get_args(ContextAttention),
    "seq_len": [f"{1 << power}Ki" for power in range(8)],
}


def read_fields(models: str, on: str, texts: Sequence[str], own: Sequence[str] = OWN) -> SweptFields:
    """Returns the models, the clusters and each ``FIELD=VALUES``, in this order; ``own`` are no keys of ``--set``.

    A model is a name, a config.json or a size in the proportions of Llama 3 (``7B``); sequences of training are of 4096
    tokens by default. Raises InputError for a field that is given twice, for one without values that has no usual ones,
    and, for training, unless exactly one of ``batch`` and ``micro`` is given.
    """
    known_names = {*own[2:], *SECTION_OF}
    swept_models = [model_or_size(name) for name in _listed(models)]
    clusters = sweep_clusters(on)
    # clusters are named by their chips, where these tell them apart
    labels = [f"{cluster.num_chips:,}" for cluster in clusters]
    is_unique = len({cluster.chip.name for cluster in clusters}) == 1 and len({*labels}) == len(labels)
    fields: SweptFields = {
        "model": {model.name: model for model in swept_models},
        "on": dict(zip(labels if is_unique else (cluster.short_name for cluster in clusters), clusters, strict=True)),
    }
    for text in texts:
        name, equals_sign, _ = text.partition("=")
        section, field = field_name(name)
        name = field if SECTION_OF.get(field, "") == section else name.strip()
        if equals_sign and "." not in name and name not in known_names:
            options_text = ", ".join((*own[2:], "or a field of the model"))
            raise InputError(f"sweep has no field {name!r}.{nearest(name, known_names)} Use {options_text}.")
        values = split_values(text, what="sweep") if equals_sign else _usual(name, swept_models[0], clusters[-1])
        if name in fields:
            raise InputError(f"{name} is given twice. Give all its values in one list.")
        fields[name] = {_shown(value): value for value in values}
    if own != OWN:
        return fields
    if ("batch" in fields) == ("micro" in fields):
        raise InputError("give --batch 4Mi for the best plans, or micro=1 for the strategy as it is given.")
    return {"seq_len": {"4096": "4096"}} | fields


def combinations(fields: SweptFields) -> list[tuple[dict[str, str], Facts]]:
    """Returns every combination of the fields' values, the last field running fastest: as they are shown, and as such.

    Raises InputError for more than ``MAX_POINTS``.
    """
    num_points = math.prod(map(len, fields.values()))
    if num_points > MAX_POINTS:
        raise InputError(f"{num_points:,} points are too many for one sweep. Give at most {MAX_POINTS}.")
    points = []
    for text_and_value_pairs in itertools.product(*(values.items() for values in fields.values())):
        texts, values = zip(*text_and_value_pairs, strict=True)
        points.append((dict(zip(fields, texts, strict=True)), dict(zip(fields, values, strict=True))))
    return points


def _listed(text: str) -> list[str]:
    """Returns the parts of a list with commas. Raises InputError for an empty one."""
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise InputError(f"{text!r} has an empty part. Write names with one comma between two.")
    return parts


def _shown(value: str) -> str:
    return format_count(int(value)) if value.isdecimal() and len(value) < 16 and int(value) >= 1024 else value


def _usual(name: str, model: Model, cluster: Cluster) -> Iterable[str]:
    """Returns values of a field that is named alone."""
    if name == "tensor":
        max_size = min(model.num_heads, cluster.num_chips)
        sizes = [size for size in divisors(cluster.num_chips) if size <= max_size and model.num_kv_heads % size == 0]
        return [str(size) for size in sizes]
    if name not in _USUAL:
        raise InputError(
            f"{name!r} is not FIELD=VALUES. Write batch=1Mi,4Mi; only tensor, {', '.join(_USUAL)} need none."
        )
    return _USUAL[name]


# -- models of a size -----------------------------------------------------------------------------------

HEAD_DIM = 128
KV_HEADS = 8
VOCAB_SIZE = 128_256
FF_OVER_WIDTH = 3.5
WIDTH_OVER_LAYERS = 128
"""Llama 3: 4096 / 32 in 8B, 8192 / 80 in 70B, 16384 / 126 in 405B."""
TIED_BELOW = 4e9
"""Parameters below which input and output embedding are one table, as in Llama 3.2 1B and 3B."""
SMALLEST, LARGEST = 5e8, 1e14


def model_or_size(text: str) -> Model:
    """Returns the model of a name, of a config.json, or of a size such as ``"7B"`` in the proportions of Llama 3."""
    return llama_like(text) if _SIZE.fullmatch(text) else load_model(text)


def llama_like(size: str) -> Model:
    """Returns a dense model of about ``size`` parameters (``"7B"``), in the proportions of Llama 3.

    D / L is near 128 and F = 3.5 D. The width is a multiple of 1024 (8 kv heads of 128), of 2048 from 8192 on; the
    layers, in fours from 16 on so that stages can share them, make up the count to a few percent.
    """
    wanted_params = parse_count(size, what="size")
    if not SMALLEST <= wanted_params <= LARGEST:
        raise InputError(f"size {size} is out of range. Give 500M to 100T parameters, such as 7B.")
    is_tied = wanted_params < TIED_BELOW
    candidates = []
    for d_model in (*range(1024, 8192, 1024), *range(8192, 2**18, 2048)):
        params_per_layer = d_model * (2 * d_model + 2 * KV_HEADS * HEAD_DIM + 3 * FF_OVER_WIDTH * d_model + 2)
        num_layers = (wanted_params - (2 - is_tied) * VOCAB_SIZE * d_model) / params_per_layer
        num_layers = round(num_layers) if num_layers < 16 else 4 * round(num_layers / 4)
        if num_layers >= 1:
            # a model that is twice too wide is as far off as one that is twice too deep
            shape_ratio = d_model / num_layers / WIDTH_OVER_LAYERS
            candidates.append((max(shape_ratio, 1 / shape_ratio), d_model, num_layers))
    _, d_model, num_layers = min(candidates)
    return Model(
        name=f"llama-{size}",
        family="llama",
        num_layers=num_layers,
        d_model=d_model,
        d_ff=round(FF_OVER_WIDTH * d_model),
        num_heads=d_model // HEAD_DIM,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        vocab_size=VOCAB_SIZE,
        tied_embeddings=is_tied,
        max_positions=131_072,
        rope_theta=5e5,
    )


def describe(model: Model) -> str:
    """Returns ``"llama-7B: 7.16 B parameters, 28 layers of width 4,096"``; "" for a model that is not of this kind."""
    if not model.name.startswith("llama-"):
        return ""
    params_text = format_params(num_params(model))
    return f"{model.name}: {params_text} parameters, {model.num_layers} layers of width {model.d_model:,}"


# -- clusters -------------------------------------------------------------------------------------------


def sweep_clusters(text: str) -> tuple[Cluster, ...]:
    """Returns clusters of ``"h100:8x4,8x8"`` or ``"h100:8x1..8x512"``, fewest chips first.

    A range doubles one size at a time: 8x1, 8x2, ... 8x512, and the shortest of a torus, the last of several: 4x4x4,
    4x4x8, 4x8x8, ... 16x16x16. Raises InputError for a range that is none, and for more than 64 clusters.
    """
    clusters: list[Cluster] = []
    chip_name = ""
    for item in _listed(text):
        range_match = _RANGE.fullmatch(item)
        end_texts = range_match.groups() if range_match else (item, item)
        chip_name = end_texts[0].rpartition(":")[0].rpartition("*")[2].strip() or chip_name
        first_cluster, last_cluster = (_named(end, chip_name) for end in end_texts)
        clusters += _between(first_cluster, last_cluster) if range_match else [first_cluster]
    if len(clusters) > MAX_VALUES:
        raise InputError(f"{text} is {len(clusters)} clusters. Give at most {MAX_VALUES}.")
    return tuple(sorted(clusters, key=lambda cluster: cluster.num_chips))


def require_links(text: str, clusters: Sequence[Cluster]) -> None:
    """Raises InputError if every cluster is a single chip."""
    if all(cluster.num_chips == 1 for cluster in clusters):
        raise InputError(f"{text} is one chip: there is nothing to send. Give a larger cluster.")


def _named(text: str, chip_name: str) -> Cluster:
    """Returns the cluster of a text that may leave the chip out: ``"8x4"``."""
    text = text.strip()
    return parse_cluster(f"{chip_name}:{text}" if text[:1].isdigit() and ":" not in text else text)


def _between(first: Cluster, last: Cluster) -> list[Cluster]:
    alike = (first.chip.name, first.num_slices, len(first.shape)) == (last.chip.name, last.num_slices, len(last.shape))
    if not alike or any(size > last_size for size, last_size in zip(first.shape, last.shape, strict=True)):
        raise InputError(
            f"{first.short_name}..{last.short_name} is no range of clusters. Write the smallest and the largest shape "
            f"of one chip, such as h100:8x1..8x512 or v5p:4x4x4..16x16x16."
        )
    return [first, *_grown(last, first.shape, last.num_slices)]


def growing(cluster: Cluster) -> tuple[Cluster, ...]:
    """Returns clusters from two chips to all, each at most twice the one before."""
    clusters = _grown(cluster, (1,) * len(cluster.shape), 1)
    return (*clusters, cluster) if cluster.num_slices > 1 else tuple(clusters)


def _grown(last: Cluster, shape: Sequence[int], num_slices: int) -> list[Cluster]:
    """Returns clusters larger than a shape up to the last; switches fill their domain first, a torus grows evenly."""
    grown_shape, clusters = list(shape), []
    while tuple(grown_shape) != last.shape:
        growing_axes = [i for i, last_size in enumerate(last.shape) if grown_shape[i] < last_size]
        axis = min(growing_axes, key=lambda i: (grown_shape[i], -i)) if last.kind == "torus" else growing_axes[0]
        grown_shape[axis] = min(2 * grown_shape[axis], last.shape[axis])
        clusters.append(make_cluster(last.chip, tuple(grown_shape), num_slices=num_slices, levels=last.levels))
    return clusters
