"""Plans a job on a cluster, as the `plan` verb does: the best strategies, and what else would run."""

import math
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import msgspec

from meshwright.algebra.ops.attention import block_share
from meshwright.core.dims import ISLAND_AXES, ISLANDS
from meshwright.core.errors import CannotRunError, InputError, nearest
from meshwright.core.fields import convert_fields
from meshwright.core.progress import tracked
from meshwright.core.units import counted, format_bytes, format_count, format_seconds
from meshwright.cost.setting import Setting
from meshwright.cost.step_rates import attention_scores
from meshwright.cost.train_step import price_strategy
from meshwright.cost.work.ops import mfu_words
from meshwright.masks.names import mask_named
from meshwright.plan.candidates import memory_of_any_mesh, parts_of
from meshwright.plan.islands import IslandSearch, exchange_notes, island_search, join_plans
from meshwright.plan.legal import legal, strategy_sizes
from meshwright.plan.plan_file import Plan
from meshwright.plan.result import PlanResult
from meshwright.plan.rules import Refusal, check_rules
from meshwright.plan.search import SearchOutcome, search
from meshwright.plan.space import USUAL, Choices, Space, open_space
from meshwright.spec.assumptions import Assumptions
from meshwright.spec.cluster import Cluster, slice_note
from meshwright.spec.efficiency import power_notes
from meshwright.spec.job import Job, optimizer_words, require_training
from meshwright.spec.strategy import ISLAND_FIELDS, Strategy, make_mesh, mesh_words

NEAREST_BATCH_SHARE = 0.25
"""Share of the wanted batch by which a batch that uses all chips may differ from it."""

UNEVEN = 1.25
"""Imbalance (rows of the busiest expert device over the mean) at which notes price the step as well."""

MAX_PARTS = 20
"""Number of smaller clusters that are searched before the job is said not to run."""

FIELDS = tuple(name for name in Strategy.__struct_fields__ if name not in ("mesh", "placement"))
"""Fields of the strategy that ``overrides`` may fix; ``axes`` fixes the mesh, and the search finds the placement."""


def rank_plans(
    setting: Setting,
    *,
    axes: Mapping[str, int] | None = None,
    overrides: Mapping[str, Any] | None = None,
    choices: Choices = USUAL,
    exhaustive: bool = False,
    top: int = 5,
) -> PlanResult:
    """Returns the best strategies for a job on a cluster; for this machine's own devices only ones that they can run.

    ``axes`` fixes sizes of mesh axes, ``overrides`` fixes fields of the strategy (``{"remat": "block"}``). If no
    strategy on all chips runs, the largest part of the cluster that can run the job is planned, together with a near
    batch that uses all chips; also if all chips need pipeline stages and fewer chips without stages are faster.
    Unless ``exhaustive``, a large space is screened: see `search`. Raises CannotRunError, which says what would run, if
    nothing does, and InputError if ``top`` is below 1, the job does not train or the model has too few positions.
    """
    if top < 1:
        raise InputError(f"top={top} must be at least 1.")
    given_names = {*(axes or {}), *(name.removeprefix("strategy.") for name in overrides or {})}
    if setting.cluster.num_islands > 1 or given_names & {ISLANDS, *ISLAND_FIELDS}:
        sought = island_search(setting, axes or {}, overrides or {})
        given = {"axes": sought.axes, "overrides": sought.overrides, "choices": choices}
        result = rank_plans(sought.setting, **given, exhaustive=exhaustive, top=top)  # type: ignore[arg-type]
        return _of_islands(result, setting, sought, axes=axes or {}, overrides=overrides or {})
    cluster, job = setting.cluster, setting.job
    space = space_of(setting, axes or {}, overrides or {}, choices)
    outcome = search(space, cluster, job.batch_seqs, top=top, exhaustive=exhaustive)
    plan_on_all = outcome.found[0] if outcome.found else None
    if not outcome.found:
        if not outcome.num_legal:
            refuse_given(space)
        outcome = _largest_part(space, top)
    outcome = _without_stages(space, top, outcome)
    best = outcome.found[0]
    notes = (*_notes(space, best.setting), *imbalance_notes(best.setting, *(plan.strategy for plan in outcome.found)))
    near_plan = None
    shortfall: tuple[str, ...] = ()
    if outcome.found[0].cluster != cluster:
        # the fastest per token within reach, which need not be the nearest batch
        near_plan = next(iter(search(space, cluster, job.batch_seqs, reach=NEAREST_BATCH_SHARE, top=1).found), None)
        shortfall = _part_notes(cluster, job, outcome, plan_on_all, near_plan)
    return PlanResult(
        setting=setting,
        plans=outcome.found,
        notes=notes,
        shortfall=shortfall,
        nearest_batch=near_plan,
        axes=axes or {},
        overrides=overrides or {},
        choices=choices,
    )


