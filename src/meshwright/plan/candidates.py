"""Candidates of a search as NumPy arrays (meshes, batches and microbatches that divide evenly); parts of a cluster."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from meshwright.algebra.notation import product
from meshwright.algebra.transformer import stage_names
from meshwright.core.dims import ISLAND_AXES
from meshwright.cost.arrays import map_figures, select
from meshwright.cost.memory.chip import total_bytes
from meshwright.cost.memory.state import memory_parts
from meshwright.cost.network.placement import factorings
from meshwright.cost.pipeline import PipelineCost
from meshwright.cost.work.slots import SlotSizes
from meshwright.plan.legal import DEVICES_RULE, divisors, few_idle_places, legal_axis_sizes
from meshwright.plan.rules import StrategySizes, mask
from meshwright.plan.space import Pattern, Space
from meshwright.spec.cluster import Cluster
from meshwright.spec.strategy import BATCH_AXES, RERUN_POLICIES

LEAN_REMATS = ("block", "sqrt", "full", *RERUN_POLICIES)
"""Remat policies that keep the fewest bytes for the backward pass: all others also keep results inside each layer."""


class Candidates(msgspec.Struct, frozen=True, kw_only=True):
    """Whole numbers, one entry per candidate: sizes of mesh axes, sequences of the batch, microbatches.

    ``number`` is the index of the mesh in the search's list, ``laid`` the index of its placement, 0 before it has one.
    """

    mesh: dict[str, np.ndarray]
    batch_seqs: np.ndarray
    microbatches: np.ndarray
    laid: np.ndarray
    number: np.ndarray

    def __len__(self) -> int:
        return len(self.batch_seqs)

    @property
    def batch_shards(self) -> np.ndarray:
        """Devices over which the sequences of the batch are split."""
        return np.asarray(product(self.mesh[axis] for axis in BATCH_AXES))


def candidates_on_chips(space: Space, batch_seqs: int, *, num_chips: int, reach: float = 0.0) -> Candidates:
    """Returns every mesh of exactly ``num_chips`` whose sizes divide in at least one pattern, with one microbatch.

    With ``reach`` each mesh comes twice, with the nearest batches at or below and above ``batch_seqs`` that its data
    shards divide; batches that differ from ``batch_seqs`` by more than the share ``reach`` are left out.
    """
    # with B = num_chips, a multiple of every axis, the batch rules out no size
    dims = space.dims(num_chips if reach else batch_seqs)
    axis_options = [sorted(set(divisors(num_chips)) & set(axis_sizes(space, axis, dims))) for axis in ISLAND_AXES]
    meshes = np.array(list(factorings(num_chips, axis_options)), dtype=np.int64).reshape(-1, len(ISLAND_AXES))
    rows = _with_batch(meshes, batch_seqs)
    if reach:
        batch_unit = rows.batch_shards * (space.num_microbatches or 1)
        neighbours = [_with_batch(meshes, batch_unit * (batch_seqs // batch_unit + extra)) for extra in (0, 1)]
        rows = map_figures(lambda *columns: np.concatenate(columns), *neighbours)
        rows = select(rows, (rows.batch_seqs > 0) & (np.abs(rows.batch_seqs - batch_seqs) <= reach * batch_seqs))
    rows = select(rows, _legal_somewhere(space, rows, num_chips))
    return msgspec.structs.replace(rows, number=np.arange(len(rows)))


def candidates_on_any_chips(space: Space, batch_seqs: int) -> Candidates:
    """Returns every mesh of any number of chips whose sizes divide in at least one pattern, with one microbatch."""
    options_of_axes = [axis_sizes(space, axis, space.dims(batch_seqs)) for axis in ISLAND_AXES]
    grid = np.meshgrid(*(np.array(axis_options, dtype=np.int64) for axis_options in options_of_axes), indexing="ij")
    rows = _with_batch(_evenly_split(space, np.stack([axis.ravel() for axis in grid], axis=1), batch_seqs), batch_seqs)
    return select(rows, _legal_somewhere(space, rows, None))


def _evenly_split(space: Space, meshes: np.ndarray, batch_seqs: int) -> np.ndarray:
    """Selects the meshes that divide every dim as all patterns split it; checks splits over the most axes first."""
    dims = space.dims(batch_seqs)
    shared_splits = set.intersection(*(set(pattern.splits) for pattern in space.patterns))
    for dim, axes in sorted(shared_splits, key=lambda split: (-len(split[1]), split)):
        num_parts = product(meshes[:, ISLAND_AXES.index(axis)] for axis in axes)
        meshes = meshes[dims[dim] % num_parts == 0]
    return meshes


def axis_sizes(space: Space, axis: str, dims: Mapping[str, int]) -> tuple[int, ...]:
    """Returns the sizes to try for one mesh axis: only its fixed size; only 1 if it is not searched; else all that
    divide the experts or the dims that the axis splits in some pattern; for pipeline `stage_counts`."""
    if axis in space.fixed:
        return (space.fixed[axis],)
    if axis == "pipeline":
        num_layers = space.patterns[0].derived.num_layers
        return stage_counts(num_layers) if axis in space.axes else (1,)
    if axis not in space.axes or (axis == "expert" and not space.setting.model.num_experts):
        return (1,)
    if axis == "expert":
        return divisors(space.setting.model.num_experts)
    sizes_by_pattern = (legal_axis_sizes(pattern.splits, axis, dims) for pattern in space.patterns)
    return tuple(sorted({size for sizes in sizes_by_pattern for size in sizes}))


def stage_counts(num_layers: int) -> tuple[int, ...]:
    """Returns the numbers of stages up to ``num_layers`` that leave at most `MAX_IDLE_SHARE` of the layers as gaps."""
    return tuple(num_stages for num_stages in range(1, num_layers + 1) if few_idle_places(num_layers, num_stages))


def _with_batch(meshes: np.ndarray, batch_seqs: Any) -> Candidates:
    num_meshes = len(meshes)
    return Candidates(
        mesh={axis: meshes[:, axis_index] for axis_index, axis in enumerate(ISLAND_AXES)},
        batch_seqs=np.broadcast_to(np.asarray(batch_seqs, dtype=np.int64), num_meshes).copy(),
        microbatches=np.ones(num_meshes, dtype=np.int64),
        laid=np.zeros(num_meshes, dtype=np.intp),
        number=np.zeros(num_meshes, dtype=np.intp),
    )


def _legal_somewhere(space: Space, rows: Candidates, num_chips: int | None) -> np.ndarray:
    """Returns a Boolean array: True for candidates whose sizes divide in at least one pattern."""
    # policies of remat split nothing: one pattern stands for all that split alike
    by_split = {(pattern.splits, pattern.needs, pattern.tensor_split): pattern for pattern in space.patterns}
    is_legal = [legal_in(space, pattern, rows, num_chips=num_chips) for pattern in by_split.values()]
    return np.asarray(np.logical_or.reduce(is_legal))


def legal_in(
    space: Space, pattern: Pattern, found: Candidates, *, num_chips: int | None = None, chunks: Any = 1
) -> np.ndarray:
    """Returns a Boolean array: True for candidates whose sizes divide in ``pattern`` and for which it differs from
    earlier patterns. Does not check schedules; checks the number of chips only if it is given."""
    facts = StrategySizes(
        model=space.setting.model.name,
        cluster="",
        num_chips=num_chips or 0,
        mesh=found.mesh,
        dims=space.dims(found.batch_seqs),
        num_microbatches=found.microbatches if space.num_microbatches is None else space.num_microbatches,
        chunks=chunks,
    )
    rules = pattern.rules if num_chips is None else (*pattern.rules, DEVICES_RULE)
    is_legal = np.broadcast_to(mask(rules, facts), len(found)).copy()
    if pattern.tensor_split is not None:
        is_legal &= (found.mesh["tensor"] > 1) == pattern.tensor_split
    if pattern.repeats:
        is_legal &= math.gcd(facts.dims["K"], facts.dims.get("Kf", 0)) % facts.devices(pattern.repeats) != 0
    for axes in pattern.needs:
        is_legal &= np.logical_or.reduce([found.mesh[axis] > 1 for axis in axes])
    return is_legal


def with_microbatches(space: Space, found: Candidates, *, most: int | None = None) -> Candidates:
    """Returns every candidate once for each number of microbatches that divides the sequences of a data shard.

    ``most`` limits how many numbers are tried: 1, the sequences of a shard, and some in between. If the space fixes the
    number of microbatches, returns every candidate once with that number."""
    if space.num_microbatches is not None:
        return msgspec.structs.replace(found, microbatches=np.full(len(found), space.num_microbatches, dtype=np.int64))
    local_seqs = (found.batch_seqs // found.batch_shards).tolist()
    counts_by_seqs = {num_seqs: _some(divisors(num_seqs), most) for num_seqs in set(local_seqs)}
    num_counts = [len(counts_by_seqs[num_seqs]) for num_seqs in local_seqs]
    counts = np.array([count for num_seqs in local_seqs for count in counts_by_seqs[num_seqs]], dtype=np.int64)
    return msgspec.structs.replace(select(found, np.repeat(np.arange(len(found)), num_counts)), microbatches=counts)


def _some(counts: Sequence[int], max_counts: int | None) -> Sequence[int]:
    """Returns at most ``max_counts`` evenly spread items: the first and, from ``max_counts`` = 2 on, the last."""
    if max_counts is None or len(counts) <= max_counts:
        return counts
    return [counts[round(position * (len(counts) - 1) / max(max_counts - 1, 1))] for position in range(max_counts)]


def candidate_sizes(space: Space, found: Candidates) -> SlotSizes:
    """Returns the sizes of a device's arrays, for one microbatch of every candidate."""
    return space.setting.sizes(
        space.template,
        mesh={axis: sizes.astype(float) for axis, sizes in found.mesh.items()},
        microbatch_seqs=found.batch_seqs / found.microbatches,
    )


