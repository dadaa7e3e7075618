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
    ways, dim = shardings.strategy.ring_ways, "T" if "T" in shardings.strategy.rules("activation") else ""
    if not ways:
        return steps
    weights = {variable.name for variable in shardings.program.of_role(*WEIGHTS)}
    passes = ((steps.forward, steps.kept), (steps.backward, ()))
    forward, backward = (
        with_collective_matmuls(one_pass, ways=ways, kept=kept, weights=weights, along=dim) for one_pass, kept in passes
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
    member_indices = {gather_index}
    for i, unit in enumerate(units):
        if len(unit) == 1 and _multiplies(unit[0], gather) and _is_convex({*member_indices, i}, units_before):
            member_indices.add(i)
    products = [units[i][0] for i in sorted(member_indices - {gather_index})]
    if not products:
        return units
    outside_steps = (step for i, unit in enumerate(units) if i not in member_indices for step in unit)
    keeps_whole = gather.result in kept or any(gather.result in step.inputs for step in outside_steps)
    parts = sorted(products, key=lambda part: gather.dim not in part.result.dims)
    passing_array = gather.inputs[0].replace(name=f"{gather.inputs[0].name}_passing")
    operands = dict.fromkeys(a for part in parts for a in part.inputs if a != gather.result)
    result_arrays = (*(part.result for part in parts), *([gather.result] if keeps_whole else []))
    product_step = _product("all_gather", (passing_array, *operands), result_arrays, parts, gather.dim, ways)
    return _joined(units, member_indices, (_round(gather, "past", gather.inputs[0], passing_array, ways), product_step))


def _multiplies(step: Step, gather: Step) -> bool:
    """True if a step is a product with the gathered array that can be computed block by block."""
    gathered_array = gather.result
    if not _is_einsum(step) or step.inputs.count(gathered_array) != 1 or step.accumulates:
        return False
    if step.op != "einsum" and gather.dim not in step.result.dims:
        return False
    return _split_alike(step, gather.dim, gathered_array.axes_of(gather.dim))


# -- sums ---------------------------------------------------------------------------------------------------


def _with_sum(units: list[Unit], sum_step: Step, ways: int, kept: Collection[ShardedArray], along: str) -> list[Unit]:
    """Joins the ReduceScatter or AllReduce of a sum with the products that it adds: one round for all addends."""
    operand = sum_step.inputs[0]
    dim = sum_step.dim if sum_step.op == "reduce_scatter" else along if along in operand.dims else operand.dims[-1]
    maker_indices = [i for i, unit in enumerate(units) if any(operand in s.results for s in unit)]
    user_steps = [step for unit in units for step in unit if operand in step.inputs and step is not sum_step]
    if user_steps or operand in kept or not maker_indices or sum_step.reduction == "max":
        return units
    parts = [units[i][0] for i in maker_indices]
    is_alone = all(len(units[i]) == 1 and _is_einsum(part) for i, part in zip(maker_indices, parts, strict=True))
    is_in_turn = [part.accumulates for part in parts] == [False] + [True] * (len(parts) - 1)
    is_even = all(_split_alike(part, dim, operand.axes_of(dim)) for part in parts)
    member_indices = {_place(units, sum_step), *maker_indices}
    if not (is_alone and is_in_turn and is_even and _is_convex(member_indices, _before(units))):
        return units
    form: CollectiveForm = "reduce_scatter" if sum_step.op == "reduce_scatter" else "all_reduce"
    split_axes = {dim: (*sum_step.result.axes_of(dim), *AXES)}
    split_sum = sum_step.result if form == "reduce_scatter" else sum_step.result.resharded(split_axes)
    passing_array = split_sum.replace(name=f"{split_sum.name}_passing")
    inputs = tuple(dict.fromkeys(a for part in parts for a in part.inputs))
    product_step = _product(form, inputs, (passing_array,), parts, dim, ways)
    home_round = _round(replace(sum_step, dim=dim), "home", passing_array, split_sum, ways)
    if form == "reduce_scatter":
        return _joined(units, member_indices, (product_step, replace(home_round, accumulates=sum_step.accumulates)))
    gather = replace(sum_step, op="all_gather", inputs=(split_sum,), dim=dim, critical=True)
    return _joined(units, member_indices, (product_step, home_round, gather))


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
    last_part, is_recomputed = parts[-1], all(part.phase == "recompute" for part in parts)
    return replace(
        last_part,
        op=NAME,
        inputs=inputs,
        result=results[0],
        more=results[1:],
        dim=dim,
        accumulates=False,
        details=Blocks(form=form, axes=AXES, ways=ways),
        phase="backward" if last_part.phase == "recompute" and not is_recomputed else last_part.phase,
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
    return next(index for index, unit in enumerate(units) if any(member is step for member in unit))


def _before(units: Sequence[Unit]) -> list[set[int]]:
    """Returns for each unit the units that must come before it: they write what it reads, or read what it changes."""
    writer_index_of: dict[ShardedArray, int] = {}
    reader_indices_of: dict[ShardedArray, set[int]] = {}
    predecessors: list[set[int]] = []
    for index, unit in enumerate(units):
        written_arrays = {a for step in unit for a in step.results}
        read_arrays = {a for step in unit for a in step.inputs} | {step.result for step in unit if step.accumulates}
        earlier_indices = {writer_index_of[a] for a in read_arrays | written_arrays if a in writer_index_of}
        for array in written_arrays:
            earlier_indices |= reader_indices_of.pop(array, set())
            writer_index_of[array] = index
        for array in read_arrays:
            reader_indices_of.setdefault(array, set()).add(index)
        predecessors.append(earlier_indices - {index})
    return predecessors


def _after(member_indices: set[int], predecessors: Sequence[set[int]]) -> set[int]:
    """Returns the units outside that must come after one of the members."""
    later_indices: set[int] = set()
    for index, earlier_indices in enumerate(predecessors):
        if index not in member_indices and earlier_indices & (member_indices | later_indices):
            later_indices.add(index)
    return later_indices


def _is_convex(member_indices: set[int], predecessors: Sequence[set[int]]) -> bool:
    """True if no unit outside has to run after one member and before another, so that the members can be one unit."""
    later_indices = _after(member_indices, predecessors)
    return not any(predecessors[index] & later_indices for index in member_indices)


def _joined(units: list[Unit], member_indices: set[int], unit: Unit) -> list[Unit]:
    """Replaces ``member_indices`` by one unit, at the position of the first or after the last unit that it needs.

    Other units keep their order.
    """
    predecessors = _before(units)
    other_ids = {*range(len(units))} - member_indices
    required_indices = {min(member_indices) - 1, *(i for j in member_indices for i in predecessors[j] & other_ids)}
    early_indices = {i for i in other_ids - _after(member_indices, predecessors) if i <= max(required_indices)}
    return [*(units[i] for i in sorted(early_indices)), unit, *(units[i] for i in sorted(other_ids - early_indices))]
