"""Runs cuDNN's fused attention: forward with its log-sum-exp, backward from the saved log-sum-exp.

The backward kernel is called by JAX's own rule for it: differentiating `jax.nn.dot_product_attention` would run the
forward kernel a second time, and that function rounds the log-sum-exp to the element type of the result.
"""

import inspect
from typing import Any
from unittest.mock import patch

import jax.numpy as jnp
from jaxtyping import Array

from meshwright.nn.attention.call import AttentionCall
from meshwright.nn.attention.kernels.scores import AttentionResult, BackwardInputs, QkvCotangents
from meshwright.nn.attention.platform import compute_capability

_SEED, _DROPOUT, _NO_BIAS = 42, 0.0, (False, False)
"""Arguments of the kernels: random seed, no dropout, no bias and no gradient of a bias."""


def _mask(call: AttentionCall) -> dict[str, Any]:
    from jax._src.cudnn.fused_attention_stablehlo import MaskType

    window_args = call.terms.get("window")
    mask_type = MaskType.CAUSAL if call.terms else MaskType.NO_MASK
    return {"mask_type": mask_type, "sliding_window_length": window_args[0] if window_args else None}


def forward(call: AttentionCall, q: Array, k: Array, v: Array) -> AttentionResult:
    """Returns the result and the log-sum-exp in float32."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    # JAX asks a local GPU, which may be absent, not the one that the program is compiled for
    capability = compute_capability()
    with patch.object(cudnn, "check_compute_capability", lambda least: capability >= float(least)):
        out, lse = cudnn.dot_product_attention(q, k, v, scale=call.scale, return_residual=True, **_mask(call))
    return out, jnp.swapaxes(lse, 1, 2)


def backward(call: AttentionCall, given: BackwardInputs, q: Array, k: Array, v: Array) -> QkvCotangents:
    """Returns (dq, dk, dv)."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    dout, o, lse = given
    no_array = jnp.zeros(0, q.dtype)
    mask_type, window = _mask(call).values()
    # jax 0.12 has the arrays of a score function, of which there are none, before the log-sum-exp
    is_scored = "score_mod" in inspect.signature(cudnn._dot_product_attention_bwd_rule).parameters
    options: tuple[Any, ...] = (None, 0, False) if is_scored else (True, False)
    # bias, lengths and offsets of packed sequences for queries and keys, pages of keys and values
    residuals = (q, k, v, *[no_array] * 7, *[()] * is_scored, jnp.swapaxes(lse, 1, 2), o.astype(q.dtype))
    arguments = (
        call.scale, _SEED, _DROPOUT, _NO_BIAS, mask_type, cudnn.AttentionLayout.BTNH.value, window,
        *options, residuals, dout.astype(q.dtype),
    )  # fmt: skip
    dq, dk, dv, *_ = cudnn._dot_product_attention_bwd_rule(*arguments)
    return dq, dk, dv
