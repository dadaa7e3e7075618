"""Runs the splash attention kernel of TPUs: forward with its log-sum-exp, backward from it."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from meshwright.nn.attention.scores import AttentionResult, BackwardInputs, QkvCotangents
from meshwright.nn.attention.visibility import AttentionCall

BLOCK, LEAST_BLOCK = 512, 128
"""Rows of the kernel's blocks: the first where the length is a multiple of it, else the second."""


def takes(call: AttentionCall, q: Array, k: Array, v: Array) -> bool:
    """True on TPUs for a mask "rows" over a multiple of 128 positions."""
    return call.platform == "tpu" and call.mask == "rows" and q.shape[1] % LEAST_BLOCK == 0


def _kernel(call: AttentionCall, q: Array, *, interpret: bool) -> Any:
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    length, heads = q.shape[1:3]
    shape = (length, length)
    back = None if call.window is None else call.window - 1
    mask = masks.CausalMask(shape) if back is None else masks.LocalMask(shape, window_size=(back, 0), offset=0)
    size = BLOCK if length % BLOCK == 0 else LEAST_BLOCK
    rows = ("block_q", "block_kv", "block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq")
    sizes: dict[str, Any] = dict.fromkeys(rows, size)
    return splash.make_splash_mha(
        masks.MultiHeadMask([mask] * heads),
        block_sizes=splash.BlockSizes(**sizes),
        save_residuals=True,
        attn_logits_soft_cap=call.softcap,
        head_shards=1,
        q_seq_shards=1,
        interpret=interpret,
    )


def _segments(document: Array | None) -> Any:
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash

    return None if document is None else splash.SegmentIds(document, document)


def forward(call: AttentionCall, q: Array, k: Array, v: Array, *, interpret: bool = False) -> AttentionResult:
    """Returns the result and the log-sum-exp in float32."""
    kernel = _kernel(call, q, interpret=interpret)
    q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q * jnp.asarray(call.scale, q.dtype), k, v))

    def one(q: Array, k: Array, v: Array, document: Array | None) -> Any:
        return kernel(q, k, v, segment_ids=_segments(document), sinks=call.sinks)

    out, (lse,) = jax.vmap(one)(q, k, v, call.query.document)
    return jnp.swapaxes(out, 1, 2), jnp.swapaxes(lse, 1, 2)


def backward(
    call: AttentionCall, given: BackwardInputs, q: Array, k: Array, v: Array, *, interpret: bool = False
) -> QkvCotangents:
    """Returns (dq, dk, dv) by the kernel's own rule, which does not run the forward pass again. The log-sum-exp
    includes the sinks."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash

    kernel = _kernel(call, q, interpret=interpret)
    facts = kernel.kwargs
    arrays = (q * jnp.asarray(call.scale, q.dtype), k, v, *given)

    def one(document: Array | None, q: Array, k: Array, v: Array, *given: Array) -> Any:
        dout, o, lse = given
        residuals = (q, k, v, _segments(document), None, o, lse, kernel.dq_mask_info, kernel.dkv_mask_info)
        found = splash._splash_attention_bwd(
            False, facts["mask_value"], False, facts["block_sizes"], None, facts["mask_function"],
            facts["attn_logits_soft_cap"], interpret, residuals, dout,
        )  # fmt: skip
        return found[3:6]

    dq, dk, dv = jax.vmap(one)(call.query.document, *(jnp.swapaxes(x, 1, 2) for x in arrays))
    return tuple(jnp.swapaxes(x, 1, 2) for x in (dq * jnp.asarray(call.scale, dq.dtype), dk, dv))  # type: ignore[return-value]
