"""Adafactor: second moments of the rows and columns of each matrix, or of each entry of a vector; no first moment.

Means over split dims are sums of the devices' parts: row means, column means, the mean of the row means, and the mean
squares that clip an update and scale it by its weights.
"""

from collections.abc import Iterable
from functools import partial

from meshwright.algebra.einsum import reshard
from meshwright.algebra.kinds import CountRule, OpKind, StepKind, Updated, stream
from meshwright.algebra.notation import ShardedArray
from meshwright.algebra.ops.adamw import gradient_bytes
from meshwright.algebra.sizes import Number, OpSizes, master_bytes
from meshwright.algebra.steps import Step


def outputs(weight: Updated) -> tuple[str, ...]:
    """Returns the output dims of a weight's matrices; for a vector, all dims that do not count matrices."""
    return tuple(dim for dim in weight.shard.dims if dim not in (*weight.inputs, *weight.batch))


def stacked(weight: Updated, name: str) -> ShardedArray:
    """Returns a float32 array of this name, sharded as a weight is, with its layers as the first dim."""
    shard = weight.shard
    if not weight.layers:
        return shard.replace(name=name, dtype="fp32")
    return ShardedArray(name, (weight.layers, *shard.dims), (weight.layer_axes, *shard.axes), dtype="fp32")


def update(weight: Updated) -> tuple[Step, ...]:
    """Returns the steps that make the moments, the scaled gradient, the mean squares of it and of the weight, and the
    clipped change."""
    shard, name, steps = weight.shard, weight.shard.name, list[Step]()

    def run(op: str, inputs: tuple[ShardedArray, ...], result: ShardedArray, *more: ShardedArray) -> None:
        steps.append(Step(op=op, inputs=inputs, result=result, more=more))

    def summed(part: ShardedArray) -> ShardedArray:
        """Returns the whole mean, with the AllReduce added where devices have parts of it."""
        steps.extend(reshard(part, part.replace(unreduced=())))
        return part.replace(unreduced=())

    gradient, values = stacked(weight, f"d{name}").replace(dtype=""), stacked(weight, name).replace(dtype="")
    counted_dims = tuple(dim for dim in (weight.layers, *weight.batch) if dim)
    scaled = stacked(weight, f"{name}.scaled")
    squares, weights = (_mean(scaled, f"{name}.{part}", counted_dims) for part in ("squares", "weights"))
    if weight.inputs:
        rows = _mean(scaled, f"{name}.rows", (*counted_dims, *weight.inputs))
        columns = _mean(scaled, f"{name}.columns", (*counted_dims, *outputs(weight)))
        run("adafactor_sums", (gradient,), rows, columns)
        sums = (summed(rows), summed(columns))
        moments = tuple(array.replace(name=f"{array.name}.state") for array in sums)
        level = _mean(sums[0], f"{name}.level", counted_dims)
        run("adafactor_moments", (*sums, *moments), level, *moments)
        run("adafactor_scale", (gradient, *moments, summed(level)), scaled, squares)
    else:
        moment = stacked(weight, f"{name}.whole.state")
        run("adafactor_vector", (gradient, moment), scaled, squares, moment)
    run("adafactor_weights", (values,), weights)
    change = stacked(weight, f"{name}.update")
    run("adafactor", (scaled, summed(squares), summed(weights)), change)
    run("adafactor_apply", (shard.replace(name=change.name, dtype="fp32"), shard), shard)
    return tuple(steps)


def _mean(array: ShardedArray, name: str, dims: Iterable[str]) -> ShardedArray:
    """Returns the mean of an array over all dims but ``dims``: unreduced where the averaged dims are split."""
    remaining = [dim for dim in array.dims if dim in tuple(dims)]
    averaged_axes = tuple(axis for dim in array.dims if dim not in remaining for axis in array.axes_of(dim))
    return ShardedArray(name, tuple(remaining), tuple(array.axes_of(dim) for dim in remaining), averaged_axes, "fp32")


def gradient_stream(step: Step, sizes: OpSizes, *, reads: int = 1) -> Number:
    """Returns the bytes of inputs and results, with the gradient in the dtype of the state and read ``reads`` times."""
    gradient = step.inputs[0]
    return stream(step, sizes) - sizes.bytes(gradient) + reads * gradient_bytes(gradient, sizes)


def apply_bytes(step: Step, sizes: OpSizes) -> Number:
    """Returns the bytes of the float32 change, read, and of the weights and their master copy, read and written."""
    change, weight = step.inputs
    return sizes.bytes(change) + 2 * sizes.elements(weight) * (sizes.width + master_bytes(sizes.state))


COUNTS: dict[str, CountRule] = {
    # the first use reads the gradient once more, for its norm
    "adafactor_sums": partial(gradient_stream, reads=2),
    "adafactor_moments": stream,
    "adafactor_scale": gradient_stream,
    "adafactor_vector": partial(gradient_stream, reads=2),
    # weights read, from their float32 copy if the state keeps one, and the result
    "adafactor_weights": lambda step, sizes: (
        sizes.elements(*step.inputs) * (master_bytes(sizes.state) or sizes.width) + sizes.bytes(step.result)
    ),
    "adafactor": stream,
    "adafactor_apply": apply_bytes,
}
OP = OpKind(
    update=update,
    steps={name: StepKind(hbm_bytes=rule, group="optimizer") for name, rule in COUNTS.items()},
)
