"""Adafactor: second moments by the rows and columns of each matrix, whole for vectors; no first moment.

Means over split dims are sums of the devices' parts: of rows and columns, of the level of the rows, and of the squares
that clip an update and scale it by its weights.
"""

from collections.abc import Iterable

from meshwright.algebra.kinds import OpKind, StepKind, Updated, stream
from meshwright.algebra.notation import ShardedArray
from meshwright.algebra.ops.adamw import gradient_bytes
from meshwright.algebra.sizes import Number, OpSizes, master_bytes
from meshwright.algebra.steps import Step


def outputs(weight: Updated) -> tuple[str, ...]:
    """The dims that come out of a weight's matrices; all dims of a vector but those of ``batch``."""
    return tuple(dim for dim in weight.shard.dims if dim not in (*weight.inputs, *weight.batch))


def stacked(weight: Updated, name: str) -> ShardedArray:
    """An array of this name like a weight's shards of all layers, the layers in front, in float32."""
    shard = weight.shard
    if not weight.layers:
        return shard.replace(name=name, dtype="fp32")
    return ShardedArray(name, (weight.layers, *shard.dims), (weight.layer_axes, *shard.axes), dtype="fp32")


def update(weight: Updated) -> tuple[Step, ...]:
    """Moments, the scaled gradient, its root mean square and that of the weight, the clipped change."""
    name = weight.shard.name
    gradient, own = stacked(weight, f"d{name}").replace(dtype=""), stacked(weight, name).replace(dtype="")
    decay = ShardedArray("decay", (), (), dtype="fp32")
    counted = tuple(dim for dim in (weight.layers, *weight.batch) if dim)
    scaled = stacked(weight, f"{name}.scaled")
    squares, sizes_ = (_mean(scaled, f"{name}.{part}", counted) for part in ("squares", "weights"))
    steps: list[Step] = []
    if weight.inputs:
        rows = _mean(scaled, f"{name}.rows", (*counted, *weight.inputs))
        columns = _mean(scaled, f"{name}.columns", (*counted, *outputs(weight)))
        level = _mean(rows.replace(unreduced=()), f"{name}.level", counted)
        steps.append(Step(op="adafactor_sums", inputs=(gradient,), result=rows, more=(columns,)))
        summed = tuple(_summed(steps, array) for array in (rows, columns))
        before = tuple(array.replace(name=f"{array.name}.before") for array in summed)
        after = tuple(array.replace(name=f"{array.name}.after") for array in summed)
        steps.append(Step(op="adafactor_moments", inputs=(*summed, *before, decay), result=level, more=after))
        whole = _summed(steps, level)
        steps.append(Step(op="adafactor_scale", inputs=(gradient, *after, whole), result=scaled, more=(squares,)))
    else:
        old, new = (stacked(weight, f"{name}.whole.{when}") for when in ("before", "after"))
        steps.append(Step(op="adafactor_vector", inputs=(gradient, old, decay), result=scaled, more=(squares, new)))
    steps.append(Step(op="adafactor_weights", inputs=(own,), result=sizes_))
    means = [_summed(steps, array) for array in (squares, sizes_)]
    change = stacked(weight, f"{name}.update")
    steps.append(Step(op="adafactor", inputs=(scaled, *means), result=change))
    shard = weight.shard
    apply = Step(op="adafactor_apply", inputs=(shard.replace(name=change.name, dtype="fp32"), shard), result=shard)
    return (*steps, apply)


def _mean(array: ShardedArray, name: str, dims: Iterable[str]) -> ShardedArray:
    """What is left of an array over some of its dims: a part of the mean where the other dims are split."""
    kept = [dim for dim in array.dims if dim in tuple(dims)]
    missing = tuple(axis for dim in array.dims if dim not in kept for axis in array.axes_of(dim))
    return ShardedArray(name, tuple(kept), tuple(array.axes_of(dim) for dim in kept), missing, "fp32")


def _summed(steps: list[Step], part: ShardedArray) -> ShardedArray:
    """The whole mean, with the AllReduce added where devices have parts of it."""
    whole = part.replace(unreduced=())
    if part.unreduced:
        steps.append(Step(op="all_reduce", inputs=(part,), result=whole, axes=part.unreduced))
    return whole


def moments(weight: Updated) -> tuple[ShardedArray, ...]:
    """Rows and columns of a matrix, all of a vector, of one layer."""
    shard = weight.shard
    if not weight.inputs:
        return (shard,)
    return tuple(_mean(shard, shard.name, (*weight.batch, *dims)) for dims in (weight.inputs, outputs(weight)))


def gradient_stream(step: Step, sizes: OpSizes) -> Number:
    """Every input read and every result written once, the gradient as the training state keeps it."""
    gradient = step.inputs[0]
    return stream(step, sizes) - sizes.bytes(gradient) + gradient_bytes(gradient, sizes)


def first_stream(step: Step, sizes: OpSizes) -> Number:
    """The same, the gradient read once more, for its norm."""
    return gradient_stream(step, sizes) + gradient_bytes(step.inputs[0], sizes)


def weights_stream(step: Step, sizes: OpSizes) -> Number:
    """The weights read: their float32 copy, where there is one."""
    (weight,) = step.inputs
    return sizes.elements(weight) * (master_bytes(sizes.state) or sizes.width) + sizes.bytes(step.result)


def apply_bytes(step: Step, sizes: OpSizes) -> Number:
    """A change in float32 read; weights and master copy read and written."""
    change, weight = step.inputs
    return sizes.bytes(change) + 2 * sizes.elements(weight) * (sizes.width + master_bytes(sizes.state))


OP = OpKind(
    update=update,
    moments=moments,
    steps={
        name: StepKind(hbm_bytes=count, group="optimizer")
        for name, count in {
            "adafactor_sums": first_stream,
            "adafactor_moments": stream,
            "adafactor_scale": gradient_stream,
            "adafactor_vector": first_stream,
            "adafactor_weights": weights_stream,
            "adafactor": stream,
            "adafactor_apply": apply_bytes,
        }.items()
    },
)
