"""FLOPs and bytes of derived local steps, by the rules of their ops (`algebra.ops`), and FLOPs that a model needs."""

from typing import Literal, get_args

from meshwright.algebra.notation import product
from meshwright.algebra.ops import kind_of
from meshwright.algebra.ops.attention import block_share, keys_per_query
from meshwright.algebra.sizes import Number, OpSizes
from meshwright.algebra.steps import Step
from meshwright.cost.formulas.accounting import train_flops_per_param
from meshwright.cost.work.sequences import LikeSequences
from meshwright.spec.job import Job
from meshwright.spec.model import Model
from meshwright.spec.weights import has_frozen_matrices, weight_table, without_mtp

LocalTerm = Literal["matmul", "attention", "elementwise", "loss_head", "optimizer"]
LOCAL_TERMS: tuple[LocalTerm, ...] = get_args(LocalTerm)
"""Terms of an estimate that are local work of a device; other terms are communication or idle time."""

_TERMS: dict[str, LocalTerm] = {"contraction": "matmul", "attention": "attention", "optimizer": "optimizer"}
"""Group of a step -> its term of the step time; every other group is elementwise."""


def op_flops(step: Step, sizes: OpSizes) -> Number:
    """Returns the FLOPs of one execution of a local step on one device; for a step with parts, of all parts."""
    if step.parts:
        return sum(op_flops(part, sizes) for part in step.parts)
    return kind_of(step).flops(step, sizes)


def op_hbm_bytes(step: Step, sizes: OpSizes) -> Number:
    """Returns the bytes that one execution of a local step moves to and from memory on one device.

    The blocks of a collective matmul read a weight once: they run back to back, and it stays on the chip.
    """
    if step.parts:
        return sum(op_hbm_bytes(part, sizes) for part in step.parts)
    kind = kind_of(step)
    moved_bytes = kind.hbm_bytes(step, sizes)
    return moved_bytes + sizes.bytes(step.result) if step.accumulates and kind.reads_sum else moved_bytes


def op_term(step: Step) -> LocalTerm:
    """Returns the term of the step time that a local step belongs to; everything in the loss head is one term."""
    return "loss_head" if step.role == "head" else _TERMS.get(kind_of(step).group, "elementwise")


def is_attention(step: Step) -> bool:
    """True if a local step is attention, forward or backward."""
    return kind_of(step).group == "attention"


def model_flops(model: Model, job: Job, *, causal: bool = False) -> float:
    """Returns the FLOPs of one step of a job that the model needs, without recomputation, as MFU counts them.

    Training takes `token_flops` for every token + 12 B T S N H L. Prefill and decode take a third, with the unembedding
    of one position of each sequence. S are the keys of a query: T, or the window in layers that have one, and half of
    that with ``causal``; in decode the whole cache, and with chunks after the first half a chunk. With latent attention
    2 H is H + Hv. Source: How to Scale Your Model, section 4.
    """
    model = model if job.trains else without_mtp(model)
    head_widths = model.head_dim + (model.v_head_dim if model.latent_attention else model.head_dim)
    full_widths = head_widths if model.latent_attention else 2 * model.full_heads[1]
    num_sliding = len(model.sliding_layers)
    seq_len = job.seq_len
    causal = causal and job.kind != "decode"
    num_full = model.num_layers + len(model.mtp_layers) - num_sliding
    key_widths = num_full * full_widths * _keys(model, seq_len, None, causal=causal)
    if num_sliding:
        row = LikeSequences(1.0, 1.0, seq_len - 1.0)
        decoded_keys = float(row.pairs(model.sliding_window, chunked=model.chunked_windows))
        near_keys = _keys(model, seq_len, model.sliding_window, causal=causal)
        key_widths += num_sliding * head_widths * (decoded_keys if job.kind == "decode" else near_keys)
    num_passes = 3 if job.trains else 1
    score_flops = 2 * num_passes * job.tokens_per_step * key_widths * model.num_heads
    if not job.trains:
        unembed_params = model.d_model * model.vocab_size
        return (
            2.0 * ((num_matmul_params(model) - unembed_params) * job.tokens_per_step + unembed_params * job.batch_seqs)
            + score_flops
        )
    train_flops = token_flops(model) * job.tokens_per_step + score_flops
    return train_flops + _encoder_flops(model, job, head_widths) if model.encoder else train_flops


