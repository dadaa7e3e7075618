"""Prices every legal strategy of a job on a cluster at once, and ranks them.

The steps of a pattern (`space.Pattern`) are derived once, with sizes as symbols. Meshes, batches, microbatches and
placements are then arrays with one entry per candidate; the times of a layer are priced once per pattern, and shared by
every schedule, number of chunks and choice of offloading.
"""

from collections.abc import Iterator, Mapping

import msgspec
import numpy as np

from meshwright.algebra.schedules.registry import definition
from meshwright.core.dims import ISLAND_AXES
from meshwright.core.progress import tracked, working
from meshwright.cost.arrays import select
from meshwright.cost.memory.chip import total_bytes
from meshwright.cost.network.placement import Placement, place_axes
from meshwright.cost.offload import offloaded
from meshwright.cost.pass_times import BlockTimes
from meshwright.cost.pipeline import schedule_fits
from meshwright.cost.train_step import PricedStep
from meshwright.plan.candidates import (
    Candidates,
    candidate_pipeline,
    candidate_sizes,
    candidates_on_chips,
    legal_in,
    with_microbatches,
)
from meshwright.plan.legal import few_idle_places
from meshwright.plan.plan_file import Plan
from meshwright.plan.ranking import Best, Variant, diverse
from meshwright.plan.result import planned
from meshwright.plan.space import Pattern, Space
from meshwright.spec.cluster import Cluster
from meshwright.spec.strategy import USUAL_POLICIES

CHUNK_LAYERS = (*range(1, 9), 10, 12, 14, 16, 20, 21, 24, 28, 32, 40, 48)
"""Numbers of layers per chunk that the search tries."""

KEPT_MESHES = 40
"""Number of meshes above which a search is screened, and of fastest meshes that are then priced in all variants."""

SCREENED_MICROBATCHES = 3
"""Most numbers of microbatches that screening tries for a mesh."""

SCREENED_REMATS = ("none", "selective", "full")
"""Policies of remat with which a mesh is screened, where they are among the choices."""

KEPT_PER_STAGES = 5
"""Number of meshes, the fastest, that screening always keeps of each number of pipeline stages."""

NEAR = 3
"""Largest factor by which an axis of a mesh differs from the axis of a neighbouring mesh."""

AT_ONCE = 8192
"""Number of candidates that are priced at once: steps that several patterns share are then priced once for them."""


class SearchOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The best strategies, best first; ``least_bytes`` is the least memory per chip of any legal strategy.

    ``num_meshes`` counts meshes whose sizes divide; ``num_legal`` counts strategies with such a mesh and a placement;
    ``num_candidates`` counts the legal strategies that fit in memory, which are ranked. If ``num_meshes`` is not 0 and
    ``found`` is empty, nothing fits. ``frontier`` are the strategies that no other beats in both step time and memory.
    ``fits_without_stages`` is true if any ranked strategy has one pipeline stage.
    """

    found: tuple[Plan, ...] = ()
    num_meshes: int
    num_legal: int = 0
    num_candidates: int = 0
    least_bytes: float = np.inf
    frontier: tuple[Plan, ...] = ()
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

    The strategies have at most ``top`` different meshes, chosen by `diverse`; with ``frontier`` the result also has the
    strategies that no other beats in time and memory. Unless ``exhaustive``, a search of more than `KEPT_MESHES` meshes
    is screened: only the fastest meshes get all patterns, schedules and offloads."""
    rare_space = space.with_rare()
    meshes = candidates_on_chips(rare_space, batch_seqs, num_chips=cluster.num_chips, reach=reach)
    pricer, best = _Pricer(space, cluster, []), Best()
    is_priced = np.zeros(len(meshes), dtype=bool)
    is_due = ~is_priced if len(meshes) <= KEPT_MESHES or exhaustive else _screened(space, cluster, meshes)
    while is_due.any():
        is_priced |= is_due
        for variant in pricer.variants(select(meshes, is_due)):
            best.add(variant)
        is_due = ~is_priced & _near_first(meshes, best)
        lacks_reruns = best.missed < np.min(best.seconds, initial=np.inf) or not best.kept
        if pricer.space is space and not is_due.any():
            pricer = _Pricer(rare_space.with_reruns() if lacks_reruns else rare_space, cluster, pricer.placements)
            for variant in pricer.variants(select(meshes, is_priced), begin=len(space.patterns)):
                best.add(variant)
            is_due = ~is_priced & _near_first(meshes, best)
    indices = diverse(best.order(), best, top)
    unbeaten_plans = tuple(pricer.planned_at(best, index) for index in best.frontier()) if frontier else ()
    return SearchOutcome(
        found=tuple(pricer.planned_at(best, index) for index in indices),
        num_meshes=len(meshes),
        num_legal=best.num_legal,
        num_candidates=best.num_ranked,
        least_bytes=best.least_bytes,
        frontier=unbeaten_plans,
        fits_without_stages=best.fits_without_stages,
    )


