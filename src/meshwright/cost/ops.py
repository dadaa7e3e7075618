"""FLOPs and memory traffic of the local op kinds on one device: one row per kind, read off a step's arrays.

FLOPs are those of matrix products alone (multiply and add are 2): they are what utilisation counts. Everything else
an op does is bounded by the memory it streams. Rules for the bytes: a product reads its operands and writes its
result once; an elementwise op is one fusion that reads every input once and writes every result once; a fusion
that needs a sum or maximum over its own row reads the row twice; a renamed (copy) or sliced array moves nothing;
a result that is added to what is there is read once more.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import msgspec

from meshwright.algebra.notation import ShardedArray, Sizes, local_elements, product
from meshwright.algebra.steps import Step
from meshwright.algebra.transformer import HEAD_CHUNK_TOKENS
from meshwright.core.dims import DTYPE_BYTES
from meshwright.spec.job import Job
from meshwright.spec.model import Model
from meshwright.spec.strategy import STATE_BYTES
from meshwright.spec.weights import weight_table

Number = Any
"""A float, or a NumPy array with one entry per candidate."""

Scores = Literal["on_chip", "in_memory"]
Term = Literal["matmul", "attention", "elementwise", "loss_head", "optimizer"]

SCORE_BYTES = 4
"""Attention scores are float32 whatever the width of the rest."""


class OpSizes(msgspec.Struct, frozen=True, kw_only=True):
    """What the rows need beside a step: sizes of dims (B of one microbatch) and mesh axes, and element widths.

    ``scores`` says whether attention is one kernel that keeps its T x S scores on chip, or a chain of products
    and a softmax that writes them to memory. ``cache`` remembers the bytes of arrays met before.
    """

    dims: Mapping[str, Number]
    mesh: Sizes
    state: str
    scores: Scores = "on_chip"
    cache: dict[ShardedArray, Number] = msgspec.field(default_factory=dict)

    @property
    def width(self) -> int:
        """Bytes of one activation, weight or communicated element: the state's weights' own."""
        return int(STATE_BYTES[self.state]["weights"])

    def elements(self, array: ShardedArray) -> Number:
        """Elements of the block that one device holds."""
        return local_elements(array, self.dims, self.mesh)

    def bytes(self, array: ShardedArray) -> Number:
        """Bytes of that block: the array's own dtype where it has one, else the width of the state."""
        if array not in self.cache:
            width = DTYPE_BYTES[array.dtype] if array.dtype else self.width
            self.cache[array] = self.elements(array) * width
        return self.cache[array]

    def total(self, *arrays: ShardedArray) -> Number:
        """Bytes of several blocks."""
        return sum(self.bytes(array) for array in arrays)

    def local(self, *arrays: ShardedArray) -> dict[str, Number]:
        """Local size of every dim of the arrays; an array listed later settles a dim that two share."""
        return {
            dim: self.dims[dim] / product(self.mesh[axis] for axis in axes)
            for array in arrays
            for dim, axes in zip(array.dims, array.axes, strict=True)
        }


Count = Callable[[Step, OpSizes], Number]


class OpRow(msgspec.Struct, frozen=True):
    """One op kind: its FLOPs, its bytes to and from memory, and the term of the step time that it belongs to."""

    flops: Count
    hbm_bytes: Count
    term: Term = "elementwise"


def op_flops(step: Step, sizes: OpSizes) -> Number:
    """FLOPs of one execution of a local step on one device."""
    return OP_ROWS[step.op].flops(step, sizes)


def op_hbm_bytes(step: Step, sizes: OpSizes) -> Number:
    """Bytes that one execution of a local step moves to and from memory on one device."""
    moved = OP_ROWS[step.op].hbm_bytes(step, sizes)
    adds = dict(step.attributes).get("accumulate") == "true"
    return moved + sizes.bytes(step.result) if adds and step.op != "copy" else moved


