"""FLOPs and bytes of products, elementwise ops, look-ups, experts, the loss head and the optimizer on one device."""

from typing import Any

from meshwright.algebra.notation import product
from meshwright.algebra.steps import Step
from meshwright.algebra.transformer import HEAD_CHUNK_TOKENS
from meshwright.core.dims import DTYPE_BYTES
from meshwright.cost.work.sizes import Number, OpSizes
from meshwright.spec.strategy import STATE_BYTES


def nothing(step: Step, sizes: OpSizes) -> Number:
    """No matrix product, or nothing moved."""
    return 0.0


def stream(step: Step, sizes: OpSizes) -> Number:
    """Every input read and every result written once."""
    return sizes.total(*step.inputs, step.result, *step.more)


def row_stream(step: Step, sizes: OpSizes) -> Number:
    """A reduction over each row, then an elementwise pass: the first input is read twice."""
    return stream(step, sizes) + sizes.bytes(step.inputs[0])


def row_stream_backward(step: Step, sizes: OpSizes) -> Number:
    """Both the cotangent and the primal are read for the reductions and again for the result."""
    return stream(step, sizes) + sizes.total(*step.inputs[:2])


def einsum_flops(step: Step, sizes: OpSizes) -> Number:
    """2 for every combination of the dims of both operands."""
    return 2.0 * product(sizes.local(*step.inputs).values())


def fused_vectors(step: Step, sizes: OpSizes) -> Number:
    """An op on the way out of the product before it: compilers and libraries add a bias in the epilogue, so that only
    its vector is read beside."""
    return sizes.total(*step.inputs[1:])


# -- look-ups -------------------------------------------------------------------------------------------


def embed_bytes(step: Step, sizes: OpSizes) -> Number:
    """One row is read and written for each token; the rest of the table stays where it is."""
    return sizes.bytes(step.inputs[0]) + 2 * sizes.bytes(step.result)


def embed_backward_bytes(step: Step, sizes: OpSizes) -> Number:
    """The gradient of the table is cleared, then one row is read, added to and written for each token."""
    return sizes.total(*step.inputs, step.result) + 2 * sizes.bytes(step.inputs[1])


def dispatch_bytes(step: Step, sizes: OpSizes) -> Number:
    """One row of the stream is read for every slot that is written."""
    return sizes.bytes(step.inputs[1]) + 2 * sizes.bytes(step.result)


def combine_backward_bytes(step: Step, sizes: OpSizes) -> Number:
    """For every slot a row of the cotangent and one of the result read, and one written."""
    return sizes.bytes(step.result) + stream(step, sizes) - sizes.bytes(step.inputs[0])


# -- the loss head in chunks -------------------------------------------------------------------------------


def chunked_flops(step: Step, sizes: OpSizes) -> Number:
    """The product of the stream and the table."""
    return 2.0 * product(sizes.local(*step.inputs[:2]).values())


def chunked_backward_flops(step: Step, sizes: OpSizes) -> Number:
    """The logits again where the vocabulary is split, then the products for the stream and for the table.

    A device with the whole vocabulary makes the logits once (`algebra.rewrites.fused_head`).
    """
    return (2 + _is_split(step, sizes)) * chunked_flops(step, sizes)


def _is_split(step: Step, sizes: OpSizes) -> Any:
    """1 where several devices share the vocabulary of a chunked step, else 0."""
    return product(sizes.mesh[axis] for axis in step.inputs[1].axes_of("V")) > 1


def _logits(step: Step, sizes: OpSizes) -> Number:
    """Local logits of a chunked step, which exist one chunk at a time."""
    local = sizes.local(*step.inputs[:2])
    return local["B"] * local["T"] * local["V"]


def num_chunks(step: Step, sizes: OpSizes) -> Number:
    """Chunks of a chunked loss head on one device; not rounded up, so that sizes may be arrays."""
    local = sizes.local(*step.inputs[:2])
    chunks = local["B"] * local["T"] / HEAD_CHUNK_TOKENS
    return (chunks + 1 + abs(chunks - 1)) / 2  # the larger of chunks and 1


def chunked_bytes(step: Step, sizes: OpSizes) -> Number:
    """As the kept logits' product and statistics, the table once for every chunk."""
    again = (num_chunks(step, sizes) - 1) * sizes.bytes(step.inputs[1])
    return stream(step, sizes) + again + 3 * DTYPE_BYTES["fp32"] * _logits(step, sizes)


def chunked_backward_bytes(step: Step, sizes: OpSizes) -> Number:
    """Logits, where they are made again, and their cotangent written and read; the table and its gradient once for
    every chunk."""
    again = (num_chunks(step, sizes) - 1) * sizes.total(step.inputs[1], step.more[0])
    passes = 4 + 2 * _is_split(step, sizes)
    return stream(step, sizes) + again + passes * DTYPE_BYTES["fp32"] * _logits(step, sizes)


# -- the optimizer ----------------------------------------------------------------------------------------


def adamw_bytes(step: Step, sizes: OpSizes) -> Number:
    """Gradient read twice (its norm, its use); weights, moments and master copy read and written."""
    state = STATE_BYTES[sizes.state]
    gradient, weight = (sizes.elements(array) for array in step.inputs)
    return 2 * gradient * state["gradients"] + 2 * weight * (state["weights"] + state["optimizer"])
