"""The rules of one sharded einsum, and of moving an array from one sharding to another.

Source of the rules: How to Scale Your Model, section 3. The algebra never decides by cost: where two
ways exist (`slice_axes`) the caller chooses.
"""

from collections.abc import Collection
from functools import lru_cache
from itertools import takewhile

from meshwright.algebra.notation import ShardedArray
from meshwright.algebra.steps import Step
from meshwright.core.errors import InputError

Axes = tuple[str, ...]


def common_prefix(left: Axes, right: Axes) -> Axes:
    """The axes both lists begin with."""
    return tuple(a for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False)))


@lru_cache(maxsize=4096)
def reshard(array: ShardedArray, target: ShardedArray) -> tuple[Step, ...]:
    """Steps that turn ``array`` into the sharding of ``target`` (same dims): rules 4 and 5.

    Unreduced axes that the target shards are reduce-scattered into place, the others all-reduced; then
    axes move by all-to-all where they only change dim, are gathered where the target lacks them, and are
    sliced where it adds them. Empty when nothing has to be done.
    """
    wanted = [axis for axis in target.unreduced if axis not in array.unreduced]
    if wanted:
        raise InputError(
            f"{array} has nothing left to sum over {', '.join(wanted)}, which {target} leaves unreduced. "
            f"Leave {{U_...}} out of what is wanted."
        )
    steps: list[Step] = []
    current = _reduce(array, target, steps)
    current = _move(current, target, steps)
    current = _gather(current, target, steps)
    _slice(current, target, steps)
    return tuple(steps)


def _add(steps: list[Step], op: str, source: ShardedArray, result: ShardedArray, **fields: object) -> ShardedArray:
    steps.append(Step(op=op, inputs=(source,), result=result, **fields))  # type: ignore[arg-type]
    return result


def _reduce(current: ShardedArray, target: ShardedArray, steps: list[Step]) -> ShardedArray:
    pending = [a for a in current.unreduced if a not in target.unreduced]
    scattered = True
    while pending and scattered:
        scattered = False
        for dim, have in zip(current.dims, current.axes, strict=True):
            want = target.axes_of(dim)
            if want[: len(have)] != have:
                continue
            run = tuple(takewhile(pending.__contains__, want[len(have) :]))
            if not run:
                continue
            pending = [a for a in pending if a not in run]
            left = tuple(a for a in current.unreduced if a not in run)
            result = current.resharded({dim: have + run}, unreduced=left)
            current = _add(steps, "reduce_scatter", current, result, axes=run, dim=dim)
            scattered = True
    if pending:
        left = tuple(a for a in current.unreduced if a not in pending)
        current = _add(steps, "all_reduce", current, current.replace(unreduced=left), axes=tuple(pending))
    return current


def _surplus(current: ShardedArray, target: ShardedArray, dim: str) -> Axes:
    have = current.axes_of(dim)
    return have[len(common_prefix(have, target.axes_of(dim))) :]


def _move(current: ShardedArray, target: ShardedArray, steps: list[Step]) -> ShardedArray:
    """All-to-alls of what the target has, next in order, on another dim: as many minor axes at once as can go."""
    move = _next_move(current, target)
    while move:
        dim, to_dim, axes = move
        kept = current.axes_of(dim)[: -len(axes)]
        result = current.resharded({dim: kept, to_dim: current.axes_of(to_dim) + axes})
        current = _add(steps, "all_to_all", current, result, axes=axes, dim=dim, to_dim=to_dim)
        move = _next_move(current, target)
    return current


def _next_move(current: ShardedArray, target: ShardedArray) -> tuple[str, str, Axes] | None:
    for dim in current.dims:
        surplus = _surplus(current, target, dim)
        for axes in (surplus[n:] for n in range(len(surplus))):
            for to_dim in current.dims:
                have, want = current.axes_of(to_dim), target.axes_of(to_dim)
                if to_dim != dim and want[: len(have) + len(axes)] == have + axes:
                    return dim, to_dim, axes
    return None


def _gather(current: ShardedArray, target: ShardedArray, steps: list[Step]) -> ShardedArray:
    # Axes that the target has nowhere go first: they may stand where another axis only has to move to.
    for dim in sorted(current.dims, key=lambda d: not set(target.spread).isdisjoint(_surplus(current, target, d))):
        surplus = _surplus(current, target, dim)
        if surplus:
            kept = current.axes_of(dim)[: -len(surplus)]
            current = _add(steps, "all_gather", current, current.resharded({dim: kept}), axes=surplus, dim=dim)
            current = _move(current, target, steps)
    return current


def _slice(current: ShardedArray, target: ShardedArray, steps: list[Step]) -> ShardedArray:
    for dim in current.dims:
        missing = target.axes_of(dim)[len(current.axes_of(dim)) :]
        if missing:
            result = current.resharded({dim: target.axes_of(dim)})
            current = _add(steps, "slice", current, result, axes=missing, dim=dim)
    return current


def _conflicts(lhs: ShardedArray, rhs: ShardedArray) -> list[tuple[str, str, str]]:
    """(axis, dim of lhs, dim of rhs) for every axis that splits different dims of the two."""
    found = []
    for axis in lhs.spread:
        left, right = lhs.dim_on(axis), rhs.dim_on(axis)
        if left is not None and right is not None and left != right:
            found.append((axis, left, right))
    return found