def _of_islands(result: PlanResult, setting: Setting, sought: IslandSearch, **given: Any) -> PlanResult:
    """Turns the result for one island into the result for all islands of a setting; ``given`` replaces its fields."""
    if setting.cluster.num_islands == 1:
        return msgspec.structs.replace(result, **given)
    plans = join_plans(setting, result.plans, sought.fields)
    shortfall = tuple(f"on each island: {note}" for note in result.shortfall[:1])
    inner, joint = (imbalance_notes(p[0].setting, *(plan.strategy for plan in p)) for p in (result.plans, plans))
    notes = (*exchange_notes(plans[0]), *(note for note in result.notes if note not in inner), *joint)
    return msgspec.structs.replace(
        result, setting=setting, plans=plans, notes=notes, shortfall=shortfall, nearest_batch=None, **given
    )


def rank_slices(settings: Sequence[Setting], **choices: Any) -> PlanResult:
    """Returns the result for the slice shape with the fastest step, with a note on the times of all shapes.

    Optical switches give the same chips different shapes; each has one of the ``settings``. ``choices`` are arguments
    of `rank_plans`. Raises the first shape's CannotRunError if the job runs on no shape.
    """
    results: list[PlanResult] = []
    first_error: CannotRunError | None = None
    for setting in tracked(settings, "planning"):
        try:
            results.append(rank_plans(setting, **choices))
        except CannotRunError as error:
            first_error = first_error or error
    if first_error is not None and not results:
        raise first_error
    ranking = sorted(results, key=lambda r: (r.plans[0].cluster != r.setting.cluster, r.plans[0].predicted.step_s))
    if len(settings) == 1:
        return ranking[0]
    times = [f"{format_seconds(r.plans[0].predicted.step_s)} on {r.setting.cluster.short_name}" for r in ranking]
    note = f"by shape of the slice a step takes {', '.join(times)}"
    return msgspec.structs.replace(ranking[0], notes=(note, *ranking[0].notes))


# -- what is given --------------------------------------------------------------------------------------


def space_of(
    setting: Setting,
    axes: Mapping[str, int],
    overrides: Mapping[str, Any],
    choices: Choices = USUAL,
    *,
    template: Mapping[str, Any] | None = None,
) -> Space:
    """Returns the search space that remains once the given axes and fields are fixed.

    Fields that are neither given nor searched come from ``template``, by name, or have their usual values. Raises
    InputError for a job that does not train or is longer than the model's positions.
    """
    model, job = setting.model, setting.job
    require_training(job, "plan")
    if model.learned_positions and job.seq_len > model.max_positions:
        raise InputError(
            f"seq={job.seq_len} is longer than the {model.max_positions} learned positions of {model.name}. "
            f"Use at most {model.max_positions}, or --set model.max_positions={job.seq_len}."
        )
    make_mesh(axes)
    value_by_field = {name.removeprefix("strategy."): value for name, value in overrides.items()}
    for name in value_by_field:
        if name not in FIELDS:
            if name in Assumptions.__struct_fields__:
                raise InputError(
                    f"{name} is not a field of the strategy. Give Setting(..., assumptions=Assumptions({name}=...))."
                )
            raise InputError(f"strategy.{name} cannot be set here.{nearest(name, FIELDS)} Give mesh axes in axes.")
    # CPUs train in float32 unless the state is given
    usual_fields = {"state": "fp32" if setting.cluster.kind == "host" else "bf16-adam"}
    fields = {**(template or usual_fields), **value_by_field, "mesh": make_mesh({})}
    strategy = convert_fields(fields, Strategy, section="strategy")
    return open_space(setting, strategy, given=value_by_field, choices=choices, fixed=axes)


