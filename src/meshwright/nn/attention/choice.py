"""Attention of one device's queries on its keys, forward and backward, by the first kernel that takes the call.

Queries and keys are [B, T, N, H] and [B, S, K, H], values [B, S, K, Hv]; query heads n = k G .. k G + G - 1 read key
head k. A query sees a key that is not later, in the same document and, with a window, fewer than ``window`` positions
back. The backward pass gets the result and log-sum-exp of the forward pass, and recomputes the weights from these.
"""

from types import ModuleType

from jaxtyping import Array

from meshwright.nn.attention import blocks, cudnn, splash, staircase
from meshwright.nn.attention.scores import (
    AttentionResult,
    BackwardInputs,
    HeadKeys,
    HeadQueries,
    KeyValues,
    sink_cotangents,
)
from meshwright.nn.attention.visibility import AttentionCall

KERNELS = (cudnn, splash, staircase, blocks)
"""The platforms' fused kernels, then this package's own. Each module has ``takes``, ``forward`` and ``backward``."""


def kernel_of(call: AttentionCall, q: Array, k: Array, v: Array) -> ModuleType:
    """Returns the first kernel that takes the call."""
    return next(kernel for kernel in KERNELS if kernel.takes(call, q, k, v))


def attention(call: AttentionCall, q: HeadQueries, k: HeadKeys, v: KeyValues) -> AttentionResult:
    """Returns the weighted values, and the log-sum-exp of each query's scores in float32, sinks included.

    A query that sees no key gets zeros and minus infinity.
    """
    result: AttentionResult = kernel_of(call, q, k, v).forward(call, q, k, v)
    return result


def attention_backward(
    call: AttentionCall,
    given: BackwardInputs,
    q: HeadQueries,
    k: HeadKeys,
    v: KeyValues,
) -> tuple[Array, ...]:
    """Returns cotangents (dq, dk, dv) and, with sinks, dsinks. The result in ``given`` may be over more keys.

    dS = P (dout v^T - delta), P = exp(S - lse), delta = the row sums of dout o.
    """
    dq, dk, dv = kernel_of(call, q, k, v).backward(call, given, q, k, v)
    return (dq, dk, dv) if call.sinks is None else (dq, dk, dv, sink_cotangents(call.sinks, given))
