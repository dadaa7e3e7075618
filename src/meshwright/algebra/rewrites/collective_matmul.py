"""Collective matmuls: products that run block by block while the blocks of a collective over ``tensor`` go round.

A rewrite of the derived steps of one pass over a block. An array that is gathered for products goes round the devices
in blocks, and each block is multiplied as it passes (AllGather-matmul). A sum of products that is scattered goes round
in blocks, and each device adds its part to each (matmul-ReduceScatter). A sum that stays whole is made in the same way
and then gathered by an AllGather that is exposed (matmul-AllReduce). Every result keeps its name and sharding, so that
the other steps stay as they are. Source: Wang et al., "Overlap communication with dependent computation via
decomposition" (2023).
"""

from collections.abc import Collection, Sequence
from typing import Literal

from msgspec.structs import replace

from meshwright.algebra.derived import BlockSteps
from meshwright.algebra.notation import ShardedArray
from meshwright.algebra.ops import kind_of
from meshwright.algebra.ops.collective_matmul import NAME, Blocks, CollectiveForm
from meshwright.algebra.program import WEIGHTS
from meshwright.algebra.rewrites.rings import Round
from meshwright.algebra.steps import Step
from meshwright.algebra.tape import Shardings

AXES = ("tensor",)
"""Mesh axes whose collectives of activations within a layer are decomposed."""

Unit = tuple[Step, ...]
"""Steps that stay next to each other: one, or a collective matmul and the permute of its blocks (its round)."""


def in_blocks(steps: BlockSteps, shardings: Shardings) -> BlockSteps:
    """Returns the steps of a block, with collective matmuls where the strategy asks for them.

    If T is not in the assignment (generation), a sum is cut along its last dim instead.
    """
    ways, along = shardings.strategy.ring_ways, "T" if "T" in shardings.strategy.rules("activation") else ""
    if not ways:
        return steps
    weights = {variable.name for variable in shardings.program.of_role(*WEIGHTS)}
    passes = ((steps.forward, steps.kept), (steps.backward, ()))
    forward, backward = (
        with_collective_matmuls(of_pass, ways=ways, kept=kept, weights=weights, along=along) for of_pass, kept in passes
    )
    return replace(steps, forward=forward, backward=backward)


def with_collective_matmuls(
    steps: Sequence[Step],
    *,
    ways: int,
    kept: Collection[ShardedArray] = (),
    weights: Collection[str] = (),
    along: str = "T",
) -> tuple[Step, ...]:
    """Returns the steps of one pass with every collective over ``tensor`` that is next to products decomposed.

    With ``ways`` 2 a block goes round in two halves, in opposite directions. A gathered array is assembled from its
    blocks if it is ``kept`` (used after the pass), or if a step outside its round reads it. Collectives of ``weights``
    and of their gradients stay. A sum that stays whole is cut along the dim ``along`` if it has that dim: each block
    then reads all of the weights. Else it is cut along its last dim: each block then reads its own part of the weights.
    """
    units: list[Unit] = [(step,) for step in steps]
    for step in steps:
        if step.axes != AXES or step.scope == "step" or step.result.name.removeprefix("d") in weights:
            continue
        if step.op == "all_gather":
            units = _with_gather(units, step, ways, kept)
        elif step.op in ("reduce_scatter", "all_reduce"):
            units = _with_sum(units, step, ways, kept, along)
    return tuple(step for unit in units for step in unit)


# -- gathers ------------------------------------------------------------------------------------------------


def _with_gather(units: list[Unit], gather: Step, ways: int, kept: Collection[ShardedArray]) -> list[Unit]:
    """Joins a gather and all products of its result, also products that sum over the gathered dim (gradients of
    weights).

    A product that needs a result of another product in the round stays outside, and reads the assembled array.
    """
    units_before, gather_index = _before(units), _place(units, gather)
    members = {gather_index}
    for number, unit in enumerate(units):
        if len(unit) == 1 and _multiplies(unit[0], gather) and _is_convex({*members, number}, units_before):
            members.add(number)
    products = [units[number][0] for number in sorted(members - {gather_index})]
    if not products:
        return units
    outside_steps = (step for number, unit in enumerate(units) if number not in members for step in unit)
    keeps_whole = gather.result in kept or any(gather.result in step.inputs for step in outside_steps)
    parts = sorted(products, key=lambda part: gather.dim not in part.result.dims)
    passing = gather.inputs[0].replace(name=f"{gather.inputs[0].name}_passing")
    operands = dict.fromkeys(a for part in parts for a in part.inputs if a != gather.result)
    results = (*(part.result for part in parts), *([gather.result] if keeps_whole else []))
    product = _product("all_gather", (passing, *operands), results, parts, gather.dim, ways)
    return _joined(units, members, (_round(gather, "past", gather.inputs[0], passing, ways), product))


def _multiplies(step: Step, gather: Step) -> bool:
    """True if a step is a product with the gathered array that can be computed block by block."""
    gathered = gather.result
    if not _is_einsum(step) or step.inputs.count(gathered) != 1 or step.accumulates:
        return False
    if step.op != "einsum" and gather.dim not in step.result.dims:
        return False
    return _split_alike(step, gather.dim, gathered.axes_of(gather.dim))


# -- sums ---------------------------------------------------------------------------------------------------


