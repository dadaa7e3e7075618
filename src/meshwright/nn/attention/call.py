"""The parameters of one attention, from which each kernel gets its tile rule and its table of blocks."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from meshwright.masks import mods
from meshwright.masks.kernels import AttentionCase
from meshwright.masks.mods import Mask, Terms
from meshwright.masks.ranges import NoRangesError
from meshwright.masks.table import FULL, NOTHING, PARTIAL, BlockTable, block_table, in_blocks
from meshwright.nn.attention.platform import compute_capability, default_platform
from meshwright.nn.attention.tiles import DynamicInt, Mod, Tile, TileRule, tile_rule


@dataclass(frozen=True, kw_only=True)
class AttentionCall:
    """Parameters of one attention: the scale of scores, the mask and the score rule, and the sinks.

    ``q_idx`` and ``kv_idx`` are the indices of the rows, [T] and [S]; None: 0, 1, 2 and so on. ``sinks`` are an extra
    logit per head. Heads are numbered from ``first_head``. With ``learns`` a backward pass returns the cotangents of
    the score rule's arrays too. ``table`` is the mask's table of blocks if known. ``platform`` is the platform that the
    program is traced for; ``kernel`` forces a kernel by name.
    """

    scale: float
    mask: Mod | None = None
    score: Mod | None = None
    sinks: Float[Array, " N"] | None = None
    q_idx: Int[Array | np.ndarray, " T"] | None = None
    kv_idx: Int[Array | np.ndarray, " S"] | None = None
    first_head: DynamicInt = 0
    learns: bool = False
    table: BlockTable | None = None
    platform: str = field(default_factory=default_platform)
    kernel: str = ""

    def placed(self, length: int, num_keys: int) -> "AttentionCall":
        """Returns the call with ``q_idx`` and ``kv_idx`` filled in where they are None."""
        q_idx, kv_idx = (
            # NumPy's, so that they are known while tracing
            np.arange(num_rows, dtype=np.int32) if known_index is None else known_index
            for known_index, num_rows in ((self.q_idx, length), (self.kv_idx, num_keys))
        )
        return replace(self, q_idx=q_idx, kv_idx=kv_idx)

    @property
    def terms(self) -> Terms:
        """The catalogued masks whose conjunction is the mask, with their parameters; {"": ()} for any other mask."""
        return {} if self.mask is None else self.mask.terms or {"": ()}

    def case(self, q: Array, k: Array, v: Array) -> AttentionCase:
        """Returns the properties of the attention by which kernels decide whether they support it."""
        return AttentionCase(
            platform=self.platform,
            capability=compute_capability(),
            dtype=q.dtype.name,
            widths=(q.shape[-1], v.shape[-1]),
            positions=min(q.shape[1], k.shape[1]),
            terms=self.terms,
            in_order=self.in_order(q, k),
            scored=self.score is not None,
        )

    @property
    def ignores_places(self) -> bool:
        """True if no score depends on the positions of its query and key."""
        return self.score is None or self.score.terms.keys() == {"softcap"}

    def in_order(self, q: Array, k: Array) -> bool:
        """True if queries and keys are equally many and have indices 0, 1, 2 and so on, known while tracing."""
        row_indices = np.arange(q.shape[1])
        are_in_order = (isinstance(x, np.ndarray) and np.array_equal(x, row_indices) for x in (self.q_idx, self.kv_idx))
        return q.shape[1] == k.shape[1] and all(are_in_order)

    @property
    def _first(self) -> DynamicInt:
        """The first head; 0 if the mask does not depend on heads."""
        return 0 if self.terms.keys() <= _WITHOUT_DATA.keys() else self.first_head

    @property
    def is_known(self) -> bool:
        """True if the mask's table of blocks can be computed while tracing."""
        values_read = [*(self.mask.arrays if self.mask else ()), self.q_idx, self.kv_idx, self._first]
        return not any(isinstance(x, jax.core.Tracer) for x in values_read)

    def bounds(self, batch: int, heads: int, q_block: int, kv_block: int) -> BlockTable | None:
        """Returns a table, known while tracing, of all blocks in which the mask may see a pair; None if there is none.
        If the mask reads traced arrays, no block counts as fully visible."""
        if self.table is not None and not isinstance(self.table.kinds, np.ndarray):
            return None
        if self.is_known:
            return self.blocks(batch, heads, q_block, kv_block)
        terms = {name: arguments for name, arguments in self.terms.items() if name in _WITHOUT_DATA}
        mask = mods.and_masks(*(_WITHOUT_DATA[name](*arguments) for name, arguments in terms.items()))
        bound_call = replace(self, mask=Mod(lambda: mask, (), terms), table=None)
        if not terms or not bound_call.is_known:
            return None
        bound_table = bound_call.blocks(1, 1, q_block, kv_block)
        # what these terms see whole, the terms that read arrays may still hide
        return replace(bound_table, kinds=np.minimum(bound_table.kinds, PARTIAL))

    def rule(self, batch: int, heads: int) -> TileRule:
        """Returns the mask and the score rule as functions of a tile."""
        assert self.q_idx is not None
        assert self.kv_idx is not None
        indices = {"q_idx": jnp.asarray(self.q_idx), "kv_idx": jnp.asarray(self.kv_idx)}
        rule = tile_rule(self.mask, self.score, **indices, batch=batch, heads=heads, first_head=self.first_head)
        return rule._replace(learns=self.learns and self.score is not None)

    def blocks(self, batch: int, heads: int, q_block: int, kv_block: int) -> BlockTable:
        """Returns the table of blocks of this size: by NumPy while tracing if the mask and the indices are known, else
        computed by the program."""
        assert self.q_idx is not None
        assert self.kv_idx is not None
        if self.table is not None:
            return self.table.resized(q_block, kv_block)
        inner_mask, first_head = self.mask or mods.noop(), self._first
        mask: Mask = lambda b, h, q_idx, kv_idx: inner_mask(b, h + first_head, q_idx, kv_idx)  # noqa: E731
        table_options: dict[str, Any] = {"batch": batch, "heads": heads, "block": (q_block, kv_block)}
        if self.is_known:
            # a mask that calls jax.numpy would become part of the program that is being traced
            with jax.ensure_compile_time_eval():
                q_indices, kv_indices = np.asarray(self.q_idx), np.asarray(self.kv_idx)
                return block_table(mask, q_idx=q_indices, kv_idx=kv_indices, **table_options)
        indices = jnp.asarray(self.q_idx), jnp.asarray(self.kv_idx)
        try:
            return block_table(mask, q_idx=indices[0], kv_idx=indices[1], exact=False, **table_options)
        except NoRangesError:
            return _by_points(mask, *indices, **table_options)


