"""Fused kernels of accelerators behind the signature of `choice`: arrays in whole blocks, rules that count from 0."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from meshwright.masks.table import BlockLists, BlockTable
from meshwright.nn.attention.call import AttentionCall, counted, padded, prepared
from meshwright.nn.attention.kernels.scores import AttentionResult, BackwardInputs, QkvCotangents
from meshwright.nn.attention.platform import compute_capability
from meshwright.nn.attention.tiles import TileRule

LEAST = 128
"""Rows that a block is a multiple of."""


@dataclass(frozen=True)
class Fused:
    """A kernel of one platform: a module here with ``forward``, ``backward`` and ``BLOCKS``, and what it is ``able`` to
    do. The module is loaded at its first use: Pallas takes time to import.

    Rules are elementwise on a tile and learn nothing. ``fits`` says whether lists of blocks do.
    """

    module: str
    able: Callable[[AttentionCall, Array, Array, Array], bool]

    @property
    def kernel(self) -> ModuleType:
        """The module."""
        return import_module(f"{__package__}.{self.module}")

    def takes(self, call: AttentionCall, q: Array, k: Array, v: Array) -> bool:
        """True if the kernel computes the attention."""
        if not self.able(call, q, k, v) or call.learns or min(q.shape[1], k.shape[1]) < LEAST:
            return False
        call = call.placed(q.shape[1], k.shape[1])
        rule, table = prepared(call, q, k, self._blocks(q, k))
        fits = getattr(self.kernel, "fits", None)
        return not rule.tables and (fits is None or fits(_lists(table, "queries")))

    def forward(self, call: AttentionCall, q: Array, k: Array, v: Array, **options: Any) -> AttentionResult:
        """Returns the result and the log-sum-exp in float32."""
        rule, table, blocks = self._prepared(call, q, k)
        arrays = padded(q, blocks[0], 1), *(padded(x, blocks[1], 1) for x in (k, v))
        o, lse = self.kernel.forward(rule, _lists(table, "queries"), blocks, call.scale, *arrays, **options)
        return o[:, : q.shape[1]], lse[:, : q.shape[1]]

    def backward(
        self, call: AttentionCall, given: BackwardInputs, q: Array, k: Array, v: Array, **options: Any
    ) -> QkvCotangents:
        """Returns (dq, dk, dv)."""
        rule, table, blocks = self._prepared(call, q, k)
        dout, o, lse = (padded(x, blocks[0], 1) for x in given)
        arrays = padded(q, blocks[0], 1), *(padded(x, blocks[1], 1) for x in (k, v))
        lists = _lists(table, "queries"), _lists(table, "keys")
        own = dout.astype(q.dtype), o.astype(q.dtype), lse
        dq, dk, dv = self.kernel.backward(rule, *lists, blocks, call.scale, own, *arrays, **options)
        return dq[:, : q.shape[1]], dk[:, : k.shape[1]], dv[:, : v.shape[1]]

    def _prepared(self, call: AttentionCall, q: Array, k: Array) -> tuple[TileRule, BlockTable, tuple[int, int]]:
        blocks = self._blocks(q, k)
        rule, table = prepared(call, q, k, blocks)
        return counted(rule, call, blocks), table, blocks

    def _blocks(self, q: Array, k: Array) -> tuple[int, int]:
        most = self.kernel.BLOCKS
        rows, columns = (
            next((size for size in (most[n], most[n] // 2) if size >= LEAST and x.shape[1] % size == 0), LEAST)
            for n, x in enumerate((q, k))
        )
        return rows, columns


def _lists(table: BlockTable, over: Any) -> BlockLists:
    return BlockLists(*map(jnp.asarray, table.lists(over)))


PALLAS = Fused(
    "pallas_tpu",
    lambda call, q, k, v: (
        call.platform == "tpu" and q.dtype.name in ("bfloat16", "float32") and q.shape[3] % 8 == v.shape[3] % 8 == 0
    ),
)
"""Our kernels for TPUs: heads of a multiple of 8, in bf16 and float32."""

MOSAIC = Fused(
    "mosaic_gpu",
    lambda call, q, k, v: (
        call.platform == "cuda"
        and int(compute_capability()) == 9
        and q.dtype.name in ("bfloat16", "float16")
        and q.shape[3] == v.shape[3]
        and q.shape[3] in (64, 128)
    ),
)
"""Our kernels for Hopper: heads of 64 or 128, in bf16 and fp16. Blackwell's matrix units need others."""
