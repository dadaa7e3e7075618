"""Lion: one moment of each weight, the sign of a mix of it and the gradient."""

from functools import partial

from meshwright.algebra.kinds import OpKind, StepKind, Updated
from meshwright.algebra.notation import ShardedArray
from meshwright.algebra.ops.adamw import elementwise_update, update_bytes


def moments(weight: Updated) -> tuple[ShardedArray, ...]:
    """The running mean of the gradient."""
    return (weight.shard,)


OP = OpKind(
    update=partial(elementwise_update, "lion"),
    moments=moments,
    steps={"lion": StepKind(hbm_bytes=partial(update_bytes, num_moments=1), group="optimizer")},
)
