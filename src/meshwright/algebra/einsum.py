"""The rules of one sharded einsum, and of resharding an array.

Source of the rules: How to Scale Your Model, section 3. No rule decides by cost: where an operand may be gathered or
sliced, the caller chooses (``slice_axes``).
"""

from collections.abc import Callable, Collection
from functools import lru_cache, partial
from itertools import takewhile

from meshwright.algebra.notation import ShardedArray
from meshwright.algebra.steps import Step
from meshwright.core.errors import InputError
from meshwright.core.notation import Axes


def common_prefix(left: Axes, right: Axes) -> Axes:
    """Returns the axes both lists begin with."""
    return tuple(a for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False)))


@lru_cache(maxsize=4096)
def reshard(array: ShardedArray, target: ShardedArray) -> tuple[Step, ...]:
    """Returns the steps that reshard ``array`` to the sharding of ``target``, which has the same dims; () if they are
    equal.

    Unreduced axes that the target shards are reduce-scattered, other ones all-reduced. Then axes that only change dim
    move by all-to-all, axes that the target lacks are gathered, and axes that it adds are sliced. Raises InputError if
    ``target`` is unreduced over axes over which ``array`` is not."""
    not_summable = [axis for axis in target.unreduced if axis not in array.unreduced]
    if not_summable:
        raise InputError(
            f"{array} has nothing left to sum over {', '.join(not_summable)}, which {target} leaves unreduced. "
            f"Leave {{U_...}} out of the wanted array."
        )
    steps: list[Step] = []

    def follow(rule: Callable[[ShardedArray, ShardedArray], Step | None]) -> None:
        while step := rule(steps[-1].result if steps else array, target):
            steps.append(step)

    follow(_reduce)
    follow(_move)
    current_array = steps[-1].result if steps else array
    # Axes that the target lacks are gathered first: they may be on the dim that another axis moves to.
    for dim in sorted(array.dims, key=lambda d: not set(target.spread).isdisjoint(_surplus(current_array, target, d))):
        follow(partial(_gather, dim))
        follow(_move)
    follow(_slice)
    return tuple(steps)


def _reduce(array: ShardedArray, target: ShardedArray) -> Step | None:
    sum_axes = tuple(a for a in array.unreduced if a not in target.unreduced)
    for dim, axes in zip(array.dims, array.axes, strict=True):
        to_axes = target.axes_of(dim)
        new_axes = tuple(takewhile(sum_axes.__contains__, to_axes[len(axes) :])) if to_axes[: len(axes)] == axes else ()
        if new_axes:
            unreduced = tuple(a for a in array.unreduced if a not in new_axes)
            result = array.resharded({dim: axes + new_axes}, unreduced=unreduced)
            return Step(op="reduce_scatter", inputs=(array,), result=result, axes=new_axes, dim=dim)
    if not sum_axes:
        return None
    unreduced = tuple(a for a in array.unreduced if a not in sum_axes)
    return Step(op="all_reduce", inputs=(array,), result=array.replace(unreduced=unreduced), axes=sum_axes)


def _surplus(array: ShardedArray, target: ShardedArray, dim: str) -> Axes:
    axes = array.axes_of(dim)
    return axes[len(common_prefix(axes, target.axes_of(dim))) :]


def _move(array: ShardedArray, target: ShardedArray) -> Step | None:
    """Returns the all-to-all of as many minor axes of one dim as the target has next, in order, on another dim; None if
    there is none."""
    for dim in array.dims:
        surplus_axes = _surplus(array, target, dim)
        for axes in (surplus_axes[n:] for n in range(len(surplus_axes))):
            for to_dim in array.dims:
                to_axes, target_axes = array.axes_of(to_dim), target.axes_of(to_dim)
                if to_dim != dim and target_axes[: len(to_axes) + len(axes)] == to_axes + axes:
                    result = array.resharded({dim: array.axes_of(dim)[: -len(axes)], to_dim: to_axes + axes})
                    return Step(op="all_to_all", inputs=(array,), result=result, axes=axes, dim=dim, to_dim=to_dim)
    return None


def _gather(dim: str, array: ShardedArray, target: ShardedArray) -> Step | None:
    surplus_axes = _surplus(array, target, dim)
    if not surplus_axes:
        return None
    result = array.resharded({dim: array.axes_of(dim)[: -len(surplus_axes)]})
    return Step(op="all_gather", inputs=(array,), result=result, axes=surplus_axes, dim=dim)


def _slice(array: ShardedArray, target: ShardedArray) -> Step | None:
    for dim in array.dims:
        missing_axes = target.axes_of(dim)[len(array.axes_of(dim)) :]
        if missing_axes:
            result = array.resharded({dim: target.axes_of(dim)})
            return Step(op="slice", inputs=(array,), result=result, axes=missing_axes, dim=dim)
    return None