def _without(array: ShardedArray, axis: str) -> ShardedArray:
    """The array after giving up ``axis``, and with it whatever is minor to it on the same dim."""
    dim = array.dim_on(axis)
    if dim is None:
        return array
    have = array.axes_of(dim)
    return array.resharded({dim: have[: have.index(axis)]})


def _resolve_conflicts(lhs: ShardedArray, rhs: ShardedArray, out: ShardedArray) -> tuple[ShardedArray, ShardedArray]:
    """Rule 1: of two dims that one axis splits, the one that the output does not keep on it yields."""
    for axis, left, right in _conflicts(lhs, rhs):
        if lhs.dim_on(axis) != left or rhs.dim_on(axis) != right:
            continue
        keeps_left, keeps_right = axis in out.axes_of(left), axis in out.axes_of(right)
        if keeps_left != keeps_right:
            lhs_yields = keeps_right
        else:
            lhs_yields = left not in out.dims or right in out.dims
        lhs, rhs = (_without(lhs, axis), rhs) if lhs_yields else (lhs, _without(rhs, axis))
    return lhs, rhs


def _align_shared(
    lhs: ShardedArray, rhs: ShardedArray, dim: str, *, lhs_takes: bool, rhs_takes: bool
) -> tuple[ShardedArray, ShardedArray]:
    """Both operands with the same axes on a dim they share; a side takes the other's axes or they are gathered."""
    left, right = lhs.axes_of(dim), rhs.axes_of(dim)
    if left == right:
        return lhs, rhs
    if lhs_takes and right[: len(left)] == left:
        return lhs.resharded({dim: right}), rhs
    if rhs_takes and left[: len(right)] == right:
        return lhs, rhs.resharded({dim: left})
    kept = common_prefix(left, right)
    return lhs.resharded({dim: kept}), rhs.resharded({dim: kept})


def align(
    lhs: ShardedArray, rhs: ShardedArray, out: ShardedArray, *, slice_axes: Collection[str] = ()
) -> tuple[ShardedArray, ShardedArray]:
    """The shardings in which the two operands can be multiplied locally: rules 1 and 2.

    A shared dim that only one side splits is gathered there, unless the other side may take the axes
    without communication worth naming: by an all-to-all (it has just given them up on another dim), by a
    free slice that the output keeps (a batch dim, or a sum that is wanted unreduced), or because the axes
    are in ``slice_axes``.
    """
    left, right = _resolve_conflicts(lhs, rhs, out)
    for dim in (d for d in lhs.dims if d in rhs.dims):
        only_left = left.axes_of(dim)[len(common_prefix(left.axes_of(dim), right.axes_of(dim))) :]
        only_right = right.axes_of(dim)[len(common_prefix(left.axes_of(dim), right.axes_of(dim))) :]
        left, right = _align_shared(
            left,
            right,
            dim,
            lhs_takes=_may_take(lhs, left, out, dim, only_right, slice_axes),
            rhs_takes=_may_take(rhs, right, out, dim, only_left, slice_axes),
        )
    return left, right


def _may_take(
    before: ShardedArray, now: ShardedArray, out: ShardedArray, dim: str, axes: Axes, slice_axes: Collection[str]
) -> bool:
    if not axes or any(a in now.spread for a in axes):
        return False
    gave_up = all(a in before.spread for a in axes)
    kept = now.axes_of(dim) + axes
    kept_by_output = dim in out.dims and out.axes_of(dim)[: len(kept)] == kept
    left_unreduced = dim not in out.dims and all(a in out.unreduced for a in axes)
    return gave_up or kept_by_output or left_unreduced or all(a in slice_axes for a in axes)


def local_product(lhs: ShardedArray, rhs: ShardedArray, out: ShardedArray) -> ShardedArray:
    """Sharding of the local contraction of two aligned operands, unreduced where a contracted dim is split: rule 3."""
    axes = tuple(lhs.axes_of(d) if d in lhs.dims else rhs.axes_of(d) for d in out.dims)
    unreduced: list[str] = []
    for array in (lhs, rhs):
        for dim in (d for d in array.dims if d not in out.dims):
            unreduced.extend(a for a in array.axes_of(dim) if a not in unreduced)
    return out.replace(axes=axes, unreduced=tuple(unreduced))


def reduced(array: ShardedArray) -> ShardedArray:
    """The same sharding with nothing left to sum."""
    return array.replace(unreduced=())


def product_steps(
    lhs: ShardedArray, rhs: ShardedArray, out: ShardedArray, *, slice_axes: Collection[str] = ()
) -> tuple[Step, ...]:
    """Steps up to and with the local contraction, its result not yet reduced or moved."""
    left, right = align(reduced(lhs), reduced(rhs), out, slice_axes=slice_axes)
    before = (*reshard(lhs, left), *reshard(rhs, right))
    result = local_product(left, right, out)
    return (*before, Step(op="einsum", inputs=(left, right), result=result))


def einsum_steps(
    lhs: ShardedArray, rhs: ShardedArray, out: ShardedArray, *, slice_axes: Collection[str] = ()
) -> tuple[Step, ...]:
    """Every step of ``lhs * rhs -> out`` for the shardings given: gathers, the local product, reductions.

    ``slice_axes``: mesh axes for which a contracted dim that only one side splits is sliced on the other
    side and reduced afterwards, instead of gathered.
    """
    steps = product_steps(lhs, rhs, out, slice_axes=slice_axes)
    return (*steps, *reshard(steps[-1].result, out))
