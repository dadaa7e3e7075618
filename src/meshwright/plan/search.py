"""Every legal strategy of a job on a cluster, priced at once and ranked.

The steps are derived once per remat policy with sizes as symbols. Meshes, batches, microbatches and placements are
then arrays with one entry per candidate.
"""

from collections.abc import Sequence

import msgspec
import numpy as np

from meshwright.core.dims import MESH_AXES
from meshwright.cost.memory import memory_limit, total_bytes, training_memory
from meshwright.cost.network import Placement, place_axes
from meshwright.cost.step_costs import collective_groups
from meshwright.cost.step_rates import matmul_dtype, step_rates
from meshwright.cost.train_step import Estimate, estimate_many
from meshwright.plan.candidates import Remat, Rows, Space, candidate_sizes, rows_on_chips, with_microbatches
from meshwright.spec.cluster import Cluster
from meshwright.spec.strategy import Strategy

TIE = 1e-3
"""Candidates whose times differ by less than this share count as equally fast."""


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """One strategy that runs, on the chips it uses, with its prediction."""

    strategy: Strategy
    cluster: Cluster
    batch_seqs: int
    estimate: Estimate

    @property
    def split(self) -> tuple[int, int]:
        """(data x fsdp x context, tensor): what the book's analysis tells apart."""
        mesh = self.strategy.mesh
        return mesh["data"] * mesh["fsdp"] * mesh["context"], mesh["tensor"]


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The best strategies, best first; ``least_bytes`` is the smallest memory per chip of any legal one.

    ``num_meshes`` counts meshes whose sizes divide. Nothing fits when there are some and ``found`` is empty.
    """

    found: tuple[Found, ...]
    num_meshes: int
    num_candidates: int
    least_bytes: float


def search(space: Space, cluster: Cluster, batch_seqs: int, *, reach: float = 0.0, top: int = 5) -> Outcome:
    """The fastest strategies per token on all chips of a cluster, for a batch or, with ``reach``, batches near it.

    At most ``top`` meshes, taken in turns from each (data x fsdp x context, tensor) so that they differ.
    """
    derived = space.derived
    rows = rows_on_chips(space, batch_seqs, num_chips=cluster.num_chips, reach=reach)
    if not len(rows):
        return Outcome(found=(), num_meshes=0, num_candidates=0, least_bytes=np.inf)
    num_meshes = len(rows)
    rows, counts = with_microbatches(space, rows)
    placements, ends = _placements(cluster, rows)
    if not placements:
        return Outcome(found=(), num_meshes=num_meshes, num_candidates=0, least_bytes=np.inf)
    limit = memory_limit(cluster, space.calibration)
    groups = dict.fromkeys(group for steps in derived.values() for group in collective_groups(steps))
    rates = step_rates(
        cluster, placements, groups, dtype=matmul_dtype(space.template.state), calibration=space.calibration
    )
    parts, least, priced = [], np.inf, 0
    for rank, (remat, steps) in enumerate(derived.items()):
        memory = training_memory(steps, candidate_sizes(space, cluster, rows, counts), num_microbatches=counts)
        need = total_bytes(memory)
        least = min(least, float(np.min(need)))
        which, laid = _expand(np.flatnonzero(need <= limit), ends)
        if not len(which):
            continue
        priced += len(which)
        estimate = estimate_many(
            space.model,
            steps,
            candidate_sizes(space, cluster, rows[which], counts[which]),
            rates.take(laid),
            batch_seqs=rows[which, 4].astype(float),
            seq_len=space.seq_len,
            num_microbatches=counts[which],
            memory={name: np.broadcast_to(size, len(rows))[which] for name, size in memory.items()},
        )
        parts.append(
            _Part(remat=remat, rank=rank, rows=rows[which], counts=counts[which], laid=laid, estimate=estimate)
        )
    found = tuple(_found(space, cluster, placements, part, index) for part, index in _ranked(parts, top))
    return Outcome(found=found, num_meshes=num_meshes, num_candidates=priced, least_bytes=least)


class _Part(msgspec.Struct, frozen=True, kw_only=True):
    """The candidates of one remat policy: ``laid`` are numbers of placements."""

    remat: Remat
    rank: int
    rows: Rows
    counts: np.ndarray
    laid: np.ndarray
    estimate: Estimate


def _placements(cluster: Cluster, rows: Rows) -> tuple[list[Placement], np.ndarray]:
    """Candidate placements of every row's mesh, and (first, last) of them for each row."""
    placements: list[Placement] = []
    spans: dict[tuple[int, ...], tuple[int, int]] = {}
    ends = np.empty((len(rows), 2), dtype=np.intp)
    for number, sizes in enumerate(map(tuple, rows[:, :4].tolist())):
        if sizes not in spans:
            laid = place_axes(cluster, dict(zip(MESH_AXES, sizes, strict=True)))
            spans[sizes] = (len(placements), len(placements) + len(laid))
            placements.extend(laid)
        ends[number] = spans[sizes]
    return placements, ends


