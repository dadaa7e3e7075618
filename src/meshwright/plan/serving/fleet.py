"""The engines that a cluster can be divided into: parts of it, and the mesh and placement of each."""

import itertools
import math
from collections.abc import Iterator, Mapping

import msgspec
import numpy as np

from meshwright.core.dims import ISLAND_AXES
from meshwright.core.errors import CannotRunError, InputError, nearest
from meshwright.cost.network.links import physical_links
from meshwright.cost.network.placement import Placement, place_axes
from meshwright.plan.candidates import parts_of
from meshwright.plan.legal import divisors
from meshwright.spec.cluster import Cluster
from meshwright.spec.model import Model
from meshwright.spec.strategy import LAYOUTS, Strategy, make_mesh, short_mesh

ENGINE_AXES = ("expert", "context", "tensor")
"""Mesh axes of an engine: ``tensor`` splits heads and widths; ``expert`` splits experts, and the sequences too (experts
with data-parallel attention). Weights are split over nothing else: each step would gather them. The layout says what
``context`` splits."""

OTHER_AXES: tuple[str, ...] = tuple(axis for axis in ISLAND_AXES if axis not in ENGINE_AXES)

CONTEXTS = (1, 2, 4, 8, 16, 32)
"""Sizes of ``context`` that are tried."""

PREFILL_LAYOUTS = ("prompts", "gathered")
"""Layouts whose engines only prefill if ``context`` has several devices."""

TORUS_LAYOUTS = ("positions", "widths")
"""Layouts that are not tried on switches, where their further collectives take longer than they save."""

MAX_PROMPT_PARTS = 8
"""Largest size of ``context`` that is tried where it splits prompts."""

MAX_ENGINE_CHIPS = 1024
"""Most chips of one engine that are tried."""

PARTS_TRIED = 2
"""Number of torus shapes (with the most closed rings) tried for a number of chips, and of placements for a mesh."""


def engine_strategy(mesh: dict[str, int], precision: str = "", layout: str = "prompts") -> Strategy:
    """Returns the strategy of an engine from its mesh, its matmul dtype ("": the state's) and its layout."""
    return Strategy(mesh=make_mesh(mesh), assignment=LAYOUTS[layout], precision=precision)  # type: ignore[arg-type]


def layout_of(strategy: Strategy) -> str:
    """Returns the name of an engine's layout; "prompts" if its assignment is not in `LAYOUTS`."""
    return next((name for name, rules in LAYOUTS.items() if rules == strategy.assignment), "prompts")


ENGINE_SYMBOLS = {
    "tp": "tensor parallelism",
    "ep": "expert parallelism, which also splits the sequences",
    "cp": "context, which splits prompts",
    "kvb": "context that splits weights as tensor does, and the cache over sequences",
    "kvs": "context that splits weights as tensor does, and the cache over positions",
    "wd": "context that splits the other dim of weights (2-D weight-stationary)",
    "fsdp": "context whose weights prefill gathers",
}
"""Prefix of a size in `engine_words` -> the mesh axis."""


def engine_words(strategy: Strategy) -> str:
    """Returns the sizes of an engine's mesh axes, such as ``"ep8 tp4"``, with the prefixes of `ENGINE_SYMBOLS`."""
    label = {"sequences": "kvb", "positions": "kvs", "widths": "wd", "gathered": "fsdp"}.get(layout_of(strategy), "cp")
    return short_mesh(strategy.mesh).replace("cp", label)


class Fleet(msgspec.Struct, frozen=True, kw_only=True):
    """Every engine that is tried, an entry each: sizes of mesh axes, layout, part of the cluster and placement."""

    cluster: Cluster
    mesh: dict[str, np.ndarray]
    layout: np.ndarray
    parts: tuple[Cluster, ...]
    placements: tuple[Placement, ...]

    def __len__(self) -> int:
        return len(self.parts)

    @property
    def num_chips(self) -> np.ndarray:
        """Chips of each engine."""
        return np.array([part.num_chips for part in self.parts])

    @property
    def batch_shards(self) -> np.ndarray:
        """Devices of each engine over which the sequences of a batch are split."""
        return self.mesh["expert"] * np.where(np.isin(self.layout, ("sequences", "widths")), self.mesh["context"], 1)

    @property
    def decodes(self) -> np.ndarray:
        """True for engines that can decode. Engines that split prompts over ``context`` only prefill."""
        return np.asarray(~np.isin(self.layout, PREFILL_LAYOUTS) | (self.mesh["context"] == 1))

    def strategy(self, number: int, precision: str) -> Strategy:
        """Returns the strategy of engine ``number``, with its placement."""
        size_by_axis = {axis: int(self.mesh[axis][number]) for axis in ENGINE_AXES}
        strategy = engine_strategy(size_by_axis, precision, self.layout[number])
        return msgspec.structs.replace(strategy, placement=self.placements[number].describe())


