"""Rules of attention, forward and backward: how queries meet the keys of positions on other devices.

"gather" brings all keys and values to every device. "ulysses" exchanges positions for heads, so that each device has
all positions of some heads. "ring" leaves queries where they are and sends keys and values round, block by block,
while attention works on the block at hand.
"""

import msgspec

from meshwright.algebra.notation import ShardedArray
from meshwright.algebra.program import Op
from meshwright.algebra.steps import Step
from meshwright.algebra.trace import Trace, axes_beside, like, local, moved
from meshwright.core.errors import InputError

TILE_ROWS, MOST_TILES = 128, 8
"""Queries that a CPU takes at a time where rows attend to themselves, and how often at most unless they are few."""


class _Layout(msgspec.Struct, frozen=True, kw_only=True):
    """Where the arrays of one attention are while it is computed.

    ``axes`` are the mesh axes that split the positions of queries, and ``partial`` those over which cotangents of
    keys and values are left to be summed. ``here`` are the positions of queries, ``everywhere`` those of keys;
    ``documents`` are the numbers of the documents in the same two places, ``sinks`` the extra logit of each head.
    """

    way: str
    axes: tuple[str, ...]
    partial: tuple[str, ...]
    q: ShardedArray
    keys: tuple[ShardedArray, ShardedArray]
    here: ShardedArray
    everywhere: ShardedArray
    documents: tuple[ShardedArray, ...] = ()
    sinks: tuple[ShardedArray, ...] = ()

    @property
    def arrays(self) -> tuple[ShardedArray, ...]:
        """What attention is given on this device, besides keys on their way."""
        return (*self.sinks, *self.documents, self.q, *self.keys, self.here, self.everywhere)

    def statistics(self, out: ShardedArray) -> tuple[ShardedArray, ShardedArray]:
        """The result, and the logarithm of each query's sum of exponentials, as the device makes them."""
        rows = out.dims[:3]
        axes = tuple(self.q.axes_of(dim) for dim in rows)
        return like(out, self.q), ShardedArray("lse", rows, axes, dtype="fp32")


def _heads(array: ShardedArray) -> str:
    """The dim of heads: N of queries; K, or N, of keys and values."""
    return array.dims[2]


def _layout(op: Op, trace: Trace) -> _Layout:
    q, k, v, positions, *others = (trace.declared(n) for n in op.inputs)
    for key in (k, v):
        if key.axes_of(_heads(key)) != q.axes_of(_heads(q)) or key.axes_of("B") != q.axes_of("B"):
            raise InputError(f"attention of {q} with {key}: heads and sequences must be split alike.")
    axes = tuple(a for a in q.axes_of("T") if a not in positions.axes_of("T"))
    way = trace.shardings.strategy.context_attention if axes else "gather"
    keys = (k, v)
    if way == "gather":
        keys = tuple(_whole_length(a, positions) for a in keys)  # type: ignore[assignment]
    if way == "ulysses":
        q, *exchanged = (_heads_for_positions(a, positions, axes) for a in (q, *keys))
        keys = tuple(exchanged)  # type: ignore[assignment]
    if way == "ring" and any(key.axes_of("T") != q.axes_of("T") for key in keys):
        raise InputError(f"ring attention of {q} with {keys[0]}: positions must be split alike.")
    return _Layout(
        way=way,
        axes=axes,
        partial=axes if way == "gather" else (),
        q=q,
        keys=keys,
        here=like(positions, q),
        everywhere=positions,
        documents=tuple(a for other in others if "T" in other.dims for a in (like(other, q), other)),
        sinks=tuple(like(other, q) for other in others if "T" not in other.dims),
    )


def _whole_length(key: ShardedArray, positions: ShardedArray) -> ShardedArray:
    """Keys or values with every position in place: T is S, and S is not split."""
    return key.resharded({"T": positions.axes_of("T")})


def _heads_for_positions(array: ShardedArray, positions: ShardedArray, axes: tuple[str, ...]) -> ShardedArray:
    """Every position of the device's share of heads."""
    heads = _heads(array)
    return array.resharded({"T": positions.axes_of("T"), heads: array.axes_of(heads) + axes})