def candidate_pipeline(space: Space, found: Candidates, *, schedule: str = "1f1b", chunks: Any = 1) -> PipelineCost:
    """Returns what the cost model needs of a pipeline under one schedule, with an entry per candidate."""
    return PipelineCost(
        schedule=schedule,
        stages=found.mesh["pipeline"],
        chunks=chunks,
        microbatches=found.microbatches,
        in_lockstep=space.setting.assumptions.traits.is_compiled,
        names=stage_names(space.setting.model),
        sums_last=space.template.gradient_sync != "overlapped",
    )


def parts_of(cluster: Cluster, num_chips: int) -> tuple[Cluster, ...]:
    """Returns the clusters of exactly ``num_chips`` inside a cluster: sub-tori, fewer nodes, fewer slices.

    Clusters of fewer slices come first, then those with more closed rings, then those with a shorter longest axis.
    """
    ranked_parts = []
    for num_slices in range(1, cluster.num_slices + 1):
        if num_chips % num_slices:
            continue
        sizes = divisors(num_chips // num_slices)
        for shape in factorings(num_chips // num_slices, [[n for n in sizes if n <= limit] for limit in cluster.shape]):
            part = cluster.part(shape, num_slices=num_slices)
            ranked_parts.append((num_slices, -sum(part.wraps), max(shape), shape, part))
    return tuple(part for *_, part in sorted(ranked_parts, key=lambda row: row[:4]))


def _leanest(patterns: Sequence[Pattern]) -> Sequence[Pattern]:
    """Returns the patterns that can need the least memory: without ``needs`` and with a policy of `LEAN_REMATS`. Drops
    a condition that no pattern meets."""
    split_patterns = [pattern for pattern in patterns if not pattern.needs] or list(patterns)
    lean_patterns = [pattern for pattern in split_patterns if pattern.strategy.remat in LEAN_REMATS]
    return lean_patterns or split_patterns


def _shards_what_replicas_split(pattern: Pattern) -> bool:
    """True if ``fsdp`` splits every dim that ``data`` splits: then fsdp in place of data needs no more memory."""
    axes_of_all_dims = [axes for role in pattern.strategy.assignment.values() for axes in role.values()]
    return all("fsdp" in axes for axes in axes_of_all_dims if "data" in axes)


def _could_shard(candidates: Candidates) -> np.ndarray:
    """True for candidates whose replicas could shard the weights: a mesh with all of ``data`` in ``fsdp`` exists."""
    sharded_mesh = candidates.mesh | {"fsdp": candidates.mesh["data"] * candidates.mesh["fsdp"]}
    ones = np.ones_like(sharded_mesh["data"])
    meshes, sharded_meshes = (
        list(zip(*(column_by_axis[axis].tolist() for axis in ISLAND_AXES), strict=True))
        for column_by_axis in (candidates.mesh, sharded_mesh | {"data": ones})
    )
    known_meshes = set(meshes)
    return np.array([mesh in known_meshes for mesh in sharded_meshes], dtype=bool) & (candidates.mesh["data"] > 1)


def memory_of_any_mesh(space: Space, batch: int) -> Mapping[int, float]:
    """Maps numbers of chips to the least bytes per chip of any strategy whose sizes divide, stages under 1F1B."""
    meshes = candidates_on_any_chips(space, batch)
    if all(map(_shards_what_replicas_split, space.patterns)):
        meshes = select(meshes, ~_could_shard(meshes))
    # memory is least with one microbatch or with the most: above one, smaller microbatches keep less
    candidates = with_microbatches(space, meshes, most=2)
    needed_bytes = np.full(len(candidates), np.inf)
    for pattern in _leanest(space.with_reruns(RERUN_POLICIES[-1:]).patterns):
        indices = np.flatnonzero(legal_in(space, pattern, candidates))
        rows = select(candidates, indices)
        memory = memory_parts(pattern.derived, candidate_sizes(space, rows))
        pipeline = candidate_pipeline(space, rows)
        for offload in space.offloads:
            bytes_by_item = memory.items(pipeline, offload)
            needed_bytes[indices] = np.minimum(needed_bytes[indices], total_bytes(bytes_by_item))
    chip_counts, count_indices = np.unique(product(candidates.mesh.values()), return_inverse=True)
    min_bytes = np.full(len(chip_counts), np.inf)
    np.minimum.at(min_bytes, count_indices, needed_bytes)
    return {int(chips): float(need) for chips, need in zip(chip_counts, min_bytes, strict=True) if np.isfinite(need)}