def _expand(chosen: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Every chosen row once for each of its placements: numbers of rows, numbers of placements."""
    first, last = ends[chosen].T
    which = np.repeat(chosen, last - first)
    offset = np.arange(len(which)) - np.repeat(np.cumsum(last - first) - (last - first), last - first)
    return which, np.repeat(first, last - first) + offset


# -- ranking --------------------------------------------------------------------------------------------


def _ranked(parts: Sequence[_Part], top: int) -> list[tuple[_Part, int]]:
    """The chosen candidates, fastest per token first.

    Among equally fast ones: fewer microbatches, less remat, fsdp rather than data, less context.
    """
    if not parts:
        return []
    seconds = np.concatenate([part.estimate.step_s / part.rows[:, 4] for part in parts])
    owner = np.repeat(np.arange(len(parts)), [len(part.rows) for part in parts])
    index = np.concatenate([np.arange(len(part.rows)) for part in parts])
    rows = np.concatenate([part.rows for part in parts])
    counts = np.concatenate([part.counts for part in parts])
    remat = np.array([part.rank for part in parts])[owner]
    level = np.round(np.log(seconds / seconds.min()) / TIE)
    order = np.lexsort((seconds, rows[:, 2], rows[:, 0], remat, counts, level))
    chosen = _varied(order, rows, top)
    chosen.sort(key=lambda number: float(seconds[number]))
    return [(parts[owner[number]], int(index[number])) for number in chosen]


def _varied(order: np.ndarray, rows: Rows, top: int) -> list[int]:
    """The best of each (data x fsdp x context, tensor), then the second best mesh of each, and so on.

    A mesh is listed once, with its best remat and microbatches.
    """
    split = rows[:, 0] * rows[:, 1] * rows[:, 2]
    listed: set[tuple[int, ...]] = set()
    turns: list[list[int]] = []
    depth: dict[tuple[int, int], int] = {}
    for number in order.tolist():
        mesh = tuple(rows[number].tolist())
        if mesh in listed:
            continue
        listed.add(mesh)
        key = int(split[number]), mesh[3]
        turn = depth.get(key, 0)
        depth[key] = turn + 1
        if turn == len(turns):
            turns.append([])
        turns[turn].append(number)
    return [number for turn in turns for number in turn][:top]


def _found(space: Space, cluster: Cluster, placements: Sequence[Placement], part: _Part, index: int) -> Found:
    placement = placements[part.laid[index]]
    strategy = msgspec.structs.replace(
        space.template,
        mesh={axis: int(size) for axis, size in placement.mesh.items()},
        placement=placement.describe(),
        remat=part.remat,
        num_microbatches=int(part.counts[index]),
    )
    return Found(
        strategy=strategy,
        cluster=cluster,
        batch_seqs=int(part.rows[index, 4]),
        estimate=part.estimate.at(index),
    )