def _notes(space: Space, setting: Setting) -> tuple[str, ...]:
    """Returns notes on the conventions behind the numbers of plans."""
    cluster, precision = setting.cluster, space.template.precision
    notes = [
        f"times rest on {setting.rates.describe()}",
        f"MFU counts {mfu_words(setting.model)}" + f"; it is a share of the {precision} peak" * bool(precision),
        *assumption_notes(setting),
    ]
    if cluster.kind != "host" and setting.rates.is_datasheet:
        notes.append("nothing is measured or fitted behind these rates: real steps take longer, see docs/accuracy.md")
    if attention_scores(cluster, setting.assumptions) == "on_chip":
        notes.append("attention is priced as one fused kernel that keeps its scores on chip and skips what is masked")
    if math.isinf(setting.memory_limit):
        notes.append(f"the memory of {cluster.short_name} is not known, so no plan was refused for it")
    elif margin := setting.memory_margin:
        notes.append(
            f"listed plans leave {margin:.0%} of a chip's memory free: compiled steps may need that much more than is "
            f"predicted (docs/proof.md)"
        )
    if setting.job.seq_len > setting.model.max_positions:
        notes.append(f"sequences are longer than the {setting.model.max_positions:,} positions of the model's config")
    notes += power_notes(cluster.chip, setting.rates)
    notes.append(f"the training state is {space.template.state}{optimizer_words(setting.job)}")
    if not setting.rates.is_datasheet:
        notes.append(
            "P10-P90: of ten published steps one took less and one more; bounds: all overlaps, or nothing does"
        )
    return tuple(notes)


def slots_note(setting: Setting, strategy: Strategy) -> list[str]:
    """Returns [note on the load of the busiest expert device]; [] without expert parallelism or with bounded slots."""
    is_split = setting.model.num_experts and strategy.mesh["expert"] > 1
    if not is_split or strategy.capacity_factor:
        return []
    sizes = setting.of_island(strategy).sizes(strategy.inner())
    room_text = f"; it has slots for {sizes.room:g} times the mean, and sends more rows in further rounds"
    cap_text = ", capped at experts over experts per token" * (sizes.load < setting.assumptions.imbalance)
    return [
        f"the busiest expert device is priced with {sizes.load:g} times the mean number of rows "
        f"(assumptions.imbalance{cap_text}){room_text * setting.assumptions.holds_empty_slots}"
    ]


def imbalance_notes(setting: Setting, *strategies: Strategy, imbalance: float = UNEVEN) -> list[str]:
    """Returns `slots_note` of the first strategy; if ``imbalance`` is above the setting's, extended by its step time
    then and by the number (from 1) and step time of the strategy that becomes the fastest."""
    notes = slots_note(setting, strategies[0])
    assumptions = msgspec.structs.replace(setting.assumptions, imbalance=imbalance)
    uneven_setting = msgspec.structs.replace(setting, assumptions=assumptions)
    load = uneven_setting.of_island(strategies[0]).sizes(strategies[0].inner()).load
    if not notes or setting.assumptions.imbalance >= load:
        return notes
    steps_s = [price_strategy(uneven_setting, strategy).estimate.step_s for strategy in strategies]
    best_i = min(range(len(steps_s)), key=steps_s.__getitem__)
    suffix = f", and plan {best_i + 1} becomes the fastest with {format_seconds(steps_s[best_i])}" if best_i else ""
    return [f"{notes[0]}; at {load:g} times the mean this plan takes {format_seconds(steps_s[0])} a step{suffix}"]


