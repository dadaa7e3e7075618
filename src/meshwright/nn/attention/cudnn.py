"""Runs cuDNN's fused attention: forward with its log-sum-exp, backward from it.

The backward kernel is reached through JAX's own rule for it: differentiating `jax.nn.dot_product_attention` would run
the forward kernel a second time, and that function rounds the log-sum-exp to the element type of the result.
"""

from typing import Any
from unittest.mock import patch

import jax.numpy as jnp
from jaxtyping import Array

from meshwright.nn.attention.platform import compute_capability
from meshwright.nn.attention.scores import AttentionResult, BackwardInputs, QkvCotangents
from meshwright.nn.attention.visibility import AttentionCall

HALVES = ("bfloat16", "float16")
LATENT_WIDTHS = 192, 128
"""Widths H and Hv of latent attention's heads. Source: jax-ml/jax, pull request 28872."""

_SEED, _DROPOUT, _NO_BIAS = 42, 0.0, (False, False)
"""Arguments of the kernels: no dropout, no bias and no gradient of one."""


def takes(call: AttentionCall, q: Array, k: Array, v: Array) -> bool:
    """True on CUDA for bf16 or fp16, a mask "rows" or "all", and H = Hv up to 128 that 8 divides, without soft cap,
    sinks and documents; from Hopper on also for the widths of latent attention.

    Hopper takes heads up to 256 wide, but the program may be compiled for another GPU.
    """
    width = q.shape[-1]
    plain = call.softcap is None and call.sinks is None and call.query.document is None
    narrow = width == v.shape[-1] and width <= 128 and width % 8 == 0
    narrow |= (width, v.shape[-1]) == LATENT_WIDTHS and compute_capability() >= 9
    return call.platform == "cuda" and plain and narrow and call.mask != "positions" and q.dtype.name in HALVES


def _mask(call: AttentionCall) -> Any:
    from jax._src.cudnn.fused_attention_stablehlo import MaskType

    return MaskType.CAUSAL if call.mask == "rows" else MaskType.NO_MASK


def forward(call: AttentionCall, q: Array, k: Array, v: Array) -> AttentionResult:
    """Returns the result and the log-sum-exp in float32."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    # JAX asks a local GPU, which may be absent, not the one that the program is compiled for
    able = compute_capability()
    with patch.object(cudnn, "check_compute_capability", lambda least: able >= float(least)):
        out, sums = cudnn.dot_product_attention(
            q, k, v, scale=call.scale, mask_type=_mask(call), sliding_window_length=call.window, return_residual=True
        )
    return out, jnp.swapaxes(sums, 1, 2)


def backward(call: AttentionCall, given: BackwardInputs, q: Array, k: Array, v: Array) -> QkvCotangents:
    """Returns (dq, dk, dv)."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    dout, o, lse = given
    unused = jnp.zeros(0, q.dtype)
    # bias, lengths and offsets of packed sequences for queries and keys, pages of keys and values
    arrays = (q, k, v, *[unused] * 7, jnp.swapaxes(lse, 1, 2), o.astype(q.dtype))
    dq, dk, dv, *_ = cudnn._dot_product_attention_bwd_rule(
        call.scale, _SEED, _DROPOUT, _NO_BIAS, _mask(call), cudnn.AttentionLayout.BTNH.value, call.window,
        True, False, arrays, dout.astype(q.dtype),
    )  # fmt: skip
    return dq, dk, dv
