"""AdamW: two moments of each weight, the running means of the gradient and of the squared gradient."""

from functools import partial

from meshwright.algebra.kinds import OpKind, StepKind, Updated
from meshwright.algebra.notation import ShardedArray
from meshwright.algebra.sizes import Number, OpSizes, master_bytes, moment_bytes
from meshwright.algebra.steps import Step
from meshwright.spec.strategy import STATE_BYTES


def elementwise_update(op: str, kinds: tuple[str, ...], weight: Updated) -> tuple[Step, ...]:
    """Returns the step of optimizer ``op``, which updates each entry by itself, with a running mean of each kind."""
    shard = weight.shard
    means = tuple(shard.replace(name=f"{shard.name}.{kind}.state", dtype="fp32") for kind in kinds)
    return (Step(op=op, inputs=(shard.replace(name=f"d{shard.name}"), shard, *means), result=shard, more=means),)


def update_bytes(step: Step, sizes: OpSizes) -> Number:
    """Returns the bytes of two reads of the gradient, and of weights, moments and master copy, read and written."""
    gradient, weight, *moments = step.inputs
    element_bytes = sizes.width + master_bytes(sizes.state) + len(moments) * moment_bytes(sizes.state)
    return 2 * gradient_bytes(gradient, sizes) + 2 * sizes.elements(weight) * element_bytes


def gradient_bytes(gradient: ShardedArray, sizes: OpSizes) -> Number:
    """Returns the bytes of a gradient in the dtype of the training state."""
    return sizes.elements(gradient) * STATE_BYTES[sizes.state]["gradients"]


def elementwise_optimizer(name: str, *kinds: str) -> OpKind:
    """Returns the `OpKind` of an elementwise optimizer called ``name`` that keeps running means of these kinds."""
    return OpKind(
        update=partial(elementwise_update, name, kinds),
        steps={name: StepKind(hbm_bytes=update_bytes, group="optimizer")},
    )


MEANS = ("mu", "nu")
OP = elementwise_optimizer("adamw", *MEANS)
