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
        self.ends: list[int] = []
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
        index = fastest_and_leanest(variant.seconds, variant.need)
        self.kept.append(select(variant, index))
        self.ends.append((self.ends[-1] if self.ends else 0) + len(index))

    def at(self, index: int) -> Variant:
        """One candidate as a variant of one row."""
        which = int(np.searchsorted(self.ends, index, side="right"))
        start = self.ends[which - 1] if which else 0
        return select(self.kept[which], np.array([index - start]))

    def columns(self) -> tuple[np.ndarray, np.ndarray]:
        """Seconds and bytes of all kept candidates."""
        if not self.kept:
            return np.zeros(0), np.zeros(0)
        return np.concatenate([v.seconds for v in self.kept]), np.concatenate([v.need for v in self.kept])

    def order(self) -> np.ndarray:
        """Fastest per token first. Among equally fast ones: fewer stages, nothing offloaded, fewer microbatches, less
        remat, what is split over fsdp (ZeRO-3 first), fsdp rather than data, less context.
        """
        seconds, _ = self.columns()
        if not len(seconds):
            return np.zeros(0, dtype=np.intp)
        level = np.round(np.log(seconds / seconds.min()) / TIE)

        keys: tuple[Callable[[Variant], Any], ...] = (
            lambda v: v.rows.mesh["context"],
            lambda v: v.rows.mesh["data"],
            lambda v: v.pattern,
            lambda v: v.rank,
            lambda v: v.rows.microbatches,
            lambda v: len(v.offload),
            lambda v: v.rows.mesh["pipeline"],
        )
        columns = (
            np.concatenate([np.broadcast_to(np.asarray(key(v)), len(v.rows)) for v in self.kept]) for key in keys
        )
        return np.lexsort((seconds, *columns, level))

    def meshes(self) -> np.ndarray:
        """The mesh of every kept candidate, one row each."""
        columns = [np.concatenate([v.rows.mesh[axis] for v in self.kept]) for axis in MESH_AXES]
        return np.column_stack(columns)

    def frontier(self) -> list[int]:
        """Indices of candidates unbeaten in seconds and bytes, fastest first."""
        seconds, need = self.columns()
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
    meshes, (seconds, _) = best.meshes(), best.columns()
    axis = {name: number for number, name in enumerate(MESH_AXES)}
    listed: set[tuple[int, ...]] = set()
    turns: list[list[int]] = []
    depth: dict[tuple[int, ...], int] = {}
    for number in order.tolist():
        mesh = tuple(meshes[number].tolist())
        if mesh in listed:
            continue
        listed.add(mesh)
        key = (
            mesh[axis["pipeline"]],
            mesh[axis["data"]] * mesh[axis["fsdp"]] * mesh[axis["context"]],
            mesh[axis["expert"]],
            mesh[axis["tensor"]],
        )
        turn = depth.get(key, 0)
        depth[key] = turn + 1
        if turn == len(turns):
            turns.append([])
        turns[turn].append(number)
        if len(turns[0]) >= top:
            break
    chosen = [number for turn in turns for number in turn][:top]
    return sorted(chosen, key=lambda number: float(seconds[number]))
