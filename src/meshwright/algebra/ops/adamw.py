"""AdamW: two moments of each weight, the running means of its gradient and of its square."""

from functools import partial

from meshwright.algebra.kinds import OpKind, StepKind, Updated
from meshwright.algebra.notation import ShardedArray
from meshwright.algebra.sizes import Number, OpSizes, master_bytes, moment_bytes
from meshwright.algebra.steps import Step
from meshwright.spec.strategy import STATE_BYTES


def elementwise_update(op: str, weight: Updated) -> tuple[Step, ...]:
    """Returns the step of an optimizer that works on each entry by itself."""
    shard = weight.shard
    return (Step(op=op, inputs=(shard.replace(name=f"d{shard.name}"), shard), result=shard),)


def update_bytes(step: Step, sizes: OpSizes, *, num_moments: int) -> Number:
    """Counts two reads of the gradient (norm and use), and weights, moments and master copy, read and written."""
    gradient, weight = step.inputs
    element_bytes = sizes.width + master_bytes(sizes.state) + num_moments * moment_bytes(sizes.state)
    return 2 * gradient_bytes(gradient, sizes) + 2 * sizes.elements(weight) * element_bytes


def gradient_bytes(gradient: ShardedArray, sizes: OpSizes) -> Number:
    """Returns the bytes of a gradient in the dtype of the training state."""
    return sizes.elements(gradient) * STATE_BYTES[sizes.state]["gradients"]


def elementwise_optimizer(name: str, *, num_moments: int) -> OpKind:
    """Returns the kind of an elementwise optimizer that keeps ``num_moments`` running means."""
    hbm_bytes = partial(update_bytes, num_moments=num_moments)
    return OpKind(
        update=partial(elementwise_update, name),
        moments=lambda weight: (weight.shard,) * num_moments,
        steps={name: StepKind(hbm_bytes=hbm_bytes, group="optimizer")},
    )


OP = elementwise_optimizer("adamw", num_moments=2)
