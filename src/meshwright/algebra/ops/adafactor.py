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
    """Returns the steps that make the moments, the scaled gradient, the mean squares of that gradient and of the
    weight, and the clipped change of the weight."""
    shard, name, steps = weight.shard, weight.shard.name, list[Step]()

    def run(op: str, inputs: tuple[ShardedArray, ...], result: ShardedArray, *more: ShardedArray) -> None:
        steps.append(Step(op=op, inputs=inputs, result=result, more=more))

    def summed(part: ShardedArray) -> ShardedArray:
        """Returns the whole mean, with the AllReduce added where devices have parts of it."""
        steps.extend(reshard(part, part.replace(unreduced=())))
        return part.replace(unreduced=())

    gradient, weight_values = stacked(weight, f"d{name}").replace(dtype=""), stacked(weight, name).replace(dtype="")
    counted_dims = tuple(dim for dim in (weight.layers, *weight.batch) if dim)
    scaled_grad = stacked(weight, f"{name}.scaled")
    grad_squares, w_squares = (_mean(scaled_grad, f"{name}.{part}", counted_dims) for part in ("squares", "weights"))
    if weight.inputs:
        row_means = _mean(scaled_grad, f"{name}.rows", (*counted_dims, *weight.inputs))
        column_means = _mean(scaled_grad, f"{name}.columns", (*counted_dims, *outputs(weight)))
        run("adafactor_sums", (gradient,), row_means, column_means)
        whole_means = (summed(row_means), summed(column_means))
        moments = tuple(array.replace(name=f"{array.name}.state") for array in whole_means)
        mean_level = _mean(whole_means[0], f"{name}.level", counted_dims)
        run("adafactor_moments", (*whole_means, *moments), mean_level, *moments)
        run("adafactor_scale", (gradient, *moments, summed(mean_level)), scaled_grad, grad_squares)
    else:
        moment = stacked(weight, f"{name}.whole.state")
        run("adafactor_vector", (gradient, moment), scaled_grad, grad_squares, moment)
    run("adafactor_weights", (weight_values,), w_squares)
    change = stacked(weight, f"{name}.update")
    run("adafactor", (scaled_grad, summed(grad_squares), summed(w_squares)), change)
    run("adafactor_apply", (shard.replace(name=change.name, dtype="fp32"), shard), shard)
    return tuple(steps)


def _mean(array: ShardedArray, name: str, dims: Iterable[str]) -> ShardedArray:
    """Returns the mean of an array over all dims but ``dims``: unreduced where the averaged dims are split."""
    kept_dims = [dim for dim in array.dims if dim in tuple(dims)]
    averaged_axes = tuple(axis for dim in array.dims if dim not in kept_dims for axis in array.axes_of(dim))
    return ShardedArray(name, tuple(kept_dims), tuple(array.axes_of(dim) for dim in kept_dims), averaged_axes, "fp32")


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
