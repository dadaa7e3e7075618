"""Amounts of work of a local step on one emulated device, in the units of `spec.calibration.Pace`."""

import msgspec
import numpy as np

from meshwright.algebra.kinds import nothing
from meshwright.algebra.notation import ShardedArray
from meshwright.algebra.ops import kind_of
from meshwright.algebra.ops.attention import (
    AttentionArrays,
    num_ring_blocks,
    positions_of,
    score_elements,
)
from meshwright.algebra.ops.cached_attention import reads_cache
from meshwright.algebra.ops.collective_matmul import num_blocks
from meshwright.algebra.sizes import Number
from meshwright.algebra.steps import Step
from meshwright.cost.work.ops import is_attention, op_flops, op_hbm_bytes
from meshwright.cost.work.slots import SlotSizes, computed_share, num_slot_calls, slot_sizes
from meshwright.masks.kernels import tile_rows
from meshwright.spec.calibration import HostRates, Pace


class Amounts(msgspec.Struct, frozen=True, kw_only=True):
    """Amounts of work of one execution of a step; `Pace` has the seconds of one unit of each field under its name."""

    flop: Number = 0.0
    score: Number = 0.0
    byte: Number = 0.0
    kept_byte: Number = 0.0
    call: Number = 0.0

    def math_s(self, pace: Pace) -> Number:
        """Returns the seconds of compute: FLOPs, scores and calls (a fixed time per call)."""
        return self.flop * pace.flop + self.score * pace.score + self.call * pace.call

    def memory_s(self, pace: Pace) -> Number:
        """Returns the seconds of memory traffic."""
        return self.byte * pace.byte + self.kept_byte * pace.kept_byte


def amounts_of(step: Step, sizes: SlotSizes, *, kept: frozenset[ShardedArray] = frozenset()) -> Amounts:
    """Returns the amounts of one execution of a local step, whose block keeps the results in ``kept``."""
    kept_bytes = slot_sizes(step, sizes).total(*(array for array in step.results if array in kept))
    if reads_cache(step):
        return Amounts(flop=op_flops(step, sizes), byte=op_hbm_bytes(step, sizes), call=2.0)
    if is_attention(step):
        share = tiled_share(step, sizes)
        return Amounts(
            flop=op_flops(step, sizes) * share, score=score_elements(step, sizes) * share, call=num_calls(step, sizes)
        )
    if is_product(step):
        flops = op_flops(step, sizes) * computed_share(step, sizes)
        calls = num_slot_calls(step, sizes) * len(step.parts or (step,)) * num_blocks(step, sizes)
        return Amounts(flop=flops, byte=op_hbm_bytes(step, slot_sizes(step, sizes)), kept_byte=kept_bytes, call=calls)
    return Amounts(byte=op_hbm_bytes(step, slot_sizes(step, sizes)), kept_byte=kept_bytes)


def pace_of(step: Step, host: HostRates) -> Pace:
    """Returns the pace of a local step on a host: of products, of its op, or of streams for other ops."""
    return host.product if is_product(step) or reads_cache(step) else host.ops.get(step.op, host.stream)


def is_product(step: Step) -> bool:
    """True if a local step is a matrix product, whole or block by block, or a loss head made of products."""
    kind = kind_of(step)
    return kind.group == "contraction" or (kind.group == "optimizer" and kind.flops is not nothing)


def num_calls(step: Step, sizes: SlotSizes) -> Number:
    """Returns the tiles of queries that attention on a host computes, per sequence, key head and block of keys."""
    arrays = AttentionArrays.of(step)
    key_sizes, num_queries = sizes.local(arrays.k), sizes.local(arrays.q)[positions_of(arrays.q)]
    num_heads = key_sizes[arrays.k.dims[2]]
    return key_sizes["B"] * num_heads * np.ceil(num_queries / tile_rows(num_queries)) * num_ring_blocks(step, sizes)


def tiled_share(step: Step, sizes: SlotSizes) -> Number:
    """Returns the share of the counted scores that attention on a host computes, tile of queries by tile.

    A tile is multiplied with the keys up to its last query, on average with (tiles + 1) / 2 tiles of keys. The share is
    1 if `op_flops` leaves masked scores out already, with a window, and with positions split over devices.
    """
    arrays, details = AttentionArrays.of(step), step.details
    is_split = details.ring or any(array.axes_of(positions_of(array)) for array in (arrays.q, arrays.k))
    if sizes.causal or details.sees_all or details.window is not None or is_split:
        return 1.0
    num_queries = sizes.dims[positions_of(arrays.q)]
    tile_len = tile_rows(num_queries)
    num_full_tiles = np.floor(num_queries / tile_len)
    rest_rows = num_queries - num_full_tiles * tile_len
    return (tile_len * tile_len * num_full_tiles * (num_full_tiles + 1) / 2 + rest_rows * num_queries) / num_queries**2