def _round(layout: _Layout, array: ShardedArray, result: ShardedArray, ring: str, op: Op) -> Step:
    """A permute of an array round the ring, as `num_moves` reads it."""
    attributes = (("ring", ring), *op.attributes)
    return Step(op="permute", inputs=(array,), result=result, axes=layout.axes, attributes=attributes)


def _attributes(layout: _Layout, op: Op) -> tuple[tuple[str, str], ...]:
    """Those of the op, and the axes round which its keys come by."""
    return (*op.attributes, ("ring", ",".join(layout.axes))) if layout.way == "ring" else op.attributes


def attention_forward(op: Op, trace: Trace) -> None:
    """Queries, keys and values where the layout has them; the result where the stream is."""
    layout, out = _layout(op, trace), trace.declared(op.out)
    for name, target in zip(op.inputs[:3], (layout.q, *layout.keys), strict=True):
        moved(trace, trace.declared(name), target)
    _move_facts(op, trace, layout)
    passing: tuple[ShardedArray, ...] = ()
    if layout.way == "ring":
        passing = tuple(key.replace(name=f"{key.name}_passing") for key in layout.keys)
        trace.add(*(_round(layout, a, b, "past", op) for a, b in zip(layout.keys, passing, strict=True)))
    result, lse = layout.statistics(out)
    trace.add(local(op.kind, (*passing, *layout.arrays), result, lse, attributes=_attributes(layout, op)))
    moved(trace, result, out)


def _move_facts(op: Op, trace: Trace, layout: _Layout) -> None:
    """Positions, documents and sinks of the device's own queries."""
    moved(trace, layout.everywhere, layout.here)
    if layout.documents:
        here, everywhere = layout.documents
        moved(trace, everywhere, here)
    for sinks in layout.sinks:
        moved(trace, trace.declared(sinks.name), sinks)


def attention_backward(op: Op, trace: Trace) -> None:
    """Cotangents of queries, keys and values, left to be summed where each device saw a part of the queries."""
    layout = _layout(op, trace)
    dout = trace.cotangent(op.out)
    dout = moved(trace, dout, like(dout, layout.q))
    o, lse = layout.statistics(trace.declared(op.out))
    trace.need(*layout.arrays, lse)
    # where the result is kept, it is kept as the product after it wants it
    moved(trace, trace.declared(op.out), o)
    dq = like(trace.cotangent(op.inputs[0]), layout.q)
    dkeys = tuple(
        like(trace.cotangent(n), key).replace(unreduced=layout.partial)
        for n, key in zip(op.inputs[1:3], layout.keys, strict=True)
    )
    dsinks = tuple(_sinks_cotangent(trace, sinks, dq) for sinks in layout.sinks)
    given, results = (dout, o, lse), (*dkeys, *dsinks)
    if layout.way == "ring":
        _ring_backward(op, trace, layout, given, dq, results)
    else:
        attributes = _attributes(layout, op)
        trace.add(local("attention_backward", (*given, *layout.arrays), dq, *results, attributes=attributes))
    names = (*op.inputs[:3], *(sinks.name for sinks in layout.sinks))
    for name, array in zip(names, (dq, *results), strict=True):
        trace.contribute(name, array)


def _sinks_cotangent(trace: Trace, sinks: ShardedArray, dq: ShardedArray) -> ShardedArray:
    cotangent = trace.cotangent(sinks.name)
    return cotangent.resharded({"N": sinks.axes_of("N")}, unreduced=axes_beside(dq, sinks))


def _ring_backward(
    op: Op,
    trace: Trace,
    layout: _Layout,
    given: tuple[ShardedArray, ...],
    dq: ShardedArray,
    results: tuple[ShardedArray, ...],
) -> None:
    """Keys and values go round once more, and with them their cotangents, which come home in the end."""
    dkeys, others = results[:2], results[2:]
    passing = tuple(key.replace(name=f"{key.name}_returning") for key in layout.keys)
    collected = tuple(key.replace(name=f"{key.name}_passing") for key in dkeys)
    trace.add(*(_round(layout, a, b, "past", op) for a, b in zip(layout.keys, passing, strict=True)))
    inputs = (*given, *passing, *layout.arrays)
    attributes = _attributes(layout, op)
    trace.add(local("attention_backward", inputs, dq, *collected, *others, attributes=attributes))
    trace.add(*(_round(layout, a, b, "home", op) for a, b in zip(collected, dkeys, strict=True)))
