"""Answers `plan --why-not`: the rule that refuses a strategy, or how its best completion compares with the winner.

A completion is a strategy with the asked axes and fields; the search chooses the rest. The winner is the best plan.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from meshwright.algebra.schedules.registry import default_chunks
from meshwright.core.dims import ISLANDS, MESH_AXES
from meshwright.core.errors import CannotRunError, InputError, nearest
from meshwright.core.fields import convert_fields
from meshwright.cost.breakdown import Breakdown, Term
from meshwright.cost.formulas.limit_table import Limit, limits_at
from meshwright.cost.setting import Setting
from meshwright.cost.train_step import Estimate, PricedStrategy, price_strategy
from meshwright.plan.candidates import axis_sizes, candidates_on_chips
from meshwright.plan.islands import IslandSearch, island_search, joined
from meshwright.plan.legal import legal
from meshwright.plan.plan_file import Plan
from meshwright.plan.planner import FIELDS, broken_rule, space_of
from meshwright.plan.result import PlanResult
from meshwright.plan.rules import Refusal
from meshwright.plan.search import search
from meshwright.plan.space import Choices, Space
from meshwright.plan.why.bounds import letters_of
from meshwright.spec.assumptions import Assumptions
from meshwright.spec.strategy import ISLAND_FIELDS, Strategy, mesh_words, standard_assignment

NO_LIMIT_BYTES = 1e30
"""Memory of a chip that is large enough for every strategy."""

ASSIGNMENT_FIELDS = ("zero", "sequence_parallel")
"""Names in a question that choose a standard assignment, in place of the field ``assignment``."""
ASSUMED = Assumptions.__struct_fields__
NAMES = {name: name for name in (*FIELDS, *ASSUMED, *ASSIGNMENT_FIELDS)} | {"microbatches": "num_microbatches"}
"""Name in a question other than a mesh axis -> the field of the strategy or the assumption."""


class TermDifference(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds that one kind of work adds to the winner's and to the other step, and its share of their difference."""

    name: str
    winner_s: float
    other_s: float
    share: float

    @property
    def more_s(self) -> float:
        """Seconds that this work adds to the other strategy's step beyond the winner's; negative if it adds fewer."""
        return self.other_s - self.winner_s