_WITHOUT_DATA: dict[str, Callable[..., Mask]] = {
    "causal": mods.causal,
    "window": mods.window,
    "chunk": mods.chunk,
    "local": mods.local,
}


def _by_points(
    mask: Mask, q_idx: Array, kv_indices: Array, *, batch: int, heads: int, block: tuple[int, int]
) -> BlockTable:
    """Returns the table of a mask that cannot be evaluated on ranges of indices, one row of blocks at a time."""
    q_blocks, kv_blocks = in_blocks(q_idx, block[0]), in_blocks(kv_indices, block[1])
    b, h = jnp.arange(batch)[:, None, None, None], jnp.arange(heads)[None, :, None, None]

    def kinds(q_block: Array) -> Array:
        is_seen = mask(b, h, q_block[None, None, :, None], kv_blocks.reshape(1, 1, 1, -1))
        is_seen = jnp.broadcast_to(is_seen, (*is_seen.shape[:2], len(q_block), kv_blocks.size))
        is_seen = is_seen.reshape(*is_seen.shape[:3], *kv_blocks.shape)
        is_all_seen, is_any_seen = is_seen.all((2, 4)), is_seen.any((2, 4))
        return jnp.where(is_all_seen, FULL, jnp.where(is_any_seen, PARTIAL, NOTHING))

    all_kinds = jnp.moveaxis(lax.map(kinds, q_blocks), 0, 2)
    if len(kv_indices) % block[1]:
        # its mask has to hide the keys that pad the last block
        all_kinds = all_kinds.at[..., -1].min(PARTIAL)
    return BlockTable(
        kinds=all_kinds.astype(jnp.int8), q_block=block[0], kv_block=block[1], q_len=len(q_idx), kv_len=len(kv_indices)
    )