def _resolve_conflicts(lhs: ShardedArray, rhs: ShardedArray, out: ShardedArray) -> tuple[ShardedArray, ShardedArray]:
    """Returns operands in which no axis splits two different dims; the dim that ``out`` does not keep on the axis loses
    it."""
    for axis in lhs.spread:
        left_dim, right_dim = lhs.dim_on(axis), rhs.dim_on(axis)
        if left_dim is None or right_dim is None or left_dim == right_dim:
            continue
        keeps_left, keeps_right = axis in out.axes_of(left_dim), axis in out.axes_of(right_dim)
        lhs_yields = keeps_right if keeps_left != keeps_right else left_dim not in out.dims or right_dim in out.dims
        # axes that are minor to it on the same dim are given up with it
        if lhs_yields:
            lhs = lhs.resharded({left_dim: lhs.axes_of(left_dim)[: lhs.axes_of(left_dim).index(axis)]})
        else:
            rhs = rhs.resharded({right_dim: rhs.axes_of(right_dim)[: rhs.axes_of(right_dim).index(axis)]})
    return lhs, rhs


def align(
    lhs: ShardedArray, rhs: ShardedArray, out: ShardedArray, *, slice_axes: Collection[str] = ()
) -> tuple[ShardedArray, ShardedArray]:
    """Returns the two operands, sharded so that they can be multiplied locally.

    Where they split a shared dim differently, the further axes are gathered, unless the other operand can take these
    axes: by an all-to-all (they split another dim of it), by a slice (the output keeps the axes on the dim, or is
    unreduced over them), or because the axes are in ``slice_axes``.
    """
    left, right = _resolve_conflicts(lhs, rhs, out)
    for dim in (d for d in lhs.dims if d in rhs.dims and left.axes_of(d) != right.axes_of(d)):
        left_axes, right_axes = left.axes_of(dim), right.axes_of(dim)
        if _may_take(lhs, left, out, dim, right_axes, slice_axes):
            left_axes = right_axes
        elif _may_take(rhs, right, out, dim, left_axes, slice_axes):
            right_axes = left_axes
        else:
            left_axes = right_axes = common_prefix(left_axes, right_axes)
        left, right = left.resharded({dim: left_axes}), right.resharded({dim: right_axes})
    return left, right


def _may_take(
    old: ShardedArray, array: ShardedArray, out: ShardedArray, dim: str, wanted_axes: Axes, slice_axes: Collection[str]
) -> bool:
    own_axes = array.axes_of(dim)
    new_axes = wanted_axes[len(own_axes) :]
    if not new_axes or wanted_axes[: len(own_axes)] != own_axes or any(a in array.spread for a in new_axes):
        return False
    uses_axes = all(a in old.spread for a in new_axes)
    is_kept = dim in out.dims and out.axes_of(dim)[: len(wanted_axes)] == wanted_axes
    is_left_unreduced = dim not in out.dims and all(a in out.unreduced for a in new_axes)
    return uses_axes or is_kept or is_left_unreduced or all(a in slice_axes for a in new_axes)


def local_product(lhs: ShardedArray, rhs: ShardedArray, out: ShardedArray) -> ShardedArray:
    """Returns the local product of two aligned operands, unreduced over the axes that split contracted dims."""
    axes = tuple(lhs.axes_of(d) if d in lhs.dims else rhs.axes_of(d) for d in out.dims)
    unreduced: list[str] = []
    for array in (lhs, rhs):
        for dim in (d for d in array.dims if d not in out.dims):
            unreduced.extend(a for a in array.axes_of(dim) if a not in unreduced)
    return out.replace(axes=axes, unreduced=tuple(unreduced))


def product_steps(
    lhs: ShardedArray, rhs: ShardedArray, out: ShardedArray, *, slice_axes: Collection[str] = ()
) -> tuple[Step, ...]:
    """Returns the reshards of both operands and the local product, whose result is not yet reduced or resharded."""
    left, right = align(lhs.replace(unreduced=()), rhs.replace(unreduced=()), out, slice_axes=slice_axes)
    reshards = (*reshard(lhs, left), *reshard(rhs, right))
    result = local_product(left, right, out)
    return (*reshards, Step(op="einsum", inputs=(left, right), result=result))


def einsum_steps(
    lhs: ShardedArray, rhs: ShardedArray, out: ShardedArray, *, slice_axes: Collection[str] = ()
) -> tuple[Step, ...]:
    """Returns every step of ``lhs * rhs -> out`` for the shardings given: gathers, the local product, reductions.

    ``slice_axes``: mesh axes for which a contracted dim that only one side splits is sliced on the other
    side and reduced afterwards, instead of gathered.
    """
    steps = product_steps(lhs, rhs, out, slice_axes=slice_axes)
    return (*steps, *reshard(steps[-1].result, out))
