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
    known = {*own[2:], *SECTION_OF}
    chosen = [model_or_size(name) for name in _listed(models)]
    clusters = sweep_clusters(on)
    # clusters are named by their chips, where these tell them apart
    counts = [f"{cluster.num_chips:,}" for cluster in clusters]
    plain = len({cluster.chip.name for cluster in clusters}) == 1 and len({*counts}) == len(counts)
    fields: SweptFields = {
        "model": {model.name: model for model in chosen},
        "on": dict(zip(counts if plain else (cluster.short_name for cluster in clusters), clusters, strict=True)),
    }
    for text in texts:
        name, sep, _ = text.partition("=")
        section, field = field_name(name)
        name = field if SECTION_OF.get(field, "") == section else name.strip()
        if sep and "." not in name and name not in known:
            options = ", ".join((*own[2:], "or a field of the model"))
            raise InputError(f"sweep has no field {name!r}.{nearest(name, known)} Use {options}.")
        values = split_values(text, what="sweep") if sep else _usual(name, chosen[0], clusters[-1])
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
    count = math.prod(map(len, fields.values()))
    if count > MAX_POINTS:
        raise InputError(f"{count:,} points are too many for one sweep. Give at most {MAX_POINTS}.")
    pairs = []
    for chosen in itertools.product(*(values.items() for values in fields.values())):
        shown, values = zip(*chosen, strict=True)
        pairs.append((dict(zip(fields, shown, strict=True)), dict(zip(fields, values, strict=True))))
    return pairs


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
        most = min(model.num_heads, cluster.num_chips)
        sizes = [size for size in divisors(cluster.num_chips) if size <= most and model.num_kv_heads % size == 0]
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
    wanted = parse_count(size, what="size")
    if not SMALLEST <= wanted <= LARGEST:
        raise InputError(f"size {size} is out of range. Give 500M to 100T parameters, such as 7B.")
    tied = wanted < TIED_BELOW
    candidates = []
    for width in (*range(1024, 8192, 1024), *range(8192, 2**18, 2048)):
        of_layer = width * (2 * width + 2 * KV_HEADS * HEAD_DIM + 3 * FF_OVER_WIDTH * width + 2)
        layers = (wanted - (2 - tied) * VOCAB_SIZE * width) / of_layer
        layers = round(layers) if layers < 16 else 4 * round(layers / 4)
        if layers >= 1:
            # a model that is twice too wide is as far off as one that is twice too deep
            ratio = width / layers / WIDTH_OVER_LAYERS
            candidates.append((max(ratio, 1 / ratio), width, layers))
    _, width, layers = min(candidates)
    return Model(
        name=f"llama-{size}",
        family="llama",
        num_layers=layers,
        d_model=width,
        d_ff=round(FF_OVER_WIDTH * width),
        num_heads=width // HEAD_DIM,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        vocab_size=VOCAB_SIZE,
        tied_embeddings=tied,
        max_positions=131_072,
        rope_theta=5e5,
    )


def describe(model: Model) -> str:
    """Returns ``"llama-7B: 7.16 B parameters, 28 layers of width 4,096"``; "" for a model that is not of this kind."""
    if not model.name.startswith("llama-"):
        return ""
    size = format_params(num_params(model))
    return f"{model.name}: {size} parameters, {model.num_layers} layers of width {model.d_model:,}"


# -- clusters -------------------------------------------------------------------------------------------


def sweep_clusters(text: str) -> tuple[Cluster, ...]:
    """Returns clusters of ``"h100:8x4,8x8"`` or ``"h100:8x1..8x512"``, fewest chips first.

    A range doubles one size at a time: 8x1, 8x2, ... 8x512, and the shortest of a torus, the last of several: 4x4x4,
    4x4x8, 4x8x8, ... 16x16x16. Raises InputError for a range that is none, and for more than 64 clusters.
    """
    clusters: list[Cluster] = []
    chip = ""
    for part in _listed(text):
        match = _RANGE.fullmatch(part)
        ends = match.groups() if match else (part, part)
        chip = ends[0].rpartition(":")[0].rpartition("*")[2].strip() or chip
        first, last = (_named(end, chip) for end in ends)
        clusters += _between(first, last) if match else [first]
    if len(clusters) > MAX_VALUES:
        raise InputError(f"{text} is {len(clusters)} clusters. Give at most {MAX_VALUES}.")
    return tuple(sorted(clusters, key=lambda cluster: cluster.num_chips))


def require_links(text: str, clusters: Sequence[Cluster]) -> None:
    """Raises InputError if every cluster is a single chip."""
    if all(cluster.num_chips == 1 for cluster in clusters):
        raise InputError(f"{text} is one chip: there is nothing to send. Give a larger cluster.")


def _named(text: str, chip: str) -> Cluster:
    """Returns the cluster of a text that may leave the chip out: ``"8x4"``."""
    text = text.strip()
    return parse_cluster(f"{chip}:{text}" if text[:1].isdigit() and ":" not in text else text)


def _between(first: Cluster, last: Cluster) -> list[Cluster]:
    alike = (first.chip.name, first.num_slices, len(first.shape)) == (last.chip.name, last.num_slices, len(last.shape))
    if not alike or any(size > most for size, most in zip(first.shape, last.shape, strict=True)):
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
    sizes, clusters = list(shape), []
    while tuple(sizes) != last.shape:
        short = [i for i, most in enumerate(last.shape) if sizes[i] < most]
        number = min(short, key=lambda i: (sizes[i], -i)) if last.kind == "torus" else short[0]
        sizes[number] = min(2 * sizes[number], last.shape[number])
        clusters.append(make_cluster(last.chip, tuple(sizes), num_slices=num_slices, levels=last.levels))
    return clusters
