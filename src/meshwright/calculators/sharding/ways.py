"""Every way of doing one sharded einsum: the dims that mesh axes may split while the blocks are multiplied.

The algebra does not choose among them: `einsum_cost` prices their steps, and `shard --all` lists them.
"""

from collections.abc import Iterator, Sequence
from itertools import product

from meshwright.algebra.einsum import einsum_steps, local_product, reshard
from meshwright.algebra.notation import ShardedArray
from meshwright.algebra.steps import Step

Layout = dict[str, tuple[str, ...]]
"""Dim -> the mesh axes that split it during the local product, in both operands alike."""


def all_ways(lhs: ShardedArray, rhs: ShardedArray, out: ShardedArray) -> dict[str, tuple[Step, ...]]:
    """Returns every way of ``lhs * rhs -> out`` by its name, which says in words what is moved or summed.

    That of `einsum_steps` is the first, the others go by number of collectives.

    Blocks can be multiplied in place when every mesh axis splits at most one dim, alike in both operands.
    Each dim is tried with every major part of the axes that it has in lhs, rhs or out, which covers: gather
    either side of a conflict, or move an axis there; slice and reduce instead of gathering; gather an input
    or else the output; slice an input or else the output; gather everything. A sum is scattered, or else
    made whole and sliced.
    """
    rules = einsum_steps(lhs, rhs, out)
    found = {steps for layout in _layouts(lhs, rhs, out) for steps in _steps(layout, lhs, rhs, out)} - {rules}
    ways = {_name(steps): steps for steps in found}
    others = sorted(ways.items(), key=lambda way: (sum(s.is_collective for s in way[1]), len(way[1]), way[0]))
    return {_name(rules): rules, **dict(others)}


def _layouts(lhs: ShardedArray, rhs: ShardedArray, out: ShardedArray) -> Iterator[Layout]:
    dims = tuple(dict.fromkeys((*lhs.dims, *rhs.dims)))
    choices = []
    for dim in dims:
        lists = [array.axes_of(dim) for array in (lhs, rhs, out)]
        choices.append(list(dict.fromkeys(axes[:n] for axes in lists for n in range(len(axes) + 1))))
    for chosen in product(*choices):
        used = [axis for axes in chosen for axis in axes]
        if len(set(used)) == len(used):
            yield dict(zip(dims, chosen, strict=True))


def _steps(layout: Layout, lhs: ShardedArray, rhs: ShardedArray, out: ShardedArray) -> Iterator[tuple[Step, ...]]:
    left, right = (array.resharded(layout, unreduced=()) for array in (lhs, rhs))
    result = local_product(left, right, out)
    if not set(out.unreduced) <= set(result.unreduced):
        return
    before = (*reshard(lhs, left), *reshard(rhs, right), Step(op="einsum", inputs=(left, right), result=result))
    yield (*before, *reshard(result, out))
    whole = result.replace(unreduced=out.unreduced)
    yield (*before, *reshard(result, whole), *reshard(whole, out))


def _name(steps: tuple[Step, ...]) -> str:
    return "; ".join(_words(step) for step in steps if step.only_moves) or "no communication"


def axes_text(axes: Sequence[str]) -> str:
    """Returns the axes of a step: ``XY``, or names with commas between."""
    return ("" if all(len(axis) == 1 for axis in axes) else ",").join(axes)


def _words(step: Step) -> str:
    name, axes = step.result.name, axes_text(step.axes)
    return {
        "all_gather": f"gather {step.dim} of {name} over {axes}",
        "slice": f"slice {step.dim} of {name} over {axes}",
        "all_to_all": f"move {axes} of {name} from {step.dim} to {step.to_dim}",
        "reduce_scatter": f"sum {name} over {axes}, scattered into {step.dim}",
        "all_reduce": f"sum {name} over {axes}",
    }[step.op]