class WhyNot(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to one question.

    ``refusal`` says which rule refuses every completion and what would run; None if one runs. ``strategy`` is the best
    completion: the fastest that fits, else the one that needs least memory; None if none can be laid out. ``terms`` are
    sorted by the seconds that they add to its step beyond the winner's. ``limits`` are the limits that it misses: of
    speed, if the winner meets them, and of memory."""

    asked: dict[str, Any]
    winner: Strategy
    winner_estimate: Estimate
    refusal: Refusal | None = None
    strategy: Strategy | None = None
    estimate: Estimate | None = None
    terms: tuple[TermDifference, ...] = ()
    limits: tuple[Limit, ...] = ()

    @property
    def slower_s(self) -> float | None:
        """Seconds by which the completion's step is longer; None if there is no completion."""
        return None if self.estimate is None else self.estimate.step_s - self.winner_estimate.step_s


def why_not(result: PlanResult, asked: Mapping[str, Any]) -> WhyNot:
    """Returns the reason why a strategy is not the best plan of a result, on the chips of the best plan.

    ``asked`` has sizes of mesh axes, fields of the strategy (also ``zero``, ``sequence_parallel``, ``microbatches``)
    and assumptions; the rest is searched. Axes and fields that the result was planned with stay unless ``asked`` names
    them. Raises InputError for unknown names.
    """
    winner = result.plans[0]
    size_by_axis, value_by_field = split_asked(asked)
    overrides = {name.removeprefix("strategy."): value for name, value in result.overrides.items()}
    answer = WhyNot(asked=dict(asked), winner=winner.strategy, winner_estimate=winner.predicted)
    given_axes, given_fields = {**result.axes, **size_by_axis}, {**overrides, **value_by_field}
    try:
        sought = island_search(winner.setting, given_axes, given_fields)
    except CannotRunError as error:
        return msgspec.structs.replace(answer, refusal=Refusal(rule=ISLANDS, message=str(error)))
    # of islands one is searched, which then exchanges what the winner does, or what is asked for
    space = _space(winner, sought, result.choices)
    setting = msgspec.structs.replace(winner.setting, assumptions=space.setting.assumptions)
    fields = {name: getattr(winner.strategy, name) for name in ISLAND_FIELDS} | sought.fields
    outcome = search(space, space.setting.cluster, space.setting.job.batch_seqs, top=1)
    if outcome.found:
        return _beside(answer, result, setting, joined(setting, outcome.found[0].strategy, fields))
    if not outcome.num_meshes:
        return msgspec.structs.replace(answer, refusal=_no_mesh(space, tuple(size_by_axis)))
    leanest_strategy = _leanest(space)
    if leanest_strategy is None:
        return msgspec.structs.replace(answer, refusal=_no_layout(space))
    refusals = legal(space.setting, leanest_strategy)
    full_answer = _beside(answer, result, setting, joined(setting, leanest_strategy, fields))
    return msgspec.structs.replace(full_answer, refusal=refusals[0] if refusals else None)


def split_asked(asked: Mapping[str, Any]) -> tuple[dict[str, int], dict[str, Any]]:
    """Splits a question into mesh axes and fields or assumptions. Raises InputError for unknown names and bad sizes."""
    size_by_axis: dict[str, int] = {}
    value_by_field: dict[str, Any] = {}
    for name, value in asked.items():
        if name in MESH_AXES:
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise InputError(f"{name}={value} is not a size. Write for example {name}=4.")
            size_by_axis[name] = value
        elif name in NAMES:
            value_by_field[NAMES[name]] = value
        else:
            suffix = nearest(name, (*MESH_AXES, *NAMES))
            raise InputError(f"{name} is neither a mesh axis nor a field of the strategy.{suffix}")
    if set(ASSIGNMENT_FIELDS) & value_by_field.keys():
        zero_stage, is_parallel = value_by_field.pop("zero", 3), value_by_field.pop("sequence_parallel", True)
        value_by_field["assignment"] = standard_assignment(zero=zero_stage, sequence_parallel=is_parallel)
    if isinstance(value_by_field.get("offload"), str):
        value_by_field["offload"] = tuple(value_by_field["offload"].split("+"))
    return size_by_axis, value_by_field


def _space(winner: Plan, sought: IslandSearch, choices: Choices) -> Space:
    """Returns the space with the asked axes and fields fixed; other fields that are not searched are the winner's."""
    fields = sought.overrides
    value_by_assumption = msgspec.to_builtins(winner.setting.assumptions)
    value_by_assumption |= {name: value for name, value in fields.items() if name in ASSUMED}
    value_by_field = {name: value for name, value in fields.items() if name not in ASSUMED}
    winner_fields = msgspec.to_builtins(winner.strategy.inner()) | {"chunks": 1, "offload": (), "placement": {}}
    setting = msgspec.structs.replace(
        sought.setting, assumptions=convert_fields(value_by_assumption, Assumptions, section="assumptions")
    )
    return space_of(setting, sought.axes, value_by_field, choices, template=winner_fields)


# -- where it runs ----------------------------------------------------------------------------------------


def _beside(answer: WhyNot, result: PlanResult, setting: Setting, strategy: Strategy) -> WhyNot:
    """Adds to ``answer`` the completion's estimate, its terms compared with the winner's, and the limits it misses."""
    winner = result.plans[0]
    priced_winner, completion = price_strategy(winner.setting, winner.strategy), price_strategy(setting, strategy)
    holds_of = {limit.name: limit.holds for limit in limits_at(letters_of(priced_winner))}
    missed_limits = [limit for limit in limits_at(letters_of(completion)) if limit.holds is False]
    new_limits = [limit for limit in missed_limits if limit.unit == "bytes" or holds_of.get(limit.name) is not False]
    return msgspec.structs.replace(
        answer,
        winner_estimate=priced_winner.estimate,
        strategy=strategy,
        estimate=completion.estimate,
        terms=compare_terms(priced_winner, completion),
        limits=tuple(new_limits),
    )


def compare_terms(winner: PricedStrategy, other: PricedStrategy) -> tuple[TermDifference, ...]:
    """Returns the seconds that each kind of work adds to the two steps, the largest difference first."""
    winner_s_by_name, other_s_by_name = _by_purpose(Breakdown(winner).terms), _by_purpose(Breakdown(other).terms)
    total_s = other.estimate.step_s - winner.estimate.step_s
    differences = [
        TermDifference(
            name=name,
            winner_s=winner_s_by_name.get(name, 0.0),
            other_s=other_s_by_name.get(name, 0.0),
            share=(other_s_by_name.get(name, 0.0) - winner_s_by_name.get(name, 0.0)) / total_s if total_s else 0.0,
        )
        for name in dict.fromkeys((*other_s_by_name, *winner_s_by_name))
    ]
    return tuple(sorted(differences, key=lambda difference: -difference.more_s))


def _by_purpose(terms: Sequence[Term]) -> dict[str, float]:
    """Maps kinds of work to added seconds; groups of axes with fsdp count as "fsdp", others with data as "data"."""
    seconds_by_name: dict[str, float] = {}
    for term in terms:
        axes = term.name.split(",")
        name = next((axis for axis in ("fsdp", "data") if axis in axes), term.name)
        seconds_by_name[name] = seconds_by_name.get(name, 0.0) + term.added_s
    return seconds_by_name


# -- where it does not ------------------------------------------------------------------------------------


def _leanest(space: Space) -> Strategy | None:
    """Returns the completion that needs the least memory, even if too much; None if no mesh can be laid out."""
    setting = space.setting
    rates = msgspec.structs.replace(setting.rates, memory_bytes=NO_LIMIT_BYTES)
    unlimited_space = msgspec.structs.replace(space, setting=msgspec.structs.replace(setting, calibration=rates))
    frontier_plans = search(unlimited_space, setting.cluster, setting.job.batch_seqs, top=1, frontier=True).frontier
    return min(frontier_plans, key=lambda plan: plan.predicted.hbm_bytes_per_chip).strategy if frontier_plans else None


def _no_mesh(space: Space, asked_axes: Sequence[str]) -> Refusal:
    """Returns the refusal of a question for which no mesh of all chips has the asked sizes."""
    cluster, batch_seqs = space.setting.cluster, space.setting.job.batch_seqs
    sizes_text = " x ".join(f"{axis}={size}" for axis, size in space.fixed.items()) or "the mesh"
    if refusal := broken_rule(space):
        return refusal
    num_fixed = math.prod(space.fixed.values())
    if cluster.num_chips % num_fixed:
        advice = _advice(space, asked_axes) or f"Use a product that divides {cluster.num_chips}."
        return Refusal(
            rule="devices",
            message=f"{sizes_text} does not divide the {cluster.num_chips:,} chips of {cluster.short_name}. {advice}",
        )
    advice = _advice(space, asked_axes) or "Leave another axis open."
    return Refusal(
        rule="devices",
        message=f"with {sizes_text} the product of the other axes must be {cluster.num_chips // num_fixed:,}, but "
        f"no such mesh divides all sizes with {batch_seqs:,} sequences. {advice}",
    )


def _advice(space: Space, asked_axes: Sequence[str]) -> str:
    """Names the sizes that one asked axis may have on all chips while the other sizes stay; "" if there are none."""
    batch_seqs, num_chips = space.setting.job.batch_seqs, space.setting.cluster.num_chips
    for axis in asked_axes:
        other_sizes = {other_axis: size for other_axis, size in space.fixed.items() if other_axis != axis}
        freed_space = msgspec.structs.replace(space, fixed=other_sizes)
        if len(axis_sizes(freed_space, axis, freed_space.dims(batch_seqs))) > 1:
            found_sizes = candidates_on_chips(freed_space, batch_seqs, num_chips=num_chips).mesh[axis]
            if len(found_sizes):
                sizes_text = ", ".join(str(size) for size in sorted({int(size) for size in found_sizes}))
                return f"Use {axis} in {{{sizes_text}}}."
    return ""


def _no_layout(space: Space) -> Refusal:
    """Returns the refusal of sizes that divide but do not run. Raises CannotRunError if no rule refuses them."""
    cluster = space.setting.cluster
    candidates = candidates_on_chips(space, space.setting.job.batch_seqs, num_chips=cluster.num_chips)
    mesh = {axis: int(sizes[0]) for axis, sizes in candidates.mesh.items()}
    num_chunks = space.chunks or (default_chunks(space.template.schedule) if mesh["pipeline"] > 1 else 1)
    strategy = msgspec.structs.replace(
        space.template, mesh=mesh, chunks=num_chunks, num_microbatches=space.num_microbatches or 1
    )
    for refusal in legal(space.setting, strategy):
        return refusal
    mesh_text = mesh_words(mesh)
    raise CannotRunError(f"no layout of {mesh_text} on {cluster.short_name} was found. Leave an axis open.")