def _keys(model: Model, seq_len: float, window: int | None, *, causal: bool) -> float:
    """Returns the keys that a query attends to; with ``causal`` without masked keys, counted in blocks if the model has
    its own mask."""
    if model.attention_mask and causal:
        return seq_len * block_share(model.attention_mask, window, seq_len, chunked=model.chunked_windows)
    return float(keys_per_query(seq_len, window=window, causal=causal, chunked=model.chunked_windows))


def token_flops(model: Model) -> float:
    """Returns the FLOPs of one token in training without attention's scores: 6 N, with N the `num_matmul_params`.

    Frozen weights take 4 in place of 6: they have no gradients. A layer for the token after the next also has an
    unembedding."""
    num_params_used = num_matmul_params(model) + len(model.mtp_layers) * model.d_model * model.vocab_size
    return float(train_flops_per_param() * num_params_used - 2 * num_matmul_params(model, frozen=True))


def mfu_words(model: Model) -> str:
    """Returns the formula of `model_flops` for a training step, in words and letters."""
    products_text = "6 FLOPs a parameter and token"
    if has_frozen_matrices(model):
        products_text = "6 FLOPs a trained parameter and token and 4 a frozen one"
    heads = "6 B T N (H + Hv)" if model.latent_attention else "12 B T N H"
    n_near, layers_text = len(model.sliding_layers), "(L + 1)" if model.mtp_layers else "L"
    scores = f"{heads.replace('T', 'T^2')} {layers_text}"
    if n_near:
        full_width = " Hf" if "Hf" in model.dims else ""
        sums_text = f"{model.num_layers - n_near}{full_width} T + {n_near}{' H' if full_width else ''} W"
        heads = heads.removesuffix(" H") if full_width else heads
        near = "chunk" if model.chunked_windows else "window"
        scores = f"{heads} ({sums_text}), W the {near} of {model.sliding_window:,} or T"
    experts_text = "of chosen experts, " * bool(model.num_experts)
    scores += " and the encoder" * bool(model.encoder)
    suffix = ", with both unembeddings" * bool(model.mtp_layers)
    tied_text = " (the tied table counts as the unembedding)" * model.tied_embeddings
    scores += f", parameters {experts_text}without the look-up{tied_text}{suffix}"
    return f"{products_text} + {scores}, no causal discount"


def _encoder_flops(model: Model, job: Job, head_widths: int) -> float:
    """Returns the FLOPs that an encoder adds in training: its matrices and cross-attention's keys and values on its
    positions instead of the decoder's, and the scores of its layers and of cross-attention."""
    assert model.encoder is not None
    enc_len, sizes, letters = model.encoder.length, model.dims, model.encoder_letters
    first_product = "encoder_conv1"  # of every frame, of which there are two for a position
    names = (first_product, "encoder_conv2", "layers.cross_wk", "layers.cross_wv")
    rows = (row for row in weight_table(model) if row.name.startswith("encoder.") or row.name in names)
    positions_by_row = ((row, enc_len * (1 + (row.name == first_product))) for row in rows if row.kind == "matrix")
    added_macs = sum(row.num_active_params * (positions - job.seq_len) for row, positions in positions_by_row)
    enc_widths = 2 * sizes[letters.get("N", "N")] * sizes[letters.get("H", "H")]
    enc_scores = enc_len * enc_len * model.encoder.num_layers * enc_widths
    cross_scores = job.seq_len * enc_len * model.num_layers * model.num_heads * head_widths
    return 6.0 * job.batch_seqs * (added_macs + enc_scores + cross_scores)


def num_matmul_params(model: Model, *, frozen: bool = False) -> int:
    """Returns N, the parameters that every token is multiplied with: all matrices except the look-up table, and only
    chosen experts; a tied table counts once. With ``frozen``, only weights that are not trained."""
    matrices = [row for row in weight_table(model) if row.kind == "matrix" and row.part != "embedding"]
    matrices = [row for row in matrices if row.frozen or not frozen]
    return sum(int(product(row.shape)) if row.tied_to else row.num_active_params for row in matrices)
