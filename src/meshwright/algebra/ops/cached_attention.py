"""Attention of new positions on the keys and values of a cache."""

from meshwright.algebra.kinds import OpKind, StepKind, stream
from meshwright.algebra.notation import ShardedArray, product
from meshwright.algebra.ops.attention import Attention
from meshwright.algebra.program import Op
from meshwright.algebra.sizes import Number, OpSizes
from meshwright.algebra.steps import Step
from meshwright.algebra.trace import Trace, details_of, like, local, moved
from meshwright.core.errors import InputError


class CachedAttention(Attention, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Details: those of any attention, and whether the cache is a pool of pages, whose table follows the positions."""

    paged: bool = False


def forward(op: Op, trace: Trace) -> None:
    """Queries beside the heads of their cache; the result in the sharding that the product after it wants."""
    first, *others = (trace.declared(n) for n in op.inputs)
    for array in others:
        if array.axes_of("K") != first.axes_of("N") and "K" in array.dims:
            raise InputError(f"attention of {first} with {array}: heads must be split alike.")
        if "Pg" in array.dims and array.axes_of("Pg") != first.axes_of("B"):
            raise InputError(f"attention of {first} with {array}: pages must be split as their sequences are.")
    inputs = (first, *(moved(trace, array, like(array, first)) for array in others))
    out = trace.declared(op.out)
    result = like(out, first)
    trace.add(local(op.kind, inputs, result, details=details_of(op, CachedAttention)))
    moved(trace, result, out)


def slots_met(cache: ShardedArray, step: Step, sizes: OpSizes) -> Number:
    """Slots of one sequence: those of its pages, or of its own part of the cache."""
    return sizes.dims["Bp"] * sizes.dims["Pl"] if step.details.paged else sizes.local(cache)[cache.dims[1]]


def flops(step: Step, sizes: OpSizes) -> Number:
    """2 B T N S (H + Hv), S the slots of the cache: every slot is multiplied, whether it is visible or not."""
    queries, keys, values = step.inputs[:3]
    rows = product(sizes.local(queries)[dim] for dim in queries.dims[:-1])
    return 2.0 * rows * slots_met(keys, step, sizes) * (sizes.dims[queries.dims[-1]] + sizes.dims[values.dims[-1]])


def hbm_bytes(step: Step, sizes: OpSizes) -> Number:
    """Every input read and the result written once, the whole cache among them.

    Pages of the sequences are gathered first: read, written side by side, and read again. Other pages are not touched.
    """
    pools = [array for array in step.inputs if "Pg" in array.dims]
    rows = sizes.local(step.inputs[0])["B"] * slots_met(step.inputs[1], step, sizes)
    gathered = sum(sizes.bytes(pool) / sizes.elements(_slots_of(pool)) for pool in pools)
    return stream(step, sizes) - sizes.total(*pools) + 3 * rows * gathered


def _slots_of(pool: ShardedArray) -> ShardedArray:
    """The slots of a pool of pages, without what lies in each."""
    return pool.replace(dims=pool.dims[:2], axes=pool.axes[:2])


OP = OpKind(
    forward=forward,
    steps={"cached_attention": StepKind(flops=flops, hbm_bytes=hbm_bytes, group="attention")},
)