def prepared(call: AttentionCall, q: Array, k: Array, sizes: tuple[int, int]) -> tuple[TileRule, BlockTable]:
    """Returns the tile rule and the table of blocks of ``sizes`` queries and keys.

    The rule's arrays are padded to whole blocks, and its mask hides the keys that pad the last block.
    """
    batch, _, num_heads = q.shape[:3]
    num_keys = k.shape[1]
    rule = call.rule(batch, num_heads)
    rows, columns = ((padded(x, sizes[0], -1) for x in rule.rows), (padded(x, sizes[1], -1) for x in rule.columns))
    rule = rule._replace(rows=tuple(rows), columns=tuple(columns))
    if num_keys % sizes[1]:
        rule = _within(rule, num_keys, sizes[1])
    return rule, call.blocks(batch, num_heads, *sizes)


def padded(x: Array, block: int, axis: int) -> Array:
    """Pads a dim with zeros to a multiple of ``block``."""
    num_missing = -x.shape[axis] % block
    if not num_missing:
        return x
    pad_widths = [(0, 0)] * x.ndim
    pad_widths[axis] = (0, num_missing)
    return jnp.pad(x, pad_widths)


def _within(rule: TileRule, num_keys: int, block: int) -> TileRule:
    """Returns a rule whose mask hides the keys that pad the last block."""
    # not Booleans, which kernels do not read, see `TileRule`
    is_real = padded(jnp.ones((1, 1, num_keys), jnp.int32), block, -1)
    inner_mask, column_index = rule.mask, len(rule.columns)

    def mask(tile: Tile) -> Array:
        is_seen: Array = tile.columns[column_index] > 0
        return is_seen if inner_mask is None else is_seen & inner_mask(tile)

    return rule._replace(columns=(*rule.columns, is_real), mask=mask)


def counted(rule: TileRule, call: AttentionCall, sizes: tuple[int, int]) -> TileRule:
    """Returns a rule for a kernel that counts rows and columns from 0: if the call's indices differ, they become
    additional row and column arrays."""
    sides = ("query", "rows", call.q_idx), ("key", "columns", call.kv_idx)
    for (index_field, values_field, indices), block in zip(sides, sizes, strict=True):
        if not isinstance(indices, np.ndarray) or not np.array_equal(indices, np.arange(len(indices))):
            rule = _indexed(rule, index_field, values_field, padded(jnp.asarray(indices), block, -1)[None, None])
    return rule


def _indexed(rule: TileRule, index_field: str, values_field: str, indices: Array) -> TileRule:
    """Returns a rule that reads a tile's query or key index from ``indices``, an additional row or column array."""
    mask, score, value_index = rule.mask, rule.score, len(getattr(rule, values_field))

    def moved(tile: Tile) -> Tile:
        return tile._replace(**{index_field: getattr(tile, values_field)[value_index]})

    rule = rule._replace(
        mask=mask and (lambda tile: mask(moved(tile))), score=score and (lambda s, tile: score(s, moved(tile)))
    )
    if values_field == "rows":
        return rule._replace(rows=(*rule.rows, indices))
    return rule._replace(columns=(*rule.columns, indices))
