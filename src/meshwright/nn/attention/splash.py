"""The splash attention kernel of TPUs, forward with its log-sum-exp and backward from it."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from meshwright.nn.attention.visibility import Rule

BLOCK = 512
"""Rows of the kernel's blocks, where the length is a multiple; else 128."""


def _kernel(rule: Rule, heads: int, length: int, interpret: bool) -> Any:
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    shape = (length, length)
    back = None if rule.window is None else rule.window - 1
    mask = masks.CausalMask(shape) if back is None else masks.LocalMask(shape, window_size=(back, 0), offset=0)
    size = BLOCK if length % BLOCK == 0 else 128
    blocks = splash.BlockSizes(
        block_q=size, block_kv=size, block_q_dkv=size, block_kv_dkv=size, block_q_dq=size, block_kv_dq=size
    )
    return splash.make_splash_mha(
        masks.MultiHeadMask([mask] * heads),
        block_sizes=blocks,
        save_residuals=True,
        attn_logits_soft_cap=rule.softcap,
        head_shards=1,
        q_seq_shards=1,
        interpret=interpret,
    )


def _segments(document: Array | None) -> Any:
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash

    return None if document is None else splash.SegmentIds(document, document)


def splash_forward(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K Hv"],
    documents: Int[Array, "B T"] | None,
    sinks: Float[Array, " N"] | None,
    *,
    rule: Rule,
    interpret: bool = False,
) -> tuple[Float[Array, "B T N Hv"], Float[Array, "B T N"]]:
    """Result and log-sum-exp (float32) of rows in order."""
    kernel = _kernel(rule, q.shape[2], q.shape[1], interpret)
    q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q * jnp.asarray(rule.scale, q.dtype), k, v))

    def one(q: Array, k: Array, v: Array, document: Array | None) -> Any:
        return kernel(q, k, v, segment_ids=_segments(document), sinks=sinks)

    out, (lse,) = jax.vmap(one)(q, k, v, documents)
    return jnp.swapaxes(out, 1, 2), jnp.swapaxes(lse, 1, 2)


def splash_backward(
    dout: Float[Array, "B T N Hv"],
    o: Float[Array, "B T N Hv"],
    lse: Float[Array, "B T N"],
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K Hv"],
    documents: Int[Array, "B T"] | None,
    *,
    rule: Rule,
    interpret: bool = False,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T K H"], Float[Array, "B T K Hv"]]:
    """(dq, dk, dv), through the kernel's own rule, so that its forward pass is not run again. Sinks are in ``lse``."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash

    kernel = _kernel(rule, q.shape[2], q.shape[1], interpret)
    facts = kernel.kwargs
    q, k, v, o, dout = (jnp.swapaxes(x, 1, 2) for x in (q * jnp.asarray(rule.scale, q.dtype), k, v, o, dout))

    def one(q: Array, k: Array, v: Array, o: Array, lse: Array, dout: Array, document: Array | None) -> Any:
        held = (q, k, v, _segments(document), None, o, lse, kernel.dq_mask_info, kernel.dkv_mask_info)
        found = splash._splash_attention_bwd(
            False, facts["mask_value"], False, facts["block_sizes"], None, facts["mask_function"],
            facts["attn_logits_soft_cap"], interpret, held, dout,
        )  # fmt: skip
        return found[3:6]

    dq, dk, dv = jax.vmap(one)(q, k, v, o, jnp.swapaxes(lse, 1, 2), dout, documents)
    return tuple(jnp.swapaxes(x, 1, 2) for x in (dq * jnp.asarray(rule.scale, dq.dtype), dk, dv))  # type: ignore[return-value]
