"""Prices every legal strategy of a job on a cluster at once, and ranks them.

The steps are derived once per pattern of axes with sizes as symbols. Meshes, batches, microbatches and placements
are then arrays with one entry per candidate; the times of a layer are priced once per pattern, and shared by every
schedule, number of chunks and choice of offloading.
"""

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from meshwright.algebra.schedules.registry import definition
from meshwright.core.dims import MESH_AXES
from meshwright.cost.arrays import as_python, select
from meshwright.cost.memory import memory_parts, total_bytes
from meshwright.cost.network.placement import Placement, place_axes
from meshwright.cost.offload import offloaded
from meshwright.cost.pass_times import BlockTimes
from meshwright.cost.pipeline import PipelineCost, schedule_fits
from meshwright.cost.train_step import PricedStep, predict
from meshwright.plan.candidates import (
    Candidates,
    candidate_pipeline,
    candidate_sizes,
    candidates_on_chips,
    legal_in,
    with_microbatches,
)
from meshwright.plan.legal import few_idle_places
from meshwright.plan.ranking import Best, Variant, diverse
from meshwright.plan.result import PlannedStrategy, planned
from meshwright.plan.space import Pattern, Space
from meshwright.spec.cluster import Cluster

CHUNK_LAYERS = (*range(1, 9), 10, 12, 14, 16, 20, 21, 24, 28, 32, 40, 48)
"""Numbers of layers of one chunk that are tried."""

KEPT_MESHES = 80
"""Maximum number of meshes that are priced in all forms: of more, the most promising."""

SCREENED_MICROBATCHES = 3
"""Numbers of microbatches with which a mesh is screened."""

SCREENED_REMATS = ("none", "selective", "full")
"""Policies of remat with which a mesh is screened, where they are among the choices."""

KEPT_PER_STAGES = 10
"""Meshes of each number of pipeline stages that are priced in all forms in any case."""


class SearchOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The best strategies, best first; ``least_bytes`` is the smallest memory per chip of any looked at.

    ``num_meshes`` counts meshes whose sizes divide, ``num_legal`` strategies whose sizes divide and that have a
    placement, ``num_candidates`` those of them that fit in memory and were ranked. Nothing fits when there are meshes
    and ``found`` is empty. ``frontier`` are the strategies that nothing beats in both step time and memory.
    ``fits_without_stages`` says whether any of those ranked has one pipeline stage.
    """

    found: tuple[PlannedStrategy, ...] = ()
    num_meshes: int
    num_legal: int = 0
    num_candidates: int = 0
    least_bytes: float = np.inf
    frontier: tuple[PlannedStrategy, ...] = ()
    fits_without_stages: bool = False


def search(
    space: Space,
    cluster: Cluster,
    batch_seqs: int,
    *,
    reach: float = 0.0,
    top: int = 5,
    exhaustive: bool = False,
    frontier: bool = False,
) -> SearchOutcome:
    """Returns the fastest strategies per token on all chips of a cluster, for a batch or, with ``reach``, near it.

    These are at most ``top`` meshes, of as many (pipeline, data x fsdp x context, expert, tensor) as there are (see
    `diverse`). Unless ``exhaustive``, a large space is screened first: every mesh is priced in its plainest form, and
    only the most promising in all forms.
    """
    meshes = candidates_on_chips(space, batch_seqs, num_chips=cluster.num_chips, reach=reach)
    num_meshes = len(meshes)
    if num_meshes > KEPT_MESHES and not exhaustive:
        meshes = _screened(space, cluster, meshes)
    laid, placements = _laid(cluster, meshes)
    if not placements:
        return SearchOutcome(num_meshes=num_meshes)
    bench, every = _Bench(space, cluster, placements), with_microbatches(space, laid)
    best = Best()
    for number, pattern in enumerate(space.patterns):
        for variant in bench.variants(number, pattern, every):
            best.add(variant)
    picked = diverse(best.order(), best, top)
    found = tuple(bench.found(best, index) for index in picked)
    front = tuple(bench.found(best, index) for index in best.frontier()) if frontier else ()
    return SearchOutcome(
        found=found,
        num_meshes=num_meshes,
        num_legal=best.num_legal,
        num_candidates=best.num_ranked,
        least_bytes=best.least_bytes,
        frontier=front,
        fits_without_stages=best.fits_without_stages,
    )


def _screened(space: Space, cluster: Cluster, meshes: Candidates) -> Candidates:
    """Selects the meshes that fit and are fastest per token in their plainest form; all meshes if none fits.

    Plain is the first placement, the first schedule and no offloading, with the first assignment and a few
    policies of remat, from the fastest to the leanest.
    """
    first = space.patterns[0].strategy
    plain = tuple(p for p in space.patterns if not p.needs and p.strategy.assignment == first.assignment)
    few = tuple(p for p in plain if p.strategy.remat in SCREENED_REMATS)
    # with stages, weights that stay whole can be worth more than what they take
    few += tuple(p for p in space.patterns if p.strategy.zero == 1 and p.strategy.remat == SCREENED_REMATS[1])[:1]
    quick = msgspec.structs.replace(
        space,
        schedules=space.schedules[:1],
        offloads=space.offloads[:1],
        patterns=few or plain,
    )
    laid, placements = _laid(cluster, meshes, most=1)
    if not placements:
        return laid
    best = np.full(len(placements), np.inf)
    bench, every = _Bench(quick, cluster, placements), with_microbatches(space, laid, most=SCREENED_MICROBATCHES)
    for number, pattern in enumerate(quick.patterns):
        for variant in bench.variants(number, pattern, every):
            np.minimum.at(best, variant.rows.laid, variant.seconds)
    kept = _promising(best, np.array([placement.mesh["pipeline"] for placement in placements]))
    return select(laid, kept[laid.laid]) if kept.any() else meshes


def _promising(seconds: np.ndarray, stages: np.ndarray) -> np.ndarray:
    """True for the fastest meshes, and for the fastest of every number of stages, which other schedules help."""
    order = np.argsort(seconds, kind="stable")
    kept = np.zeros(len(seconds), dtype=bool)
    kept[order[:KEPT_MESHES]] = True
    for count in np.unique(stages):
        kept[order[stages[order] == count][:KEPT_PER_STAGES]] = True
    return kept & np.isfinite(seconds)


def _laid(cluster: Cluster, meshes: Candidates, *, most: int | None = None) -> tuple[Candidates, list[Placement]]:
    """Repeats every mesh for each of its placements, at most ``most`` of them."""
    placements: list[Placement] = []
    spans: dict[tuple[int, ...], range] = {}
    which: list[int] = []
    numbers: list[int] = []
    for number, sizes in enumerate(zip(*(column.tolist() for column in meshes.mesh.values()), strict=True)):
        if sizes not in spans:
            laid = place_axes(cluster, dict(zip(MESH_AXES, sizes, strict=True)))[:most]
            spans[sizes] = range(len(placements), len(placements) + len(laid))
            placements.extend(laid)
        which.extend([number] * len(spans[sizes]))
        numbers.extend(spans[sizes])
    found = select(meshes, np.array(which, dtype=np.intp))
    return msgspec.structs.replace(found, laid=np.array(numbers, dtype=np.intp)), placements


# -- pricing --------------------------------------------------------------------------------------------


class _Bench:
    """Prices candidates: the space, the placements and the rates of the machine on them."""

    def __init__(self, space: Space, cluster: Cluster, placements: Sequence[Placement]) -> None:
        self.space, self.placements = space, placements
        self.setting = space.setting.on(cluster)
        derived = (pattern.derived for pattern in space.patterns)
        self.rates = self.setting.step_rates(space.template, placements, *derived)

    def variants(self, number: int, pattern: Pattern, every: Candidates) -> Iterator[Variant]:
        """Yields the pattern's candidates of each schedule and choice of offloading, with all numbers of chunks."""
        space = self.space
        rows = select(every, legal_in(space, pattern, every))
        if not len(rows):
            return
        held = memory_parts(pattern.derived, candidate_sizes(space, rows))
        times: BlockTimes | None = None
        for schedule in space.schedules:
            which, chunks = self._chunks(schedule, rows, pattern)
            if not len(which):
                continue
            chosen, memory = select(rows, which), select(held, which)
            pipeline = candidate_pipeline(space, chosen, schedule=schedule, chunks=chunks)
            for offload in space.offloads:
                if offload and self.rates.pcie_bytes_per_s is None:
                    continue
                moved = offloaded(memory, self.rates.pcie_bytes_per_s, pipeline, offload)
                need = total_bytes(memory.items(pipeline, offload))
                fits = np.flatnonzero(need <= self.setting.memory_limit)
                step_s = np.full(len(chosen), np.inf)
                if len(fits):
                    # what never fits is never priced: most of a refusal's time
                    times = times or self._priced(pattern, rows, candidate_pipeline(space, rows)).times
                    step_s = np.broadcast_to(select(times, which).step_s(pipeline, moved).step_s, len(chosen))
                yield Variant(
                    pattern=number,
                    rank=pattern.rank,
                    schedule=schedule,
                    offload=offload,
                    rows=select(chosen, fits),
                    chunks=chunks[fits],
                    seconds=step_s[fits] / chosen.batch_seqs[fits],
                    need=np.broadcast_to(need, len(chosen))[fits],
                    num_legal=len(chosen),
                    least_bytes=float(np.min(need)),
                )

    def _priced(
        self, pattern: Pattern, rows: Candidates, pipeline: PipelineCost, offload: tuple[str, ...] = ()
    ) -> PricedStep:
        return PricedStep(
            derived=pattern.derived,
            sizes=candidate_sizes(self.space, rows),
            rates=select(self.rates, rows.laid),
            pipeline=pipeline,
            offload=offload,
        )

    def _chunks(self, schedule: str, rows: Candidates, pattern: Pattern) -> tuple[np.ndarray, np.ndarray]:
        """Returns indices of candidates on which a schedule runs, once per number of chunks, and these numbers.

        On one stage every schedule is the same, so only the first is listed there. Several chunks are looked at
        where they leave few places for layers empty.
        """
        stages, num_layers = rows.mesh["pipeline"], pattern.derived.num_layers
        first = schedule == self.space.schedules[0]
        numbers, chunks = [], []
        for count in self._chunk_counts(schedule, stages, num_layers):
            fits = schedule_fits(schedule, stages=stages, chunks=count, microbatches=rows.microbatches)
            fits = fits & ((stages > 1) | (first & (count == 1)))
            # the one rule on sizes that chunks change: `variants` has applied the others
            fits = fits & ((count == 1) | few_idle_places(num_layers, stages * count))
            found = np.flatnonzero(fits)
            numbers.append(found)
            chunks.append(count[found])
        return np.concatenate(numbers), np.concatenate(chunks)

    def _chunk_counts(self, schedule: str, stages: np.ndarray, num_layers: int) -> Iterator[np.ndarray]:
        """Yields numbers of chunks to try, one for each candidate: as given, or for runs of one layer, two, ..."""
        found = definition(schedule)
        if self.space.chunks or not found.more_chunks:
            yield np.full(len(stages), self.space.chunks or found.chunks, dtype=np.int64)
            return
        for layers in CHUNK_LAYERS:
            count = -(-num_layers // (stages * layers))
            # where fewer layers make no more chunks they have been tried already
            yield np.where(-(-num_layers // (stages * count)) == layers, count, 1)

    def found(self, best: Best, index: int) -> PlannedStrategy:
        """Returns one candidate with its whole prediction."""
        one = best.at(index)
        rows, pattern, placement = one.rows, self.space.patterns[one.pattern], self.placements[int(one.rows.laid[0])]
        strategy = msgspec.structs.replace(
            pattern.strategy,
            mesh={axis: int(size) for axis, size in placement.mesh.items()},
            placement=placement.describe(),
            num_microbatches=int(rows.microbatches[0]),
            schedule=one.schedule,
            chunks=int(one.chunks[0]),
            offload=one.offload,
        )
        pipeline = candidate_pipeline(self.space, rows, schedule=one.schedule, chunks=one.chunks)
        priced = self._priced(pattern, rows, pipeline, one.offload)
        estimate = predict(priced, self.setting, batch_seqs=rows.batch_seqs.astype(float))
        return planned(self.setting, int(rows.batch_seqs[0]), strategy, as_python(select(estimate, 0)))