def fleet_of(model: Model, cluster: Cluster, axes: Mapping[str, int] | None = None) -> Fleet:
    """Returns the engines whose numbers of chips divide the cluster, and whose sizes divide the heads and experts.

    ``axes`` fixes sizes of mesh axes. Raises InputError for an axis that is not in `ENGINE_AXES`, CannotRunError if no
    engine has these sizes.
    """
    fixed_sizes = axes or {}
    for axis in fixed_sizes:
        if axis not in ENGINE_AXES:
            raise InputError(
                f"mesh axis {axis!r} splits no engine of a service in this version.{nearest(axis, ENGINE_AXES)} "
                f"Use {' or '.join(ENGINE_AXES)}."
            )
    engines = [
        (part, placement, layout)
        for part, placement, layout in _engines(model, cluster)
        if all(placement.mesh[axis] == size for axis, size in fixed_sizes.items())
    ]
    if not engines:
        sizes_text = " x ".join(f"{axis}={size}" for axis, size in fixed_sizes.items())
        raise CannotRunError(
            f"no engine of {model.name} on {cluster.short_name} has {sizes_text}: tensor must divide the "
            f"{model.num_heads} heads, expert the {model.num_experts} experts (without any it is 1), and the engine "
            f"the {cluster.num_chips} chips."
        )
    parts, placements, layouts = zip(*engines, strict=True)
    meshes = [placement.mesh for placement in placements]
    return Fleet(
        cluster=cluster,
        mesh={axis: np.array([mesh[axis] for mesh in meshes], dtype=np.int64) for axis in ISLAND_AXES},
        layout=np.array(layouts),
        parts=parts,
        placements=placements,
    )


def _engines(model: Model, cluster: Cluster) -> Iterator[tuple[Cluster, Placement, str]]:
    for chips in divisors(cluster.num_chips):
        meshes = [pair for pair in _meshes(model, chips) if cluster.kind != "switched" or pair[1] not in TORUS_LAYOUTS]
        if chips <= MAX_ENGINE_CHIPS and meshes:
            for part in engine_parts(cluster, chips):
                for mesh, layout in meshes:
                    for placement in place_axes(part, make_mesh(mesh))[:PARTS_TRIED]:
                        yield part, _padded(placement, cluster), layout


def _meshes(model: Model, num_chips: int) -> Iterator[tuple[dict[str, int], str]]:
    """Yields the engine meshes of ``num_chips`` chips that divide a model's heads and experts, each with a layout."""
    expert_sizes = divisors(math.gcd(num_chips, model.num_experts)) if model.num_experts else (1,)
    for expert, layout, context in itertools.product(expert_sizes, LAYOUTS, CONTEXTS):
        tensor, remainder = divmod(num_chips // expert, context)
        splits_prompts = layout in PREFILL_LAYOUTS
        if remainder or (splits_prompts and context > MAX_PROMPT_PARTS) or (layout != "prompts" and context == 1):
            continue
        if layout in ("sequences", "positions"):
            # only where no more heads of caches can be split; a latent has none
            is_legal = tensor == (1 if model.latent_attention else model.common_kv_heads)
            is_legal = is_legal and model.num_heads % (tensor * context) == 0
        else:
            is_legal = model.num_heads % tensor == 0
        # routers, of several streams too, need whole tokens, and only RMS norms sum over devices
        if layout == "widths":
            has_router = model.num_experts > 0 or model.num_streams > 0
            is_legal = is_legal and not has_router and model.norm == "rms_norm" and tensor >= context
        # gathering all experts for one layer never pays
        is_legal = is_legal and not (layout == "gathered" and model.num_experts)
        if is_legal:
            yield {"expert": expert, "context": context, "tensor": tensor}, layout


def _padded(placement: Placement, cluster: Cluster) -> Placement:
    """Returns the placement with the cluster's other links added, unused: a part of one slice uses no network."""
    other_links = physical_links(cluster)[len(placement.links) :]
    unused_links = (msgspec.structs.replace(link, size=1, parts=()) for link in other_links)
    return msgspec.structs.replace(placement, links=(*placement.links, *unused_links))


def engine_parts(cluster: Cluster, num_chips: int) -> tuple[Cluster, ...]:
    """Returns the parts of a cluster to try for an engine: on switches only the one that fills NVLink domains first."""
    parts = parts_of(cluster, num_chips)
    if cluster.kind != "switched" or not parts:
        return parts[:PARTS_TRIED]
    return (max(parts, key=lambda part: part.shape),)


def transfer_bytes_per_s(cluster: Cluster) -> float:
    """Returns the bytes per second that one chip sends to a chip of another engine.

    On switches it is the rate of the outermost level that joins several parts, on a torus of one link or, with several
    slices, of their network; infinite on one chip. No other traffic is assumed to use it.
    """
    links = [link for link in physical_links(cluster) if link.size > 1 and link.level != "host"]
    return links[-1].bytes_per_s if links else np.inf
