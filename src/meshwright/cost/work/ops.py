"""FLOPs and memory traffic of the local op kinds on one device: one row per kind, read off a step's arrays.

FLOPs are those of matrix products alone (multiply and add are 2): they are what utilisation counts. Everything else
an op does is bounded by the memory it streams. Rules for the bytes: a product reads its operands and writes its
result once; an elementwise op is one fusion that reads every input once and writes every result once; a fusion
that needs a sum or maximum over its own row reads the row twice; a renamed (copy) or sliced array moves nothing;
a result that is added to what is there is read once more.
"""

from collections.abc import Callable
from typing import Literal

import msgspec

from meshwright.algebra.notation import product
from meshwright.algebra.steps import COLLECTIVE_MATMUL, Step
from meshwright.cost.work import attention_counts, op_counts
from meshwright.cost.work.attention_counts import keys_per_query
from meshwright.cost.work.op_counts import nothing, stream
from meshwright.cost.work.sizes import Number, OpSizes, Scores
from meshwright.spec.job import Job
from meshwright.spec.model import Model
from meshwright.spec.weights import weight_table

__all__ = ["OP_ROWS", "OpRow", "OpSizes", "Scores", "is_attention", "model_flops", "num_matmul_params", "op_flops"]
__all__ += ["op_hbm_bytes", "op_term"]

Term = Literal["matmul", "attention", "elementwise", "loss_head", "optimizer"]

Count = Callable[[Step, OpSizes], Number]


class OpRow(msgspec.Struct, frozen=True):
    """One op kind: its FLOPs, its bytes to and from memory, and the term of the step time that it belongs to."""

    flops: Count
    hbm_bytes: Count
    term: Term = "elementwise"


def op_flops(step: Step, sizes: OpSizes) -> Number:
    """FLOPs of one execution of a local step on one device; of its parts together where it has any."""
    if step.parts:
        return sum(op_flops(part, sizes) for part in step.parts)
    return OP_ROWS[step.op].flops(step, sizes)


def op_hbm_bytes(step: Step, sizes: OpSizes) -> Number:
    """Bytes that one execution of a local step moves to and from memory on one device.

    Parts of a collective matmul read a weight once: its blocks follow each other at once, and find it on the chip.
    """
    if step.parts:
        return sum(op_hbm_bytes(part, sizes) for part in step.parts)
    moved = OP_ROWS[step.op].hbm_bytes(step, sizes)
    adds = dict(step.attributes).get("accumulate") == "true"
    return moved + sizes.bytes(step.result) if adds and step.op != "copy" else moved


def op_term(step: Step) -> Term:
    """The term of the step time that a local step belongs to; everything in the loss head is one term."""
    return "loss_head" if step.block == "head" else OP_ROWS[step.op].term


def is_attention(step: Step) -> bool:
    """Whether a local step is attention, forward or backward."""
    return OP_ROWS[step.op].term == "attention"


def model_flops(model: Model, job: Job, *, causal: bool = False) -> float:
    """FLOPs of one training step that the model needs, recomputation left out: what MFU counts.

    6 x matrix parameters x tokens + 12 B T S N H L: the unembedding counts, the embedding look-up is free. Only
    chosen experts count. S are the keys that a query meets: T, or the window in layers that have one, and half of
    it with ``causal``; without, there is no causal discount. With latent attention 2 H is H + Hv.
    Source: How to Scale Your Model, section 4.
    """
    width = model.head_dim + (model.v_head_dim if model.latent_attention else model.head_dim)
    num_sliding = len(model.sliding_layers)
    length = job.seq_len
    keys = (model.num_layers - num_sliding) * keys_per_query(length, causal=causal)
    if num_sliding:
        keys += num_sliding * float(keys_per_query(length, window=model.sliding_window, causal=causal))
    attention = 6 * job.batch_seqs * length * keys * model.num_heads * width
    return 6.0 * num_matmul_params(model) * job.tokens_per_step + attention


def num_matmul_params(model: Model) -> int:
    """Parameters that every token is multiplied with: matrices without the look-up table, a tied one once."""
    matrices = [row for row in weight_table(model) if row.kind == "matrix" and row.part != "embedding"]
    return sum(int(product(row.shape)) if row.tied_to else row.num_active_params for row in matrices)


OP_ROWS: dict[str, OpRow] = {
    "einsum": OpRow(op_counts.einsum_flops, stream, "matmul"),
    COLLECTIVE_MATMUL: OpRow(nothing, nothing, "matmul"),
    "rms_norm": OpRow(nothing, op_counts.row_stream),
    "rms_norm_backward": OpRow(nothing, op_counts.row_stream_backward),
    "layer_norm": OpRow(nothing, op_counts.row_stream),
    "layer_norm_backward": OpRow(nothing, op_counts.row_stream_backward),
    "rope": OpRow(nothing, stream),
    "rope_backward": OpRow(nothing, stream),
    "join_heads": OpRow(nothing, stream),
    "join_heads_backward": OpRow(nothing, stream),
    "attention": OpRow(attention_counts.attention_flops, attention_counts.attention_bytes, "attention"),
    "attention_backward": OpRow(
        attention_counts.attention_backward_flops, attention_counts.attention_backward_bytes, "attention"
    ),
    "add": OpRow(nothing, stream),
    "copy": OpRow(nothing, nothing),
    "slice": OpRow(nothing, nothing),
    "bias_add": OpRow(nothing, op_counts.fused_vectors),
    "bias_add_backward": OpRow(nothing, stream),
    "silu_mul": OpRow(nothing, stream),
    "silu_mul_backward": OpRow(nothing, stream),
    "gelu_mul": OpRow(nothing, stream),
    "gelu_mul_backward": OpRow(nothing, stream),
    "gelu": OpRow(nothing, stream),
    "gelu_backward": OpRow(nothing, stream),
    "token_gate": OpRow(nothing, stream),
    "token_gate_backward": OpRow(nothing, stream),
    "route": OpRow(nothing, stream),
    "route_backward": OpRow(nothing, stream),
    "dispatch": OpRow(nothing, op_counts.dispatch_bytes),
    "dispatch_backward": OpRow(nothing, stream),
    "combine": OpRow(nothing, stream),
    "combine_backward": OpRow(nothing, op_counts.combine_backward_bytes),
    "embed": OpRow(nothing, op_counts.embed_bytes),
    "embed_backward": OpRow(nothing, op_counts.embed_backward_bytes),
    "logits_statistics": OpRow(nothing, op_counts.row_stream, "loss_head"),
    "logits_backward": OpRow(nothing, stream, "loss_head"),
    "chunked_logits_statistics": OpRow(op_counts.chunked_flops, op_counts.chunked_bytes, "loss_head"),
    "chunked_logits_backward": OpRow(op_counts.chunked_backward_flops, op_counts.chunked_backward_bytes, "loss_head"),
    "rescale": OpRow(nothing, stream, "loss_head"),
    "sum_loss": OpRow(nothing, stream, "loss_head"),
    "sum_loss_backward": OpRow(nothing, stream, "loss_head"),
    "adamw": OpRow(nothing, op_counts.adamw_bytes, "optimizer"),
}
"""Op kind of a derived local step -> its row."""
