"""The loss head in chunks, and with both passes joined: loss and slopes from the same logits. The rules of
`ops.linear_cross_entropy` and `rewrites.fused_head` make these steps; no program names them."""

from meshwright.algebra.kinds import OpKind, StepKind, stream
from meshwright.algebra.ops.einsum import flops
from meshwright.algebra.sizes import Number, OpSizes
from meshwright.algebra.steps import Step
from meshwright.core.dims import DTYPE_BYTES

CHUNK_TOKENS = 1024
"""Tokens per device whose logits exist at once where the loss head works in chunks (remat "full")."""

PASSES = {"chunked_logits_statistics": 3, "chunked_logits_backward": 4, "fused_head": 5}
"""Reads and writes of the logits. Statistics write them and read them twice; the backward pass writes and reads them
and their cotangent. The fused head writes them, reads them twice for the statistics and once for their cotangent, which
it writes. Each product that makes a cotangent, of the stream and of a table that trains, is one more read."""


def num_cotangents(step: Step) -> int:
    """Returns the number of cotangents that a step makes by a product: of the stream, and of a table that trains."""
    return 0 if step.op == "chunked_logits_statistics" else sum("D" in array.dims for array in step.results)


def backward_flops(step: Step, sizes: OpSizes) -> Number:
    """Returns the FLOPs of the logits, and as many for each cotangent that the step makes."""
    return (1 + num_cotangents(step)) * flops(step, sizes)


def local_logits(step: Step, sizes: OpSizes) -> Number:
    """Returns the number of local logits of a step, which exist one chunk at a time."""
    local_sizes = sizes.local(*step.inputs[:2])
    return local_sizes["B"] * local_sizes["T"] * local_sizes["V"]


def num_chunks(step: Step, sizes: OpSizes) -> Number:
    """Returns the number of chunks of a loss head on one device, at least 1, not rounded up."""
    local_sizes = sizes.local(*step.inputs[:2])
    exact_chunks = local_sizes["B"] * local_sizes["T"] / CHUNK_TOKENS
    return (exact_chunks + 1 + abs(exact_chunks - 1)) / 2  # the larger of chunks and 1


def hbm_bytes(step: Step, sizes: OpSizes) -> Number:
    """Returns the bytes of inputs and results (the table and its gradient once per chunk) and of passes over logits."""
    num_out = num_cotangents(step)
    tables = (step.inputs[1], *(array for array in step.results if array.dims == step.inputs[1].dims))
    reread = (num_chunks(step, sizes) - 1) * sizes.total(*tables)
    return stream(step, sizes) + reread + (PASSES[step.op] + num_out) * DTYPE_BYTES["fp32"] * local_logits(step, sizes)


def chunk_bytes(step: Step, sizes: OpSizes) -> Number:
    """Returns the bytes of one chunk's logits and their cotangent, in float32.

    A fused head on TPUs makes the cotangent inside its products, unless the logits are capped, and keeps the table's
    cotangent in float32 until its last chunk.
    """
    chunk_logits_bytes = DTYPE_BYTES["fp32"] * local_logits(step, sizes) / num_chunks(step, sizes)
    if step.op != "fused_head" or not sizes.tile_rows:
        return 2 * chunk_logits_bytes
    tables = (array for array in step.results if array.dims == step.inputs[1].dims)
    widened_bytes = sum(DTYPE_BYTES["fp32"] * sizes.elements(array) - sizes.bytes(array) for array in tables)
    return chunk_logits_bytes * (2 if step.details and step.details.softcap else 1) + widened_bytes


OP = OpKind(
    steps={
        "chunked_logits_statistics": StepKind(
            flops=flops, hbm_bytes=hbm_bytes, group="contraction", chunk_bytes=chunk_bytes
        ),
        "chunked_logits_backward": StepKind(flops=backward_flops, hbm_bytes=hbm_bytes, group="contraction"),
        "fused_head": StepKind(flops=backward_flops, hbm_bytes=hbm_bytes, group="contraction", chunk_bytes=chunk_bytes),
        "scale": StepKind(in_place=True),
    }
)
