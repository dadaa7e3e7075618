"""Ranks priced candidates: keeps the fastest and leanest of every variant, and chooses diverse ones to list."""

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from meshwright.core.dims import ISLAND_AXES
from meshwright.cost.arrays import select
from meshwright.plan.candidates import Candidates

TIE = 1e-3
"""Times or bytes that differ by less than this share count as equal."""

KEPT_PER_VARIANT = 512
"""Number of fastest candidates of each variant that are kept, besides the unbeaten ones."""


class Variant(msgspec.Struct, frozen=True, kw_only=True):
    """The candidates of one pattern, schedule and choice of offloading that fit in memory.

    ``seconds`` are per sequence of the batch, ``need`` are bytes per chip. ``pattern`` is the index of the pattern,
    ``rank`` the index of its remat policy. ``num_legal`` and ``least_bytes`` also count candidates that do not fit.
    ``missed`` is a lower bound on the seconds of those if they recompute more in order to fit.
    """

    pattern: int
    rank: int
    schedule: str
    offload: tuple[str, ...]
    rows: Candidates
    chunks: np.ndarray
    seconds: np.ndarray
    need: np.ndarray
    num_legal: int
    least_bytes: float
    missed: float = np.inf


class Best:
    """The fastest and leanest candidates of every variant, with counts of all candidates."""

    def __init__(self) -> None:
        self.kept: list[Variant] = []
        self.num_legal = self.num_ranked = 0
        self.least_bytes = self.missed = np.inf
        self.fits_without_stages = False

    def add(self, variant: Variant) -> None:
        """Counts a variant and keeps its best candidates."""
        self.num_legal += variant.num_legal
        self.num_ranked += len(variant.rows)
        self.least_bytes = min(self.least_bytes, variant.least_bytes)
        self.missed = min(self.missed, variant.missed)
        if not len(variant.rows):
            return
        self.fits_without_stages |= bool(np.any(variant.rows.mesh["pipeline"] == 1))
        self.kept.append(select(variant, fastest_and_leanest(variant.seconds, variant.need)))

    def at(self, index: int) -> Variant:
        """Returns candidate ``index`` of all kept ones as a variant of one row."""
        end_indices = np.cumsum([len(variant.rows) for variant in self.kept])
        variant_index = int(np.searchsorted(end_indices, index, side="right"))
        return select(self.kept[variant_index], np.array([index - end_indices[variant_index]]))

    def column(self, figure: Callable[[Variant], Any]) -> np.ndarray:
        """Returns an array with one entry for each kept candidate; ``figure`` gives the entries of a variant."""
        columns = [np.broadcast_to(np.asarray(figure(variant)), len(variant.rows)) for variant in self.kept]
        return np.concatenate(columns) if columns else np.zeros(0)

    @property
    def seconds(self) -> np.ndarray:
        """Seconds per sequence of all kept candidates."""
        return self.column(lambda variant: variant.seconds)

    def order(self) -> np.ndarray:
        """Returns the indices of all kept candidates, fastest per token first.

        Times that differ by less than `TIE` are ordered by fewer stages, then less offloading, fewer microbatches, less
        remat, earlier pattern (ZeRO-3 first), smaller data, smaller context.
        """
        seconds = self.seconds
        if not len(seconds):
            return np.zeros(0, dtype=np.intp)
        tie_levels = np.round(np.log(seconds / seconds.min()) / TIE)
        tie_keys: tuple[Callable[[Variant], Any], ...] = (
            lambda variant: variant.rows.mesh["context"],
            lambda variant: variant.rows.mesh["data"],
            lambda variant: variant.pattern,
            lambda variant: variant.rank,
            lambda variant: variant.rows.microbatches,
            lambda variant: len(variant.offload),
            lambda variant: variant.rows.mesh["pipeline"],
        )
        return np.lexsort((seconds, *map(self.column, tie_keys), tie_levels))

    def frontier(self) -> list[int]:
        """Returns the indices of kept candidates that no other beats in both seconds and bytes, fastest first."""
        return unbeaten(self.seconds, self.column(lambda variant: variant.need))


def unbeaten(seconds: np.ndarray, need: np.ndarray) -> list[int]:
    """Returns the indices, fastest first, of candidates that need less memory, by `TIE`, than every faster one."""
    order = np.lexsort((need, seconds))
    running_min = np.minimum.accumulate(need[order])
    # only a new minimum can be listed: the loop is short
    order = order[np.concatenate([np.ones(len(order[:1]), bool), running_min[1:] < running_min[:-1]])]
    indices, least_bytes = [], np.inf
    for index, need_bytes in zip(order.tolist(), need[order].tolist(), strict=True):
        if need_bytes < least_bytes * (1 - TIE):
            indices.append(index)
            least_bytes = need_bytes
    return indices


def fastest_and_leanest(seconds: np.ndarray, need: np.ndarray) -> np.ndarray:
    """Returns the indices of the `KEPT_PER_VARIANT` fastest candidates and of the `unbeaten` ones."""
    if len(seconds) <= KEPT_PER_VARIANT:
        return np.arange(len(seconds))
    fastest_indices = np.argpartition(seconds, KEPT_PER_VARIANT)[:KEPT_PER_VARIANT]
    return np.union1d(fastest_indices, unbeaten(seconds, need))


def diverse(order: np.ndarray, best: Best, top: int) -> list[int]:
    """Returns the indices of at most ``top`` candidates, sorted by time, from ``order``, which has the best first.

    Each has another mesh, with that mesh's best remat, schedule and microbatches. Meshes are grouped by (pipeline,
    data x fsdp x context, expert, tensor): the best mesh of every group is chosen first, then the second best, ...
    """
    if not len(order):
        return []
    meshes = {axis: np.concatenate([variant.rows.mesh[axis] for variant in best.kept]).tolist() for axis in ISLAND_AXES}
    listed_meshes: set[tuple[int, ...]] = set()
    indices_by_rank: list[list[int]] = []
    num_listed_by_group: dict[tuple[int, ...], int] = {}
    for index in order.tolist():
        mesh = {axis: sizes[index] for axis, sizes in meshes.items()}
        if tuple(mesh.values()) in listed_meshes:
            continue
        listed_meshes.add(tuple(mesh.values()))
        group = (mesh["pipeline"], mesh["data"] * mesh["fsdp"] * mesh["context"], mesh["expert"], mesh["tensor"])
        rank = num_listed_by_group.get(group, 0)
        num_listed_by_group[group] = rank + 1
        if rank == len(indices_by_rank):
            indices_by_rank.append([])
        indices_by_rank[rank].append(index)
        if len(indices_by_rank[0]) >= top:
            break
    chosen_indices = [index for indices in indices_by_rank for index in indices][:top]
    return sorted(chosen_indices, key=best.seconds.__getitem__)