def assumption_notes(setting: Setting) -> list[str]:
    """Returns notes, as far as they apply, on a slice shape that is not offered, on assumptions that hold for other
    software only, and on the share of score blocks that the attention mask leaves."""
    assumed_text = ", ".join(f"{name}={value}" for name, value in setting.assumptions.of_other_software.items())
    notes = slice_note(setting.cluster)
    if assumed_text:
        notes.append(f"the price is that of other software, which train and verify refuse: {assumed_text}")
    if mask := setting.model.attention_mask:
        example_fields = ", ".join(mask_named(mask).data)
        suffix = f", counted on example data for {example_fields}" if example_fields else ""
        blocks_text = f"{block_share(mask, None, setting.job.seq_len):.1%} of the blocks of scores{suffix}"
        notes.append(f"attention_mask={mask} leaves {blocks_text}")
    return notes


# -- when the chips do not divide the work -------------------------------------------------------------


def _largest_part(space: Space, top: int) -> SearchOutcome:
    """Returns the outcome on the most chips, below all, on which the job runs. Raises CannotRunError if on none."""
    cluster, job, max_bytes = space.setting.cluster, space.setting.job, space.setting.memory_room
    bytes_of = memory_of_any_mesh(space, job.batch_seqs)
    chip_counts = [n for n in sorted(bytes_of, reverse=True) if n < cluster.num_chips and bytes_of[n] <= max_bytes]
    for part in islice((part for num_chips in chip_counts for part in parts_of(cluster, num_chips)[:1]), MAX_PARTS):
        outcome = search(space, part, job.batch_seqs, top=top)
        if outcome.found:
            return outcome
    raise CannotRunError(_nothing_fits(space, bytes_of))


def _without_stages(space: Space, top: int, outcome: SearchOutcome) -> SearchOutcome:
    """Returns the outcome on fewer chips without stages if all chips need stages and are slower; else ``outcome``."""
    if outcome.fits_without_stages or "pipeline" in space.fixed:
        return outcome
    one_stage_space = msgspec.structs.replace(space, fixed={**space.fixed, "pipeline": 1})
    try:
        part = _largest_part(one_stage_space, 1).found[0].cluster
    except CannotRunError:
        return outcome
    part_outcome = search(space, part, space.setting.job.batch_seqs, top=top)  # there stages may be faster yet
    return min(outcome, part_outcome, key=lambda option: option.found[0].predicted.step_s)


def _part_notes(
    cluster: Cluster, job: Job, outcome: SearchOutcome, whole_plan: Plan | None, near: Plan | None
) -> tuple[str, ...]:
    part = outcome.found[0].cluster
    job_text, chips_text = f"{job.batch_seqs:,} sequences of {job.seq_len:,}", f"all {cluster.num_chips:,} chips of"
    if whole_plan is None:
        reason = f"{job_text} cannot be divided over {chips_text} {cluster.short_name} in a way that fits"
    else:
        step_text = format_seconds(whole_plan.predicted.step_s)
        axes_text = mesh_words(whole_plan.strategy.mesh, " x ")
        reason = f"{job_text} fit {chips_text} {cluster.short_name} only in pipeline stages ({axes_text}, {step_text})"
    notes = [f"{reason}: the plan uses {part.short_name}, {counted(part.num_chips, 'chip')}"]
    if near is not None:
        axes_text = mesh_words(near.strategy.mesh, " x ")
        num_text = format_count(near.job.batch_seqs * job.seq_len)
        step_text = format_seconds(near.predicted.step_s)
        notes.append(
            f"all {cluster.num_chips:,} chips run with {near.job.batch_seqs:,} sequences ({num_text} tokens) a step "
            f"(--batch {near.job.batch_seqs}seq): {axes_text} takes {step_text} a step"
        )
    return tuple(notes)


