"""Attention of one device's queries on its keys, forward and backward, by the first kernel that takes the call.

Queries and keys are [B, T, N, H] and [B, S, K, H], values [B, S, K, Hv]; query heads n = k G .. k G + G - 1 read key
head k. The backward pass gets the result and log-sum-exp of the forward pass, and recomputes the weights from these.
"""

from typing import Any

from jaxtyping import Array

from meshwright.core.errors import InputError
from meshwright.masks.kernels import TAKES
from meshwright.nn.attention.call import AttentionCall
from meshwright.nn.attention.kernels import cudnn, xla
from meshwright.nn.attention.kernels.fused import MOSAIC, PALLAS, Fused
from meshwright.nn.attention.kernels.scores import (
    AttentionResult,
    BackwardInputs,
    HeadKeys,
    HeadQueries,
    KeyValues,
    sink_cotangents,
    with_sinks,
)

KERNELS: dict[str, Any] = {"cudnn": cudnn, "mosaic": MOSAIC, "pallas": PALLAS, "xla": xla}
"""The kernels of `masks.kernels` by name; each has ``forward`` and ``backward``."""


def kernel_of(call: AttentionCall, q: Array, k: Array, v: Array) -> Any:
    """Returns the kernel that is forced, or the first one that takes the call.

    Raises:
        InputError: the forced kernel does not take the call.
    """
    case = call.case(q, k, v)
    fit = (name for name, takes in TAKES.items() if takes(case) and _fits(KERNELS[name], call, q, k))
    if not call.kernel:
        return KERNELS[next(fit)]
    able = [*fit]
    if call.kernel not in able:
        raise InputError(f"attention by {call.kernel!r} on {call.platform}: use {' or '.join(able)}, or leave it out.")
    return KERNELS[call.kernel]


def _fits(kernel: Any, call: AttentionCall, q: Array, k: Array) -> bool:
    return not isinstance(kernel, Fused) or kernel.fits(call, q, k)


def attention(call: AttentionCall, q: HeadQueries, k: HeadKeys, v: KeyValues) -> AttentionResult:
    """Returns the weighted values, and the log-sum-exp of each query's scores in float32, sinks included.

    A query that sees no key gets zeros and minus infinity.
    """
    call = call.placed(q.shape[1], k.shape[1])
    result: AttentionResult = kernel_of(call, q, k, v).forward(call, q, k, v)
    return result if call.sinks is None else with_sinks(call.sinks, *result)


def attention_backward(
    call: AttentionCall,
    given: BackwardInputs,
    q: HeadQueries,
    k: HeadKeys,
    v: KeyValues,
) -> tuple[Array, ...]:
    """Returns cotangents (dq, dk, dv), with sinks dsinks, and with ``call.learns`` those of the arrays of the score
    rule. The result in ``given`` may be over more keys; where it has a cotangent of the log-sum-exp, XLA runs.

    dS = P (dout v^T - delta), P = exp(S - lse), delta = the row sums of dout o, less the cotangent of lse.
    """
    call = call.placed(q.shape[1], k.shape[1])
    kernel = xla if len(given) > 3 else kernel_of(call, q, k, v)
    dq, dk, dv, *more = kernel.backward(call, given, q, k, v)
    return (dq, dk, dv, *([] if call.sinks is None else [sink_cotangents(call.sinks, given)]), *more)
