"""Fused kernels of accelerators behind the signature of `choice`: arrays in whole blocks, rules that count from 0."""

from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from meshwright.masks.kernels import LEAST
from meshwright.masks.table import BlockLists, BlockTable
from meshwright.nn.attention.call import AttentionCall, counted, padded, prepared
from meshwright.nn.attention.kernels.scores import AttentionResult, BackwardInputs, QkvCotangents
from meshwright.nn.attention.tiles import TileRule


@dataclass(frozen=True)
class Fused:
    """A kernel of one platform: a module here with ``forward``, ``backward`` and ``BLOCKS``, and ``fits`` where it has
    no room for some lists of blocks. The module is loaded at its first use: Pallas takes time to import."""

    module: str

    @property
    def kernel(self) -> ModuleType:
        """The module."""
        return import_module(f"{__package__}.{self.module}")

    def fits(self, call: AttentionCall, q: Array, k: Array) -> bool:
        """True if the kernel has room for the lists of blocks, and the rule looks nothing up and learns nothing."""
        if call.learns:
            return False
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
    return BlockLists(*map(jnp.asarray, table.lists(over)[:3]))


PALLAS, MOSAIC = Fused("pallas_tpu"), Fused("mosaic_gpu")