def _screened(space: Space, cluster: Cluster, meshes: Candidates) -> np.ndarray:
    """Returns a Boolean array: True for the meshes that are fastest per token in a quick search, and for neighbours of
    the fastest mesh; True for all meshes if none fits.

    The quick search has the first placement, offloading and context attention, every schedule and `SCREENED_REMATS`.
    """
    attention_mode = space.patterns[0].strategy.context_attention
    mode_patterns = tuple(p for p in space.patterns if p.strategy.context_attention == attention_mode)
    quick_patterns = tuple(p for p in mode_patterns if p.strategy.remat in SCREENED_REMATS)
    quick_space = msgspec.structs.replace(space, offloads=space.offloads[:1], patterns=quick_patterns or mode_patterns)
    seconds_by_mesh = np.full(len(meshes), np.inf)
    for variant in _Pricer(quick_space, cluster, []).variants(meshes, placements=1, microbatches=SCREENED_MICROBATCHES):
        np.minimum.at(seconds_by_mesh, variant.rows.number, variant.seconds)
    is_promising = _promising(seconds_by_mesh, meshes.mesh["pipeline"])
    if not is_promising.any():
        return np.ones(len(meshes), dtype=bool)
    return np.asarray(is_promising | near(meshes, select(meshes, np.array([np.argmin(seconds_by_mesh)])).mesh))


def _promising(seconds: np.ndarray, num_stages: np.ndarray) -> np.ndarray:
    """Returns a Boolean array: True for the fastest meshes that fit, overall and of every number of stages."""
    fastest_order = np.argsort(seconds, kind="stable")
    is_fastest = np.zeros(len(seconds), dtype=bool)
    is_fastest[fastest_order[:KEPT_MESHES]] = True
    for stage_count in np.unique(num_stages):
        is_fastest[fastest_order[num_stages[fastest_order] == stage_count][:KEPT_PER_STAGES]] = True
    return np.asarray(is_fastest & np.isfinite(seconds))


def _near_first(meshes: Candidates, best: Best) -> np.ndarray:
    """Returns a Boolean array: True for meshes that are neighbours (`near`) of the best candidate's mesh."""
    order = best.order()
    return near(meshes, best.at(int(order[0])).rows.mesh) if len(order) else np.zeros(len(meshes), dtype=bool)


def near(meshes: Candidates, mesh: Mapping[str, np.ndarray]) -> np.ndarray:
    """Returns a Boolean array: True for meshes that differ from ``mesh`` in two axes, each by a factor up to `NEAR`."""
    ratios = np.stack([meshes.mesh[axis] / mesh[axis] for axis in ISLAND_AXES])
    return np.asarray((np.sum(ratios != 1, axis=0) == 2) & np.all(np.maximum(ratios, 1 / ratios) <= NEAR, axis=0))


# -- pricing --------------------------------------------------------------------------------------------


