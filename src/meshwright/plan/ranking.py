"""Candidates priced, remembered and ranked: the fastest of every variant of every pattern, and a diverse choice."""

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from meshwright.core.dims import MESH_AXES
from meshwright.cost.arrays import select
from meshwright.plan.candidates import Candidates

TIE = 1e-3
"""Candidates whose times differ by less than this share count as equally fast."""

KEPT_PER_VARIANT = 512
"""Fastest candidates that are remembered of each variant of each pattern."""


class Variant(msgspec.Struct, frozen=True, kw_only=True):
    """All candidates of one pattern under one schedule and choice of offloading: seconds where they fit."""

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


class Best:
    """The fastest candidates of every variant, with counts of all."""

    def __init__(self) -> None:
        self.kept: list[Variant] = []
        self.num_legal = self.num_ranked = 0
        self.least_bytes = np.inf
        self.fits_without_stages = False

    def add(self, variant: Variant) -> None:
        self.num_legal += variant.num_legal
        self.num_ranked += len(variant.rows)
        self.least_bytes = min(self.least_bytes, variant.least_bytes)
        if not len(variant.rows):
            return
        self.fits_without_stages |= bool(np.any(variant.rows.mesh["pipeline"] == 1))
        self.kept.append(select(variant, fastest_and_leanest(variant.seconds, variant.need)))

    def at(self, index: int) -> Variant:
        """One candidate as a variant of one row."""
        ends = np.cumsum([len(variant.rows) for variant in self.kept])
        which = int(np.searchsorted(ends, index, side="right"))
        return select(self.kept[which], np.array([index - ends[which]]))

    def column(self, figure: Callable[[Variant], Any]) -> np.ndarray:
        """One figure of all kept candidates."""
        columns = [np.broadcast_to(np.asarray(figure(one)), len(one.rows)) for one in self.kept]
        return np.concatenate(columns) if columns else np.zeros(0)

    @property
    def seconds(self) -> np.ndarray:
        """Seconds per sequence of all kept candidates."""
        return self.column(lambda one: one.seconds)

    def order(self) -> np.ndarray:
        """Fastest per token first. Among equally fast ones: fewer stages, nothing offloaded, fewer microbatches, less
        remat, what is split over fsdp (ZeRO-3 first), fsdp rather than data, less context.
        """
        seconds = self.seconds
        if not len(seconds):
            return np.zeros(0, dtype=np.intp)
        level = np.round(np.log(seconds / seconds.min()) / TIE)
        keys: tuple[Callable[[Variant], Any], ...] = (
            lambda one: one.rows.mesh["context"],
            lambda one: one.rows.mesh["data"],
            lambda one: one.pattern,
            lambda one: one.rank,
            lambda one: one.rows.microbatches,
            lambda one: len(one.offload),
            lambda one: one.rows.mesh["pipeline"],
        )
        return np.lexsort((seconds, *map(self.column, keys), level))

    def frontier(self) -> list[int]:
        """Indices of candidates unbeaten in seconds and bytes, fastest first."""
        seconds, need = self.seconds, self.column(lambda one: one.need)
        found, least = [], np.inf
        for index in np.lexsort((need, seconds)).tolist():
            if need[index] < least * (1 - TIE):
                found.append(index)
                least = need[index]
        return found


def fastest_and_leanest(seconds: np.ndarray, need: np.ndarray) -> np.ndarray:
    """Indices of the fastest candidates, and of candidates unbeaten in seconds and bytes."""
    if len(seconds) <= KEPT_PER_VARIANT:
        return np.arange(len(seconds))
    fast = np.argpartition(seconds, KEPT_PER_VARIANT)[:KEPT_PER_VARIANT]
    order = np.argsort(seconds, kind="stable")
    lower = np.minimum.accumulate(need[order])
    front = order[np.concatenate([[True], need[order][1:] < lower[:-1] * (1 - TIE)])]
    return np.unique(np.concatenate([fast, front]))


def diverse(order: np.ndarray, best: Best, top: int) -> list[int]:
    """Returns the best mesh of each (data x fsdp x context, tensor), then each second best, and so on, fastest first.

    A mesh is listed once, with its best remat, schedule and microbatches.
    """
    if not len(order):
        return []
    meshes = {axis: np.concatenate([one.rows.mesh[axis] for one in best.kept]).tolist() for axis in MESH_AXES}
    listed: set[tuple[int, ...]] = set()
    turns: list[list[int]] = []
    depth: dict[tuple[int, ...], int] = {}
    for number in order.tolist():
        mesh = {axis: sizes[number] for axis, sizes in meshes.items()}
        if tuple(mesh.values()) in listed:
            continue
        listed.add(tuple(mesh.values()))
        key = (mesh["pipeline"], mesh["data"] * mesh["fsdp"] * mesh["context"], mesh["expert"], mesh["tensor"])
        turn = depth.get(key, 0)
        depth[key] = turn + 1
        if turn == len(turns):
            turns.append([])
        turns[turn].append(number)
        if len(turns[0]) >= top:
            break
    chosen = [number for turn in turns for number in turn][:top]
    return sorted(chosen, key=best.seconds.__getitem__)
