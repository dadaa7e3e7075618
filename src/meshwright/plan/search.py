"""Prices every legal strategy of a job on a cluster at once, and ranks them.

The steps of a pattern (`space.Pattern`) are derived once, with sizes as symbols. Meshes, batches, microbatches and
placements are then arrays with one entry per candidate; the times of a layer are priced once per pattern, and shared by
every schedule, number of chunks and choice of offloading.
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
from meshwright.spec.strategy import USUAL_POLICIES

CHUNK_LAYERS = (*range(1, 9), 10, 12, 14, 16, 20, 21, 24, 28, 32, 40, 48)
"""Numbers of layers of one chunk that are tried."""

KEPT_MESHES = 80
"""Number of meshes above which a search is screened, and of the fastest meshes that are then priced in all forms."""

SCREENED_MICROBATCHES = 3
"""How many numbers of microbatches screening tries for a mesh."""

SCREENED_REMATS = ("none", "selective", "full")
"""Policies of remat with which a mesh is screened, where they are among the choices."""

KEPT_PER_STAGES = 10
"""Number of meshes that screening keeps in any case of each number of pipeline stages, the fastest."""


class SearchOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The best strategies, best first; ``least_bytes`` is the least memory per chip of any legal strategy.

    ``num_meshes`` counts meshes whose sizes divide; ``num_legal`` counts strategies with such a mesh and a placement;
    ``num_candidates`` counts the legal strategies that fit in memory, which are ranked. If ``num_meshes`` is not 0 and
    ``found`` is empty, nothing fits. ``frontier`` are the strategies that no other beats in both step time and memory.
    ``fits_without_stages`` is true if any ranked strategy has one pipeline stage.
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

    They have at most ``top`` different meshes, chosen by `diverse`. With ``frontier`` the unbeaten strategies come too.
    Unless ``exhaustive``, a large space is screened first: only the fastest meshes are priced in all forms.
    """
    meshes = candidates_on_chips(space, batch_seqs, num_chips=cluster.num_chips, reach=reach)
    num_meshes = len(meshes)
    if num_meshes > KEPT_MESHES and not exhaustive:
        meshes = _screened(space, cluster, meshes)
    laid, placements = _laid(cluster, meshes)
    if not placements:
        return SearchOutcome(num_meshes=num_meshes)
    pricer, every = _Pricer(space, cluster, placements), with_microbatches(space, laid)
    best = Best()
    for number, pattern in enumerate(space.patterns):
        for variant in pricer.variants(number, pattern, every):
            best.add(variant)
    if best.missed < np.min(best.seconds, initial=np.inf) or not best.kept:
        more = space.with_reruns()
        pricer = _Pricer(more, cluster, placements)
        for number, pattern in list(enumerate(more.patterns))[len(space.patterns) :]:
            for variant in pricer.variants(number, pattern, every):
                best.add(variant)
    picked = diverse(best.order(), best, top)
    found = tuple(pricer.planned_at(best, index) for index in picked)
    front = tuple(pricer.planned_at(best, index) for index in best.frontier()) if frontier else ()
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

    The plainest form has the first placement, schedule, choice of offloading and assignment; a few policies of remat
    are tried, from the fastest to the leanest.
    """
    first = space.patterns[0].strategy
    plain = tuple(p for p in space.patterns if not p.needs and p.strategy.assignment == first.assignment)
    few = tuple(p for p in plain if p.strategy.remat in SCREENED_REMATS)
    # with stages, weights that stay whole can save more than they cost
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
    pricer, every = _Pricer(quick, cluster, placements), with_microbatches(space, laid, most=SCREENED_MICROBATCHES)
    for number, pattern in enumerate(quick.patterns):
        for variant in pricer.variants(number, pattern, every):
            np.minimum.at(best, variant.rows.laid, variant.seconds)
    kept = _promising(best, np.array([placement.mesh["pipeline"] for placement in placements]))
    return select(laid, kept[laid.laid]) if kept.any() else meshes


def _promising(seconds: np.ndarray, stages: np.ndarray) -> np.ndarray:
    """True for the fastest meshes, and for the fastest of every number of stages, as other schedules may help them."""
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


class _Pricer:
    """Prices candidates of a space on placements, at the machine's rates on these."""

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
                fits = np.flatnonzero(need <= self.setting.memory_room)
                step_s = np.full(len(chosen), np.inf)
                missed = np.inf
                if len(fits):
                    # what never fits is never priced: pricing it would take most of the time of a refusal
                    times = times or self._priced(pattern, rows, candidate_pipeline(space, rows)).times
                    found = select(times, which)
                    step_s = np.broadcast_to(found.step_s(pipeline, moved).step_s, len(chosen))
                    if pattern.strategy.remat == USUAL_POLICIES[-1] and len(fits) < len(chosen):
                        longer = (step_s + found.pairs_s(pipeline)) / chosen.batch_seqs
                        missed = float(np.min(longer[need > self.setting.memory_room]))
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
                    missed=missed,
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
        """Returns (indices of candidates on which a schedule runs, number of chunks): each pair of the two once.

        On one stage every schedule is the same, so only the first is listed there. Several chunks are tried only if
        they leave few places for layers empty.
        """
        stages, num_layers = rows.mesh["pipeline"], pattern.derived.num_layers
        first = schedule == self.space.schedules[0]
        numbers, chunks = [], []
        for count in self._chunk_counts(schedule, stages, num_layers):
            fits = schedule_fits(schedule, stages=stages, chunks=count, microbatches=rows.microbatches)
            fits = fits & ((stages > 1) | (first & (count == 1)))
            # chunks change only this rule on sizes; `variants` has applied the others
            fits = fits & ((count == 1) | few_idle_places(num_layers, stages * count))
            found = np.flatnonzero(fits)
            numbers.append(found)
            chunks.append(count[found])
        return np.concatenate(numbers), np.concatenate(chunks)

    def _chunk_counts(self, schedule: str, stages: np.ndarray, num_layers: int) -> Iterator[np.ndarray]:
        """Yields arrays of chunks to try, one number per candidate: as given, or for chunks of one layer, two, ..."""
        found = definition(schedule)
        if self.space.chunks or not found.more_chunks:
            yield np.full(len(stages), self.space.chunks or found.chunks, dtype=np.int64)
            return
        for layers in CHUNK_LAYERS:
            count = -(-num_layers // (stages * layers))
            # 1 where this number of chunks has been tried already
            yield np.where(-(-num_layers // (stages * count)) == layers, count, 1)

    def planned_at(self, best: Best, index: int) -> PlannedStrategy:
        """Returns candidate ``index`` of ``best`` with its whole prediction."""
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
