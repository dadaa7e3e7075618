"""Rules of products, norms, rotations, elementwise ops and look-ups, forward and backward."""

from meshwright.algebra.einsum import align, local_product, product_steps, reshard
from meshwright.algebra.notation import ShardedArray
from meshwright.algebra.program import Op
from meshwright.algebra.trace import Trace, axes_beside, like, local, moved, require_whole

# -- einsum -----------------------------------------------------------------------------------------


def einsum_forward(op: Op, trace: Trace) -> None:
    """The product by the rules of one sharded einsum."""
    lhs, rhs, out = (trace.declared(n) for n in (*op.inputs, op.out))
    steps = product_steps(lhs, rhs, out, slice_axes=trace.slice_axes)
    trace.add(*steps, *reshard(steps[-1].result, out))


def einsum_backward(op: Op, trace: Trace) -> None:
    """dB = A * dC first, then dA = dC * B, each with its primal's sharding (section 5.4.2)."""
    lhs, rhs = op.inputs
    dout = trace.cotangent(op.out)
    for left, right, name in ((trace.declared(lhs), dout, rhs), (dout, trace.declared(rhs), lhs)):
        steps = product_steps(left, right, trace.cotangent(name), slice_axes=trace.slice_axes)
        trace.add(*steps)
        trace.contribute(name, steps[-1].result)


# -- norms: a row is reduced over the dim of the scale ---------------------------------------------------


def norm_forward(op: Op, trace: Trace) -> None:
    """``kind(x, scale)`` or ``kind(x, scale, bias)`` where the row lies."""
    x, *vectors, out = (trace.declared(n) for n in (*op.inputs, op.out))
    for dim in vectors[0].dims:
        require_whole(x, dim, op.kind)
    whole = tuple(moved(trace, v, _whole(v)) for v in vectors)
    trace.add(local(op.kind, (x, *whole), like(out, x)), *reshard(like(out, x), out))


def norm_backward(op: Op, trace: Trace) -> None:
    """Cotangents of the row and, summed over every row of the device, of the vectors."""
    x, scale = (trace.declared(n) for n in op.inputs[:2])
    dx, *dvectors = (trace.cotangent(n) for n in op.inputs)
    sums = [_whole(d).replace(unreduced=x.spread) for d in dvectors]
    trace.need(x, _whole(scale))
    trace.add(local(f"{op.kind}_backward", (trace.cotangent(op.out), x, _whole(scale)), dx, *sums))
    for name, array in zip(op.inputs, (dx, *sums), strict=True):
        trace.contribute(name, array)


def _whole(vector: ShardedArray) -> ShardedArray:
    return vector.resharded(dict.fromkeys(vector.dims, ()))


# -- rope -------------------------------------------------------------------------------------------


def rope_forward(op: Op, trace: Trace) -> None:
    """Each position rotated where it lies."""
    x, positions, out = (trace.declared(n) for n in (*op.inputs, op.out))
    trace.add(local(op.kind, (x, moved(trace, positions, like(positions, x))), out))


def rope_backward(op: Op, trace: Trace) -> None:
    """The cotangent rotated back."""
    x, positions = (trace.declared(n) for n in op.inputs)
    trace.need(like(positions, x))
    inputs = (trace.cotangent(op.out), like(positions, x))
    trace.add(local("rope_backward", inputs, trace.cotangent(op.inputs[0])))
    trace.contribute(op.inputs[0], trace.cotangent(op.inputs[0]))


# -- elementwise: every input is brought to the result's sharding; one that lacks a dim is broadcast -----------


def elementwise_forward(op: Op, trace: Trace) -> None:
    """Inputs brought to the sharding of the result."""
    out = trace.declared(op.out)
    inputs = tuple(moved(trace, trace.declared(n), like(trace.declared(n), out)) for n in op.inputs)
    trace.add(local(op.kind, inputs, out))


def linear_backward(op: Op, trace: Trace) -> None:
    """Of a sum or a concatenation: an input as wide as the result gets its cotangent, a broadcast one a sum of it."""
    dout = trace.cotangent(op.out)
    narrow = []
    for name in op.inputs:
        cotangent = _local_cotangent(trace, name, dout)
        if cotangent.dims != dout.dims:
            narrow.append((name, cotangent))
            continue
        trace.add(local("copy", (dout,), cotangent))
        trace.contribute(name, cotangent)
    if narrow:
        trace.add(local(f"{op.kind}_backward", (dout,), *(array for _, array in narrow)))
    for name, cotangent in narrow:
        trace.contribute(name, cotangent)


def elementwise_backward(op: Op, trace: Trace) -> None:
    """Cotangents from the inputs of the forward pass, in the sharding of the result."""
    out = trace.declared(op.out)
    inputs = tuple(like(trace.declared(n), out) for n in op.inputs)
    trace.need(*inputs)
    cotangents = tuple(_local_cotangent(trace, n, out) for n in op.inputs)
    trace.add(local(f"{op.kind}_backward", (trace.cotangent(op.out), *inputs), *cotangents))
    for name, cotangent in zip(op.inputs, cotangents, strict=True):
        trace.contribute(name, cotangent)


def _local_cotangent(trace: Trace, name: str, out: ShardedArray) -> ShardedArray:
    cotangent = like(trace.cotangent(name), out)
    return cotangent.replace(unreduced=axes_beside(out, cotangent))


# -- look-up: the product of a one-hot row and the table ------------------------------------------------


def one_hot(numbers: ShardedArray, table: ShardedArray) -> ShardedArray:
    """Numbers seen as rows over the table's first dim; each device makes just the part of it that it needs."""
    rows = table.dims[0]
    return ShardedArray(numbers.name, (*numbers.dims, rows), (*numbers.axes, table.axes_of(rows)))


def embed_forward(op: Op, trace: Trace) -> None:
    """Rows of the part of the table that a device holds."""
    numbers, table, out = (trace.declared(n) for n in (*op.inputs, op.out))
    left, right = align(one_hot(numbers, table), table, out)
    inputs = (moved(trace, numbers, like(numbers, left)), moved(trace, table, right))
    result = local_product(left, right, out)
    trace.add(local(op.kind, inputs, result), *reshard(result, out))


def embed_backward(op: Op, trace: Trace) -> None:
    """Cotangents added up per row of the table."""
    numbers, table = (trace.declared(n) for n in op.inputs)
    dout, dtable = trace.cotangent(op.out), trace.cotangent(op.inputs[1])
    left, right = align(one_hot(numbers, table), dout, dtable)
    here = like(numbers, left)
    trace.need(numbers)
    result = local_product(left, right, dtable)
    trace.add(*reshard(numbers, here), *reshard(dout, right), local("embed_backward", (here, right), result))
    trace.contribute(op.inputs[1], result)