def op_term(step: Step) -> Term:
    """The term of the step time that a local step belongs to; everything in the loss head is one term."""
    return "loss_head" if step.block == "head" else OP_ROWS[step.op].term


def is_attention(step: Step) -> bool:
    """Whether a local step is attention, forward or backward."""
    return OP_ROWS[step.op].term == "attention"


def model_flops(model: Model, job: Job) -> float:
    """FLOPs of one training step that the model needs, recomputation left out: what MFU counts.

    6 x matrix parameters x tokens + 12 B T^2 N H L: the unembedding counts, the embedding look-up is free, and
    attention has no causal discount. Source: How to Scale Your Model, section 4.
    """
    attention = 12 * job.batch_seqs * job.seq_len**2 * model.num_heads * model.head_dim * model.num_layers
    return 6.0 * num_matmul_params(model) * job.tokens_per_step + attention


def num_matmul_params(model: Model) -> int:
    """Parameters that every token is multiplied with: matrices without the look-up table, a tied one once."""
    matrices = [row for row in weight_table(model) if row.kind == "matrix" and row.part != "embedding"]
    return sum(int(product(row.shape)) if row.tied_to else row.num_active_params for row in matrices)


# -- the counts -----------------------------------------------------------------------------------------


def _none(step: Step, sizes: OpSizes) -> Number:
    return 0.0


def _stream(step: Step, sizes: OpSizes) -> Number:
    return sizes.total(*step.inputs, step.result, *step.more)


def _row_stream(step: Step, sizes: OpSizes) -> Number:
    """A reduction over each row, then an elementwise pass: the first input is read twice."""
    return _stream(step, sizes) + sizes.bytes(step.inputs[0])


def _row_stream_backward(step: Step, sizes: OpSizes) -> Number:
    """Both the cotangent and the primal are read for the reductions and again for the result."""
    return _stream(step, sizes) + sizes.total(*step.inputs[:2])


def _einsum_flops(step: Step, sizes: OpSizes) -> Number:
    return 2.0 * product(sizes.local(*step.inputs).values())


def _score_elements(step: Step, sizes: OpSizes) -> Number:
    """B x N x T x S local, from the arrays q and k of an attention step."""
    q, k = step.inputs[-5:-3]
    rows, keys = sizes.local(q), sizes.local(k)
    return rows["B"] * rows["N"] * rows["T"] * keys["T"]


def _attention_flops(step: Step, sizes: OpSizes) -> Number:
    """4 B T S N H: scores and the weighted sum, every key for every query."""
    return 4.0 * _score_elements(step, sizes) * sizes.dims["H"]


def _attention_backward_flops(step: Step, sizes: OpSizes) -> Number:
    """10 B T S N H: the scores again, then the products for dV, dP, dQ and dK."""
    return 10.0 * _score_elements(step, sizes) * sizes.dims["H"]


def _attention_bytes(step: Step, sizes: OpSizes) -> Number:
    """Inputs and results; in memory also the scores (written, read twice) and weights (written, read)."""
    moved = _stream(step, sizes)
    if sizes.scores == "on_chip":
        return moved
    return moved + _score_elements(step, sizes) * (3 * SCORE_BYTES + 2 * sizes.width)


def _attention_backward_bytes(step: Step, sizes: OpSizes) -> Number:
    """As forward; in memory the scores' way again, dP (written, read twice) and dS (written, read twice)."""
    moved = _stream(step, sizes)
    if sizes.scores == "on_chip":
        return moved
    return moved + _score_elements(step, sizes) * (6 * SCORE_BYTES + 5 * sizes.width)


def _embed_bytes(step: Step, sizes: OpSizes) -> Number:
    """One row is read and written for each token; the rest of the table stays where it is."""
    return sizes.bytes(step.inputs[0]) + 2 * sizes.bytes(step.result)


