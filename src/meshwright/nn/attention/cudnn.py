"""cuDNN's fused attention, forward with its log-sum-exp and backward from it.

The backward kernel is reached through JAX's own rule for it: differentiating `jax.nn.dot_product_attention` would run
the forward kernel a second time, and that function rounds the log-sum-exp to the element type of the result.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from meshwright.nn.attention.visibility import Rule

_SEED, _DROPOUT, _NO_BIAS = 42, 0.0, (False, False)
"""What the kernels are told of dropout (none) and of a bias (none, nor its gradient)."""


def cudnn_forward(
    q: Float[Array, "B T N H"], k: Float[Array, "B S K H"], v: Float[Array, "B S K H"], *, rule: Rule, causal: bool
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """Result and log-sum-exp (float32)."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    mask = cudnn.MaskType.CAUSAL if causal else cudnn.MaskType.NO_MASK
    out, sums = cudnn.dot_product_attention(
        q, k, v, scale=rule.scale, mask_type=mask, sliding_window_length=rule.window, return_residual=True
    )
    return out, jnp.swapaxes(sums, 1, 2)


def cudnn_backward(
    dout: Float[Array, "B T N H"],
    o: Float[Array, "B T N H"],
    lse: Float[Array, "B T N"],
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    *,
    rule: Rule,
    causal: bool,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B S K H"], Float[Array, "B S K H"]]:
    """(dq, dk, dv)."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    mask = cudnn.MaskType.CAUSAL if causal else cudnn.MaskType.NO_MASK
    unused = jnp.zeros(0, q.dtype)
    # bias, lengths and offsets of packed sequences for queries and keys, pages of keys and values
    arrays = (q, k, v, *[unused] * 7, jnp.swapaxes(lse, 1, 2), o.astype(q.dtype))
    dq, dk, dv, *_ = cudnn._dot_product_attention_bwd_rule(
        rule.scale, _SEED, _DROPOUT, _NO_BIAS, mask, cudnn.AttentionLayout.BTNH.value, rule.window,
        True, False, arrays, dout.astype(q.dtype),
    )  # fmt: skip
    return dq, dk, dv