def refuse_given(space: Space) -> None:
    """Raises CannotRunError if the given axes and fields cannot run, whatever the search chooses for the rest."""
    cluster, num_devices = space.setting.cluster, math.prod(space.fixed.values())
    axes_text = " x ".join(f"{axis}={size}" for axis, size in space.fixed.items())
    devices_text = f"{axes_text} = {num_devices} devices does" if len(space.fixed) > 1 else f"{axes_text} does"
    if cluster.num_chips % num_devices or (num_devices != cluster.num_chips and len(space.fixed) == len(ISLAND_AXES)):
        raise CannotRunError(
            f"{devices_text} not divide the {cluster.num_chips} chips of {cluster.short_name}. "
            f"Use axes whose product divides {cluster.num_chips}."
        )
    if refusal := broken_rule(space):
        raise CannotRunError(refusal.message)


def broken_rule(space: Space) -> Refusal | None:
    """Returns the first refusal of the given axes and fields that no choice of the open ones can lift, or None."""
    strategy = msgspec.structs.replace(
        space.template,
        mesh=make_mesh(space.fixed),
        num_microbatches=space.num_microbatches or 1,
        chunks=space.chunks or 1,
    )
    open_rules = {"devices", "placement", "memory", "schedule"}
    if math.prod(space.fixed.values()) < space.setting.cluster.num_chips:
        open_rules |= {"zero"}
    refusals = check_rules(space.patterns[0].rules, strategy_sizes(space.setting, strategy))
    of_zero = (refusal for refusal in refusals if refusal.rule == "zero")
    return next((fault for fault in (*of_zero, *legal(space.setting, strategy)) if fault.rule not in open_rules), None)


def _nothing_fits(space: Space, bytes_by_count: Mapping[int, float]) -> str:
    """Returns a message: why no strategy runs, and the fewest chips whose memory would hold one."""
    setting = space.setting
    cluster, job, room = setting.cluster, setting.job, setting.memory_room
    job_text = f"{setting.model.name} with {job.batch_seqs} sequences of {job.seq_len}"
    if space.fixed:
        job_text += " and " + " x ".join(f"{axis}={size}" for axis, size in space.fixed.items())
    need_by_count = {num_chips: need for num_chips, need in bytes_by_count.items() if num_chips <= cluster.num_chips}
    num_chips = min(need_by_count, key=lambda n: (need_by_count[n], -n))
    if need_by_count[num_chips] <= room:
        value_of_field = {
            "schedule": space.template.schedule if len(space.schedules) == 1 else None,
            "chunks": space.chunks,
            "num_microbatches": space.num_microbatches,
        }
        fields = ", ".join(f"{name}={value}" for name, value in value_of_field.items() if value is not None)
        advice = f"Leave one of {fields} open" if fields else "Name another shape of the cluster"
        return f"no mesh of {job_text} can be laid on {cluster.short_name}{' with ' * bool(fields)}{fields}. {advice}."
    enough_chips = min((num_chips for num_chips, need in bytes_by_count.items() if need <= room), default=None)
    advice = (
        f"At least {enough_chips} chips would hold it."
        if enough_chips is not None
        else "No number of chips would hold it: use shorter sequences, or leave axes, remat and microbatches open."
    )
    margin_text = f" besides the {setting.memory_margin:.0%} that stays free" * bool(setting.memory_margin)
    remats = {pattern.strategy.remat for pattern in space.patterns}
    remat_text = "any remat policy" if len(remats) > 1 else f"remat={next(iter(remats))}"
    return (
        f"{job_text} does not fit {cluster.short_name}: the best mesh ({num_chips} chips, {remat_text}) needs "
        f"{format_bytes(need_by_count[num_chips])} per chip, but a chip has {format_bytes(room)}{margin_text}. {advice}"
    )