def _embed_backward_bytes(step: Step, sizes: OpSizes) -> Number:
    """The gradient of the table is cleared, then one row is read, added to and written for each token."""
    return sizes.total(*step.inputs, step.result) + 2 * sizes.bytes(step.inputs[1])


def _chunked_flops(step: Step, sizes: OpSizes) -> Number:
    return 2.0 * product(sizes.local(*step.inputs[:2]).values())


def _chunked_backward_flops(step: Step, sizes: OpSizes) -> Number:
    """The logits again, then the products for the stream and for the table."""
    return 3 * _chunked_flops(step, sizes)


def _logits(step: Step, sizes: OpSizes) -> Number:
    """Local logits of a chunked step, which exist one chunk at a time."""
    local = sizes.local(*step.inputs[:2])
    return local["B"] * local["T"] * local["V"]


def num_chunks(step: Step, sizes: OpSizes) -> Number:
    """Chunks of a chunked loss head on one device; not rounded up, so that sizes may be arrays."""
    local = sizes.local(*step.inputs[:2])
    chunks = local["B"] * local["T"] / HEAD_CHUNK_TOKENS
    return (chunks + 1 + abs(chunks - 1)) / 2  # the larger of chunks and 1


def _chunked_bytes(step: Step, sizes: OpSizes) -> Number:
    """As the kept logits' product and statistics, the table once for every chunk."""
    again = (num_chunks(step, sizes) - 1) * sizes.bytes(step.inputs[1])
    return _stream(step, sizes) + again + 3 * DTYPE_BYTES["fp32"] * _logits(step, sizes)


def _chunked_backward_bytes(step: Step, sizes: OpSizes) -> Number:
    """Logits and their cotangent written and read, the table and its gradient once for every chunk."""
    again = (num_chunks(step, sizes) - 1) * sizes.total(step.inputs[1], step.more[0])
    return _stream(step, sizes) + again + 6 * DTYPE_BYTES["fp32"] * _logits(step, sizes)


def _adamw_bytes(step: Step, sizes: OpSizes) -> Number:
    """Gradient read twice (its norm, its use); weights, moments and master copy read and written."""
    state = STATE_BYTES[sizes.state]
    gradient, weight = (sizes.elements(array) for array in step.inputs)
    return 2 * gradient * state["gradients"] + 2 * weight * (state["weights"] + state["optimizer"])


OP_ROWS: dict[str, OpRow] = {
    "einsum": OpRow(_einsum_flops, _stream, "matmul"),
    "rms_norm": OpRow(_none, _row_stream),
    "rms_norm_backward": OpRow(_none, _row_stream_backward),
    "rope": OpRow(_none, _stream),
    "rope_backward": OpRow(_none, _stream),
    "attention": OpRow(_attention_flops, _attention_bytes, "attention"),
    "attention_backward": OpRow(_attention_backward_flops, _attention_backward_bytes, "attention"),
    "add": OpRow(_none, _stream),
    "copy": OpRow(_none, _none),
    "slice": OpRow(_none, _none),
    "silu_mul": OpRow(_none, _stream),
    "silu_mul_backward": OpRow(_none, _stream),
    "embed": OpRow(_none, _embed_bytes),
    "embed_backward": OpRow(_none, _embed_backward_bytes),
    "logits_statistics": OpRow(_none, _row_stream, "loss_head"),
    "logits_backward": OpRow(_none, _stream, "loss_head"),
    "chunked_logits_statistics": OpRow(_chunked_flops, _chunked_bytes, "loss_head"),
    "chunked_logits_backward": OpRow(_chunked_backward_flops, _chunked_backward_bytes, "loss_head"),
    "rescale": OpRow(_none, _stream, "loss_head"),
    "sum_loss": OpRow(_none, _stream, "loss_head"),
    "sum_loss_backward": OpRow(_none, _stream, "loss_head"),
    "adamw": OpRow(_none, _adamw_bytes, "optimizer"),
}
"""Op kind of a derived local step -> its row."""