def _with_sum(units: list[Unit], total: Step, ways: int, kept: Collection[ShardedArray], along: str) -> list[Unit]:
    """Joins the ReduceScatter or AllReduce of a sum with the products that it adds: one round for all addends."""
    partial = total.inputs[0]
    dim = total.dim if total.op == "reduce_scatter" else along if along in partial.dims else partial.dims[-1]
    makers = [number for number, unit in enumerate(units) if any(partial in s.results for s in unit)]
    users = [step for unit in units for step in unit if partial in step.inputs and step is not total]
    if users or partial in kept or not makers or total.reduction == "max":
        return units
    parts = [units[number][0] for number in makers]
    is_alone = all(len(units[number]) == 1 and _is_einsum(part) for number, part in zip(makers, parts, strict=True))
    is_in_turn = [part.accumulates for part in parts] == [False] + [True] * (len(parts) - 1)
    is_even = all(_split_alike(part, dim, partial.axes_of(dim)) for part in parts)
    members = {_place(units, total), *makers}
    if not (is_alone and is_in_turn and is_even and _is_convex(members, _before(units))):
        return units
    form: CollectiveForm = "reduce_scatter" if total.op == "reduce_scatter" else "all_reduce"
    split_axes = {dim: (*total.result.axes_of(dim), *AXES)}
    split_sum = total.result if form == "reduce_scatter" else total.result.resharded(split_axes)
    passing = split_sum.replace(name=f"{split_sum.name}_passing")
    inputs = tuple(dict.fromkeys(a for part in parts for a in part.inputs))
    product = _product(form, inputs, (passing,), parts, dim, ways)
    home_round = _round(replace(total, dim=dim), "home", passing, split_sum, ways)
    if form == "reduce_scatter":
        return _joined(units, members, (product, replace(home_round, accumulates=total.accumulates)))
    regather = replace(total, op="all_gather", inputs=(split_sum,), dim=dim, critical=True)
    return _joined(units, members, (product, home_round, regather))


# -- steps --------------------------------------------------------------------------------------------------


def _round(
    collective: Step, ring: Literal["past", "home"], source: ShardedArray, result: ShardedArray, ways: int
) -> Step:
    """Returns the permute of the blocks, which overlaps with the product next to it."""
    details = Round(ring=ring, ways=ways, beside_products=True)
    changes = {"op": "permute", "inputs": (source,), "result": result, "details": details, "critical": False}
    return replace(collective, accumulates=False, **changes)


def _product(
    form: CollectiveForm,
    inputs: tuple[ShardedArray, ...],
    results: tuple[ShardedArray, ...],
    parts: list[Step],
    dim: str,
    ways: int,
) -> Step:
    last, is_recomputed = parts[-1], all(part.phase == "recompute" for part in parts)
    return replace(
        last,
        op=NAME,
        inputs=inputs,
        result=results[0],
        more=results[1:],
        dim=dim,
        accumulates=False,
        details=Blocks(form=form, axes=AXES, ways=ways),
        phase="backward" if last.phase == "recompute" and not is_recomputed else last.phase,
        parts=tuple(parts),
    )


def _is_einsum(step: Step) -> bool:
    return not step.is_collective and kind_of(step).is_einsum


def _split_alike(step: Step, dim: str, axes: tuple[str, ...]) -> bool:
    """True if every array shards ``dim`` over the same axes, so that a block of one is a block of all.

    False for slots of experts, whose products skip empty blocks instead, and for a dim whose groups have a scale each.
    """
    arrays = (*step.inputs, step.result)
    if any(f"{dim}g" in a.dims for a in arrays):
        return False
    return all(a.axes_of(dim) == axes for a in arrays if dim in a.dims) and not any("C" in a.dims for a in arrays)


# -- order --------------------------------------------------------------------------------------------------


def _place(units: Sequence[Unit], step: Step) -> int:
    return next(number for number, unit in enumerate(units) if any(member is step for member in unit))


def _before(units: Sequence[Unit]) -> list[set[int]]:
    """Returns for each unit the units that must come before it: they write what it reads, or read what it changes."""
    writer_of: dict[ShardedArray, int] = {}
    readers_of: dict[ShardedArray, set[int]] = {}
    predecessors: list[set[int]] = []
    for number, unit in enumerate(units):
        writes = {a for step in unit for a in step.results}
        reads = {a for step in unit for a in step.inputs} | {step.result for step in unit if step.accumulates}
        earlier = {writer_of[a] for a in reads | writes if a in writer_of}
        for array in writes:
            earlier |= readers_of.pop(array, set())
            writer_of[array] = number
        for array in reads:
            readers_of.setdefault(array, set()).add(number)
        predecessors.append(earlier - {number})
    return predecessors


def _after(members: set[int], before: Sequence[set[int]]) -> set[int]:
    """Returns the units outside that must come after one of the members."""
    later_units: set[int] = set()
    for number, earlier in enumerate(before):
        if number not in members and earlier & (members | later_units):
            later_units.add(number)
    return later_units


def _is_convex(members: set[int], before: Sequence[set[int]]) -> bool:
    """True if nothing outside comes after one member and before another: then they can be one unit."""
    later_units = _after(members, before)
    return not any(before[number] & later_units for number in members)


def _joined(units: list[Unit], members: set[int], unit: Unit) -> list[Unit]:
    """Replaces ``members`` by one unit, at the position of the first or after the last unit that it needs.

    Other units keep their order.
    """
    predecessors = _before(units)
    outside = {*range(len(units))} - members
    required = {min(members) - 1, *(number for member in members for number in predecessors[member] & outside)}
    early = {number for number in outside - _after(members, predecessors) if number <= max(required)}
    return [*(units[number] for number in sorted(early)), unit, *(units[number] for number in sorted(outside - early))]
