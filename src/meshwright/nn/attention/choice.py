"""Attention of one device's queries on the keys that it has, forward and backward, by the kernel that takes it.

Queries and keys are [B, T, N, H] and [B, S, K, H], values [B, S, K, Hv]; query heads n = k G .. k G + G - 1 read key
head k. A query sees a key that is not later, in the same document, and less than the window back. The backward pass
takes the result and the log-sum-exp of the forward pass, and makes the weights again from them.
"""

from types import ModuleType

from jaxtyping import Array, Float

from meshwright.nn.attention import blocks, cudnn, splash, staircase
from meshwright.nn.attention.scores import Given, Mixed, sink_cotangents
from meshwright.nn.attention.visibility import AttentionCall

KERNELS = (cudnn, splash, staircase, blocks)
"""The platforms' fused kernels, then the project's own: each says what it ``takes``, and has both passes."""


def kernel_of(call: AttentionCall, q: Array, k: Array, v: Array) -> ModuleType:
    """The first of the kernels that takes the call."""
    return next(kernel for kernel in KERNELS if kernel.takes(call, q, k, v))


def attention(
    call: AttentionCall, q: Float[Array, "B T N H"], k: Float[Array, "B S K H"], v: Float[Array, "B S K Hv"]
) -> Mixed:
    """The mixed values, and the log-sum-exp of each query's scores in float32, the sink's logit included.

    A query that sees nothing gets zeros and minus infinity.
    """
    o, lse = kernel_of(call, q, k, v).forward(call, q, k, v)
    return o, lse


def attention_backward(
    call: AttentionCall,
    given: Given,
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K Hv"],
) -> tuple[Array, ...]:
    """Cotangents (dq, dk, dv) and, where there are sinks, dsinks; the result and its log-sum-exp may come from more
    keys than these.

    dS = P (dout v^T - delta), P = exp(S - lse), delta = the row sums of dout o.
    """
    dq, dk, dv = kernel_of(call, q, k, v).backward(call, given, q, k, v)
    return (dq, dk, dv) if call.sinks is None else (dq, dk, dv, sink_cotangents(call.sinks, given))
