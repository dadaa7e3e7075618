"""The loss head with both passes joined: loss and slopes from the same logits. `rewrites.fused_head` makes it."""

from meshwright.algebra.kinds import OpKind, StepKind, stream
from meshwright.algebra.ops.linear_cross_entropy import chunk_bytes, chunked_flops, local_logits, num_chunks
from meshwright.algebra.sizes import Number, OpSizes
from meshwright.algebra.steps import Step
from meshwright.core.dims import DTYPE_BYTES

PASSES = 7
"""Of the logits: written, read twice for the statistics and once for their cotangent, which is written and read by two
products."""


def flops(step: Step, sizes: OpSizes) -> Number:
    """The logits, and the products for the stream and for the table."""
    return 3 * chunked_flops(step, sizes)


def hbm_bytes(step: Step, sizes: OpSizes) -> Number:
    """The stream and its slope; the table and its slope once for every chunk; passes over the float32 logits."""
    again = (num_chunks(step, sizes) - 1) * sizes.total(step.inputs[1], step.more[1])
    return stream(step, sizes) + again + PASSES * DTYPE_BYTES["fp32"] * local_logits(step, sizes)


OP = OpKind(
    steps={
        "fused_head": StepKind(flops=flops, hbm_bytes=hbm_bytes, group="contraction", chunk_bytes=chunk_bytes),
        "scale": StepKind(in_place=True),
    }
)
