"""Attention of new positions on the keys and values of a cache."""

import numpy as np

from meshwright.algebra.kinds import OpKind, StepKind, stream
from meshwright.algebra.notation import ShardedArray, product
from meshwright.algebra.ops.attention import Attention, AttentionArrays
from meshwright.algebra.sizes import Number, OpSizes
from meshwright.algebra.steps import Step
from meshwright.algebra.tape import Tape
from meshwright.core.errors import InputError


class CachedAttention(Attention, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Details of attention; ``paged`` says that the cache is a pool of pages, whose table follows the positions."""

    paged: bool = False


def queries_of(step: Step) -> ShardedArray:
    """Returns the queries of any attention step; a step on a cache has them first."""
    return step.inputs[0] if isinstance(step.details, CachedAttention) else AttentionArrays.of(step).q


def forward(tape: Tape) -> None:
    """Attends with queries that are sharded as their cache is, then reshards the result for the product after it.

    Axes that split heads of the queries and sequences of the cache move from one to the other, and back after it.
    """
    first, *others = tape.inputs
    cache = next(array for array in others if array.dims[1:2] in (("S",), ("Pl",)))
    rows = cache.axes_of(cache.dims[0])
    heads = tuple(axis for axis in first.axes_of("N") if axis not in rows)
    here = first.resharded({"B": rows, "N": heads})
    for array in others:
        # a latent (B S Rkv) has no heads: every device has all of it
        if array.dims[2:3] in (("K",), ("Kt",), ("Kct",)) and array.axes_of(array.dims[2]) != heads:
            raise InputError(f"attention of {first} with {array}: heads must be split alike. Give N and K equal axes.")
        if "Pg" in array.dims and array.axes_of("Pg") != rows:
            raise InputError(
                f"attention of {first} with {array}: pages must be split as sequences. Give Pg the axes of B."
            )
    inputs = tuple(tape.move(array, array.like(here)) for array in tape.inputs)
    result = tape.out.like(here)
    tape.run(tape.op.kind, inputs, result, details=tape.details(CachedAttention))
    tape.move(result, tape.out)


def slots_kept(slots: Number, window: int | None) -> Number:
    """Returns the slots of one sequence that has ``slots`` positions: at most the window, if there is one."""
    if window is None:
        return slots
    return np.minimum(slots, window) if isinstance(slots, np.ndarray) else min(slots, window)


def slots_met(step: Step, sizes: OpSizes) -> Number:
    """Returns the slots of one sequence that attention reads: those of all its pages, or of its row in the cache."""
    if step.details.paged:
        return sizes.dims["Bp"] * sizes.dims["Pl"]
    return slots_kept(sizes.dims["S"], step.details.window)


def flops(step: Step, sizes: OpSizes) -> Number:
    """Returns 2 B T N S (H + Hv), with S slots: every slot is multiplied, whether it is visible or not."""
    queries, _, values = step.inputs[:3]
    rows = product(sizes.local(queries)[dim] for dim in queries.dims[:-1])
    return 2.0 * rows * slots_met(step, sizes) * (sizes.dims[queries.dims[-1]] + sizes.dims[values.dims[-1]])


def hbm_bytes(step: Step, sizes: OpSizes) -> Number:
    """Counts every input, read, and the result, written once; of a cache, all slots of these sequences.

    Pages of the sequences are gathered first: read, written side by side, and read again. Other pages are not read.
    """
    caches = [array for array in step.inputs if array.dims[1:2] in (("S",), ("Pl",))]
    slots = sizes.local(step.inputs[0])["B"] * slots_met(step, sizes)
    # bytes of one slot: the bytes of a cache over the elements of its first two dims
    each = sum(sizes.bytes(a) / sizes.elements(a.replace(dims=a.dims[:2], axes=a.axes[:2])) for a in caches)
    return stream(step, sizes) - sizes.total(*caches) + (3 if step.details.paged else 1) * slots * each


OP = OpKind(
    forward=forward,
    steps={"cached_attention": StepKind(flops=flops, hbm_bytes=hbm_bytes, group="attention")},
)
