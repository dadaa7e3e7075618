"""Rules of what only generation does, forward alone: write and read a cache, pick a row, multiply quantised weights.

A cache[B,S,K,H] stays on its devices: S is never split, and queries must have the heads that lie beside them.
"""

import msgspec

from meshwright.algebra.einsum import align, local_product, product_steps, reshard
from meshwright.algebra.ops.local import elementwise_forward, one_hot
from meshwright.algebra.program import Op
from meshwright.algebra.trace import Trace, like, local, moved, require_whole
from meshwright.core.errors import InputError


def no_backward(op: Op, trace: Trace) -> None:
    """Programs that generate are not differentiated."""
    raise AssertionError(f"{op.kind} has no backward pass; derive it with derive_forward")


def pick_forward(op: Op, trace: Trace) -> None:
    """``pick(x[B,T,D], number[B])``: one position of each row, as a product with one-hot rows."""
    x, number, out = (trace.declared(n) for n in (*op.inputs, op.out))
    result = out.replace(axes=tuple(x.axes_of(dim) for dim in out.dims), unreduced=x.axes_of("T"))
    here = moved(trace, number, like(number, x))
    trace.add(local(op.kind, (x, here), result))
    moved(trace, result, out)


def cache_write_forward(op: Op, trace: Trace) -> None:
    """``cache_write(cache[B,S,..], values[B,T,..], where)``: every position of the values, where the cache lies."""
    cache, values, where, out = (trace.declared(n) for n in (*op.inputs, op.out))
    require_whole(cache, "S", op.kind)
    here = like(values, cache).resharded({"T": ()})
    moved(trace, values, here)
    place = moved(trace, where, like(where, cache))
    trace.add(local(op.kind, (cache, here, place), out, attributes=op.attributes))


def cached_attention_forward(op: Op, trace: Trace) -> None:
    """Queries beside the heads of their cache; the result where the product after it wants it."""
    first, *others = (trace.declared(n) for n in op.inputs)
    for array in others:
        if array.axes_of("K") != first.axes_of("N") and "K" in array.dims:
            raise InputError(f"attention of {first} with {array}: heads must be split alike.")
    inputs = (first, *(moved(trace, array, like(array, first)) for array in others))
    out = trace.declared(op.out)
    result = like(out, first)
    trace.add(local(op.kind, inputs, result, attributes=op.attributes))
    moved(trace, result, out)


def quantised_einsum_forward(op: Op, trace: Trace) -> None:
    """``lhs * values`` by the rules of any product, times the scale of each output channel."""
    lhs, values, scale, out = (trace.declared(n) for n in (*op.inputs, op.out))
    *before, product = product_steps(lhs, values, out, slice_axes=trace.slice_axes)
    trace.add(*before)
    here = moved(trace, scale, like(scale, product.result))
    trace.add(msgspec.structs.replace(product, op=op.kind, inputs=(*product.inputs, here)))
    moved(trace, product.result, out)


def quantised_embed_forward(op: Op, trace: Trace) -> None:
    """Rows of the part of the table that a device holds, each times its scale."""
    numbers, values, scale, out = (trace.declared(n) for n in (*op.inputs, op.out))
    left, right = align(one_hot(numbers, values), values, out)
    inputs = (
        moved(trace, numbers, like(numbers, left)),
        moved(trace, values, right),
        moved(trace, scale, like(scale, right)),
    )
    result = local_product(left, right, out)
    trace.add(local(op.kind, inputs, result), *reshard(result, out))


GENERATION_KINDS = {
    "pick": (pick_forward, no_backward),
    "cache_write": (cache_write_forward, no_backward),
    "cached_attention": (cached_attention_forward, no_backward),
    "cached_latent_attention": (cached_attention_forward, no_backward),
    "own_part": (elementwise_forward, no_backward),
    "kv_scale": (elementwise_forward, no_backward),
    "kv_quantise": (elementwise_forward, no_backward),
    "softcap": (elementwise_forward, no_backward),
    "quantised_einsum": (quantised_einsum_forward, no_backward),
    "quantised_embed": (quantised_embed_forward, no_backward),
}
"""Op kind -> (forward rule, what refuses a backward pass)."""