class _Pricer:
    """Prices candidates of a space on a cluster; ``placements`` collects every placement that was priced."""

    def __init__(self, space: Space, cluster: Cluster, placements: list[Placement]) -> None:
        self.space, self.cluster, self.placements = space, cluster, placements
        self.setting = space.setting.on(cluster)

    def variants(
        self, meshes: Candidates, *, begin: int = 0, placements: int | None = None, microbatches: int | None = None
    ) -> Iterator[Variant]:
        """Yields a variant for each pattern from index ``begin`` on, schedule and offloading, with candidates on all
        meshes and all numbers of chunks. ``placements`` and ``microbatches`` limit how many placements and numbers of
        microbatches a mesh is tried with."""
        first_placement = len(self.placements)
        candidates = with_microbatches(self.space, self._laid(meshes, placements), most=microbatches)
        if not len(candidates):
            return
        derivations = (pattern.derived for pattern in tracked(self.space.patterns, "deriving programs"))
        rates = self.setting.step_rates(self.space.template, self.placements[first_placement:], *derivations)
        begin_rows, patterns = range(0, len(candidates), AT_ONCE), [*enumerate(self.space.patterns)][begin:]
        with working("pricing strategies", len(begin_rows) * len(patterns)) as work:
            for begin_row in begin_rows:
                rows = select(candidates, slice(begin_row, begin_row + AT_ONCE))
                priced_step = PricedStep(
                    derived=self.space.patterns[0].derived,
                    sizes=candidate_sizes(self.space, rows),
                    rates=select(rates, rows.laid - first_placement),
                    pipeline=candidate_pipeline(self.space, rows),
                )
                for pattern_index, pattern in patterns:
                    legal_indices = np.flatnonzero(legal_in(self.space, pattern, rows))
                    if len(legal_indices):
                        pattern_step = msgspec.structs.replace(priced_step, derived=pattern.derived)
                        yield from self._forms(pattern_index, pattern_step, rows, legal_indices)
                    work.done += 1

    def _laid(self, meshes: Candidates, max_placements: int | None) -> Candidates:
        """Repeats every mesh for each of its placements, at most ``max_placements`` of them."""
        range_by_sizes: dict[tuple[int, ...], range] = {}
        mesh_indices, placement_indices = list[int](), list[int]()
        for mesh_index, sizes in enumerate(zip(*(column.tolist() for column in meshes.mesh.values()), strict=True)):
            if sizes not in range_by_sizes:
                placements = place_axes(self.cluster, dict(zip(ISLAND_AXES, sizes, strict=True)))[:max_placements]
                range_by_sizes[sizes] = range(len(self.placements), len(self.placements) + len(placements))
                self.placements.extend(placements)
            mesh_indices.extend([mesh_index] * len(range_by_sizes[sizes]))
            placement_indices.extend(range_by_sizes[sizes])
        repeated_meshes = select(meshes, np.array(mesh_indices, dtype=np.intp))
        return msgspec.structs.replace(repeated_meshes, laid=np.array(placement_indices, dtype=np.intp))

    def _forms(self, pattern_index: int, step: PricedStep, rows: Candidates, legal: np.ndarray) -> Iterator[Variant]:
        """Yields a variant of one pattern for each schedule and offloading; ``legal`` are indices into ``rows``."""
        space, pattern, legal_rows = self.space, self.space.patterns[pattern_index], select(rows, legal)
        legal_memory, pcie_bytes_per_s = select(step.memory, legal), step.rates.pcie_bytes_per_s
        legal_times: BlockTimes | None = None
        for schedule in space.schedules:
            indices, num_chunks = self._chunks(schedule, legal_rows, pattern)
            if not len(indices):
                continue
            candidates, memory = select(legal_rows, indices), select(legal_memory, indices)
            pipeline = candidate_pipeline(space, candidates, schedule=schedule, chunks=num_chunks)
            for offload in space.offloads:
                if offload and pcie_bytes_per_s is None:
                    continue
                transfers = offloaded(memory, pcie_bytes_per_s, pipeline, offload)
                needed_bytes = total_bytes(memory.items(pipeline, offload))
                fitting_indices = np.flatnonzero(needed_bytes <= self.setting.memory_room)
                step_s = np.full(len(candidates), np.inf)
                missed_s = np.inf
                if len(fitting_indices):
                    # what never fits is never priced: pricing it would take most of the time of a refusal
                    legal_times = legal_times or select(step.times, legal)
                    block_times = select(legal_times, indices)
                    step_s = np.broadcast_to(block_times.step_s(pipeline, transfers).step_s, len(candidates))
                    if pattern.strategy.remat == USUAL_POLICIES[-1] and len(fitting_indices) < len(candidates):
                        rerun_s = (step_s + block_times.pairs_s(pipeline)) / candidates.batch_seqs
                        missed_s = float(np.min(rerun_s[needed_bytes > self.setting.memory_room]))
                yield Variant(
                    pattern=pattern_index,
                    rank=pattern.rank,
                    schedule=schedule,
                    offload=offload,
                    rows=select(candidates, fitting_indices),
                    chunks=num_chunks[fitting_indices],
                    seconds=step_s[fitting_indices] / candidates.batch_seqs[fitting_indices],
                    need=np.broadcast_to(needed_bytes, len(candidates))[fitting_indices],
                    num_legal=len(candidates),
                    least_bytes=float(np.min(needed_bytes)),
                    missed=missed_s,
                )

    def _chunks(self, schedule: str, rows: Candidates, pattern: Pattern) -> tuple[np.ndarray, np.ndarray]:
        """Returns (indices of candidates on which a schedule runs, number of chunks): each pair of the two once.

        On one stage all schedules are alike, so candidates with one stage get only the first. Several chunks are tried
        only if they leave few layer slots empty.
        """
        num_stages, num_layers = rows.mesh["pipeline"], pattern.derived.num_layers
        is_first_schedule = schedule == self.space.schedules[0]
        index_arrays, chunk_arrays = [], []
        for num_chunks in self._chunk_counts(schedule, num_stages, num_layers):
            is_fit = schedule_fits(schedule, stages=num_stages, chunks=num_chunks, microbatches=rows.microbatches)
            is_fit = is_fit & ((num_stages > 1) | (is_first_schedule & (num_chunks == 1)))
            # chunks change only this rule on sizes; `variants` has applied the others
            is_fit = is_fit & ((num_chunks == 1) | few_idle_places(num_layers, num_stages * num_chunks))
            indices = np.flatnonzero(is_fit)
            index_arrays.append(indices)
            chunk_arrays.append(num_chunks[indices])
        return np.concatenate(index_arrays), np.concatenate(chunk_arrays)

    def _chunk_counts(self, schedule: str, num_stages: np.ndarray, num_layers: int) -> Iterator[np.ndarray]:
        """Yields arrays with a number of chunks per candidate: the fixed one, or for chunks of one layer, two, ..."""
        schedule_definition = definition(schedule)
        if self.space.chunks or not schedule_definition.more_chunks:
            yield np.full(len(num_stages), self.space.chunks or schedule_definition.chunks, dtype=np.int64)
            return
        for layers_per_chunk in CHUNK_LAYERS:
            num_chunks = -(-num_layers // (num_stages * layers_per_chunk))
            # 1 where this number of chunks has been tried already
            yield np.where(-(-num_layers // (num_stages * num_chunks)) == layers_per_chunk, num_chunks, 1)

    def planned_at(self, best: Best, index: int) -> Plan:
        """Returns candidate ``index`` of ``best`` as a plan, priced anew from the steps of its own mesh: their order,
        and so their time, may differ a little from the steps that were derived once for all meshes."""
        form = best.at(index)
        rows, pattern, placement = form.rows, self.space.patterns[form.pattern], self.placements[int(form.rows.laid[0])]
        strategy = msgspec.structs.replace(
            pattern.strategy,
            mesh={axis: int(size) for axis, size in placement.mesh.items()},
            placement=placement.describe(),
            num_microbatches=int(rows.microbatches[0]),
            schedule=form.schedule,
            chunks=int(form.chunks[0]),
            offload=form.offload,
        )
        return planned(self.setting, int(rows.batch_seqs[0]), strategy)
