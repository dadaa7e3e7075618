"""AdamW on one device's shard of a weight."""

from meshwright.algebra.kinds import OpKind, StepKind
from meshwright.algebra.sizes import Number, OpSizes
from meshwright.algebra.steps import Step
from meshwright.spec.strategy import STATE_BYTES


def hbm_bytes(step: Step, sizes: OpSizes) -> Number:
    """Gradient read twice (its norm, its use); weights, moments and master copy read and written."""
    state = STATE_BYTES[sizes.state]
    gradient, weight = (sizes.elements(array) for array in step.inputs)
    return 2 * gradient * state["gradients"] + 2 * weight * (state["weights"] + state["optimizer"])


OP = OpKind(steps={"adamw": StepKind(hbm_bytes=hbm_bytes, group="optimizer", num_kernels=0)})
