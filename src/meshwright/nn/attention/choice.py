"""Attention of one device's queries to its keys, forward and backward, by the first kernel that supports the call.

Queries and keys are [B, T, N, H] and [B, S, K, H], values [B, S, K, Hv]; query heads n = k G .. k G + G - 1 read key
head k. The backward pass gets the result and log-sum-exp of the forward pass, and recomputes the weights from these.
"""

from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from meshwright.core.errors import InputError
from meshwright.masks.kernels import LEAST, TAKES
from meshwright.masks.table import BlockLists, BlockTable
from meshwright.nn.attention import kernels
from meshwright.nn.attention.call import AttentionCall, counted, padded, prepared
from meshwright.nn.attention.kernels import cudnn, scores, xla
from meshwright.nn.attention.tiles import TileRule


@dataclass(frozen=True)
class Fused:
    """A kernel of one platform: a module in `kernels` with ``forward``, ``backward``, ``BLOCKS`` and, if its memory for
    lists of blocks is limited, ``fits``. It is imported at its first use: Pallas takes time to import."""

    module: str

    @property
    def kernel(self) -> ModuleType:
        """The imported module."""
        return import_module(f"{kernels.__name__}.{self.module}")

    def fits(self, call: AttentionCall, q: Array, k: Array) -> bool:
        """True if the lists of blocks fit in the kernel, and the rule has no lookup tables and needs no gradients."""
        if call.learns:
            return False
        rule, table = prepared(call, q, k, self._blocks(q, k))
        fits_lists = getattr(self.kernel, "fits", None)
        return not rule.tables and (fits_lists is None or fits_lists(_lists(table, "queries")))

    def forward(self, call: AttentionCall, q: Array, k: Array, v: Array, **options: Any) -> scores.AttentionResult:
        """Returns the result, and the log-sum-exp in float32."""
        rule, table, block_sizes = self._prepared(call, q, k)
        padded_qkv = padded(q, block_sizes[0], 1), *(padded(x, block_sizes[1], 1) for x in (k, v))
        o, lse = self.kernel.forward(rule, _lists(table, "queries"), block_sizes, call.scale, *padded_qkv, **options)
        return o[:, : q.shape[1]], lse[:, : q.shape[1]]

    def backward(
        self, call: AttentionCall, given: scores.BackwardInputs, q: Array, k: Array, v: Array, **options: Any
    ) -> scores.QkvCotangents:
        """Returns (dq, dk, dv)."""
        rule, table, block_sizes = self._prepared(call, q, k)
        dout, o, lse = (padded(x, block_sizes[0], 1) for x in given)
        padded_qkv = padded(q, block_sizes[0], 1), *(padded(x, block_sizes[1], 1) for x in (k, v))
        lists = _lists(table, "queries"), _lists(table, "keys")
        inputs = dout.astype(q.dtype), o.astype(q.dtype), lse
        dq, dk, dv = self.kernel.backward(rule, lists, block_sizes, call.scale, inputs, *padded_qkv, **options)
        return dq[:, : q.shape[1]], dk[:, : k.shape[1]], dv[:, : v.shape[1]]

    def _prepared(self, call: AttentionCall, q: Array, k: Array) -> tuple[TileRule, BlockTable, tuple[int, int]]:
        block_sizes = self._blocks(q, k)
        rule, table = prepared(call, q, k, block_sizes)
        return counted(rule, call, block_sizes), table, block_sizes

    def _blocks(self, q: Array, k: Array) -> tuple[int, int]:
        sizes = self.kernel.BLOCKS
        q_block, kv_block = (
            # a block that divides the rows pads nothing, and the smallest pads least
            next((size for size in (sizes[n], sizes[n] // 2) if size >= LEAST and x.shape[1] % size == 0), LEAST)
            for n, x in enumerate((q, k))
        )
        return q_block, kv_block


def _lists(table: BlockTable, over: xla.Side) -> BlockLists:
    return BlockLists(*map(jnp.asarray, table.lists(over)[:3]))


KERNELS: dict[str, Any] = {"cudnn": cudnn, "mosaic": Fused("mosaic_gpu"), "pallas": Fused("pallas_tpu"), "xla": xla}
"""The kernels of `masks.kernels` by name; each has ``forward`` and ``backward``."""


def kernel_of(call: AttentionCall, q: Array, k: Array, v: Array) -> Any:
    """Returns the kernel that ``call.kernel`` names, or without a name the first one that supports the call.

    Raises: InputError: the named kernel does not support the call.
    """
    case = call.case(q, k, v)
    taker_names = (name for name, takes in TAKES.items() if takes(case))
    # lazy, since `fits` builds the table of blocks: none is built after the first kernel that fits
    fitting_names = (n for n in taker_names if not isinstance(KERNELS[n], Fused) or KERNELS[n].fits(call, q, k))
    if not call.kernel:
        return KERNELS[next(fitting_names)]
    names = [*fitting_names]
    if call.kernel not in names:
        raise InputError(f"kernel {call.kernel!r} cannot run on {call.platform}: use {' or '.join(names)}, or omit it.")
    return KERNELS[call.kernel]


def attention(
    call: AttentionCall, q: scores.HeadQueries, k: scores.HeadKeys, v: scores.KeyValues
) -> scores.AttentionResult:
    """Returns the weighted values, and the log-sum-exp of each query's scores in float32, sinks included.

    A query that sees no key gets zeros and minus infinity.
    """
    call = call.placed(q.shape[1], k.shape[1])
    o_and_lse: scores.AttentionResult = kernel_of(call, q, k, v).forward(call, q, k, v)
    # sinks are added by the log-sum-exp, so that kernels need no code for them
    return o_and_lse if call.sinks is None else scores.with_sinks(call.sinks, *o_and_lse)


def attention_backward(
    call: AttentionCall,
    given: scores.BackwardInputs,
    q: scores.HeadQueries,
    k: scores.HeadKeys,
    v: scores.KeyValues,
) -> tuple[Array, ...]:
    """Returns (dq, dk, dv), with sinks then dsinks, and with ``call.learns`` then the cotangents of the score rule's
    arrays. The result in ``given`` may be over more keys; if ``given`` has a cotangent of the log-sum-exp, XLA's kernel
    runs.

    dS = P (dout v^T - delta), P = exp(S - lse), delta = the row sums of dout o, less the cotangent of lse."""
    call = call.placed(q.shape[1], k.shape[1])
    # fused kernels compute delta themselves, without the cotangent of the log-sum-exp
    kernel = xla if len(given) > 3 else kernel_of(call, q, k, v)
    dq, dk, dv, *learned = kernel.backward(call, given, q, k, v)
    return (dq, dk, dv, *([] if call.sinks is None else [scores.sink_cotangents(call.sinks, given)]), *learned)
