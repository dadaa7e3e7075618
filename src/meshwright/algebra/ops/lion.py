"""Lion: one moment of each weight, the sign of a mix of it and the gradient."""

from meshwright.algebra.kinds import OpKind, StepKind, Updated
from meshwright.algebra.notation import ShardedArray
from meshwright.algebra.ops.adamw import elementwise_update, update_bytes
from meshwright.algebra.sizes import Number, OpSizes
from meshwright.algebra.steps import Step


def update(weight: Updated) -> tuple[Step, ...]:
    """One elementwise step on the device's shard."""
    return elementwise_update("lion", weight)


def moments(weight: Updated) -> tuple[ShardedArray, ...]:
    """The running mean of the gradient."""
    return (weight.shard,)


def hbm_bytes(step: Step, sizes: OpSizes) -> Number:
    """As AdamW's, with one moment."""
    return update_bytes(step, sizes, num_moments=1)


OP = OpKind(update=update, moments=moments, steps={"lion": StepKind(hbm_bytes=hbm_bytes, group="optimizer")})
