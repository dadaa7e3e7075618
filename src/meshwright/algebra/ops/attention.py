"""Attention: how queries meet the keys of positions on other devices.

"gather" brings all keys and values to every device. "ulysses" exchanges positions for heads, so that each device has
all positions of some heads. "ring" leaves queries where they are and sends keys and values round, block by block,
while attention works on the block at hand; where every key is seen they are gathered in its place.

Keys may have another dim of positions than queries, as an encoder's result has. With ``sees_all`` every query sees
every key, and no positions are wanted.
"""

from typing import Any, Literal

import msgspec
import numpy as np

from meshwright.algebra.kinds import OpKind, StepKind, stream
from meshwright.algebra.notation import ShardedArray, product
from meshwright.algebra.program import Op
from meshwright.algebra.rewrites.rings import Round
from meshwright.algebra.sizes import Number, OpSizes
from meshwright.algebra.steps import Step
from meshwright.algebra.trace import Trace, axes_beside, details_of, like, local, moved
from meshwright.core.errors import InputError

TILE_ROWS, MOST_TILES = 128, 8
"""Queries that a CPU takes at a time where rows attend to themselves, and how often at most unless they are few."""


class Attention(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Details: whether later keys are seen too; the window in positions and the cap of scores, where there are any; the
    axes of the ring of keys."""

    sees_all: bool = False
    window: int | None = None
    softcap: float | None = None
    ring: tuple[str, ...] = ()

    @property
    def can_ring(self) -> bool:
        """Whether keys can come round block by block."""
        return not self.sees_all


class AttentionArrays(msgspec.Struct, frozen=True, kw_only=True):
    """Operands of an attention step by role: ShardedArrays of the step, or what an interpreter holds for each.

    A backward step is ``given`` the cotangent of the result, the result and its log-sum-exp. ``passing`` are the keys
    and values that go round a ring. ``documents`` are the numbers of queries' and keys' documents. ``sinks``, or
    another parameter of each head, and positions are there where the op has them.
    """

    given: tuple[Any, ...]
    passing: tuple[Any, ...]
    sinks: Any | None
    documents: tuple[Any, ...]
    q: Any
    k: Any
    v: Any
    positions: Any
    key_positions: Any

    @classmethod
    def of(cls, step: Step, values: Any = None) -> "AttentionArrays":
        """The operands of a step, or the values given for them in the order of its inputs."""
        held = step.inputs if values is None else tuple(values)
        placed = len(step.inputs[-1].dims) == _DIMS_OF_POSITIONS
        left = len(held) - (5 if placed else 3)
        given = 3 if step.op.endswith("_backward") else 0
        passing = given + (2 if step.details.ring else 0)
        documents = 2 * (sum("B" in array.dims for array in step.inputs[passing:left]) // 2)
        q, k, v, positions, key_positions = held[left:] if placed else (*held[left:], None, None)
        return cls(
            given=held[:given],
            passing=held[given:passing],
            sinks=held[passing] if left - documents > passing else None,
            documents=held[left - documents : left],
            q=q,
            k=k,
            v=v,
            positions=positions,
            key_positions=key_positions,
        )


_DIMS_OF_POSITIONS = 2
"""q, k and v, of four dims, end the inputs of every attention step, or the positions of queries and keys after them."""


def queries_of(step: Step) -> ShardedArray:
    """The queries of any attention step; those of a cache come first."""
    return step.inputs[0] if step.op.startswith("cached") else AttentionArrays.of(step).q


class _Layout(msgspec.Struct, frozen=True, kw_only=True):
    """Where the arrays of one attention are while it is computed.

    ``axes`` are the mesh axes that split the positions of queries, and ``partial`` those over which cotangents of
    keys and values are left to be summed. ``places`` are the positions of queries, then those of keys; ``documents``
    are the numbers of the documents in the same two places, ``sinks`` the extra logit, or other parameters, of each
    head.
    """

    way: str
    axes: tuple[str, ...]
    partial: tuple[str, ...]
    q: ShardedArray
    keys: tuple[ShardedArray, ShardedArray]
    places: tuple[ShardedArray, ...] = ()
    documents: tuple[ShardedArray, ...] = ()
    sinks: tuple[ShardedArray, ...] = ()

    @property
    def arrays(self) -> tuple[ShardedArray, ...]:
        """What attention is given on this device, besides keys on their way."""
        return (*self.sinks, *self.documents, self.q, *self.keys, *self.places)

    def statistics(self, out: ShardedArray) -> tuple[ShardedArray, ShardedArray]:
        """The result, and the logarithm of each query's sum of exponentials, as the device makes them."""
        rows = out.dims[:3]
        axes = tuple(self.q.axes_of(dim) for dim in rows)
        return like(out, self.q), ShardedArray(f"{out.name.removesuffix('o')}lse", rows, axes, dtype="fp32")


def _heads(array: ShardedArray) -> str:
    """The dim of heads: N of queries; K, or N, of keys and values."""
    return array.dims[2]


def positions_of(array: ShardedArray) -> str:
    """The dim of positions: T; S of an encoder's queries, keys and values."""
    return array.dims[1]


def _layout(op: Op, trace: Trace, details: Attention) -> _Layout:
    q, k, v, *others = (trace.declared(n) for n in op.inputs)
    placed = bool(op.inputs[3:]) and trace.shardings.program.variables[op.inputs[3]].role == "position"
    everywhere, others = (others[:1], others[1:]) if placed else ([], others)
    for key in (k, v):
        if key.axes_of(_heads(key)) != q.axes_of(_heads(q)) or key.axes_of("B") != q.axes_of("B"):
            raise InputError(f"attention of {q} with {key}: heads and sequences must be split alike.")
    there = everywhere[0].axes_of(positions_of(q)) if everywhere else ()
    axes = tuple(a for a in q.axes_of(positions_of(q)) if a not in there)
    way = trace.shardings.strategy.context_attention if axes else "gather"
    if way == "ring" and not details.can_ring:
        way = "gather"
    keys = (k, v)
    if way == "gather":
        keys = tuple(a.resharded({positions_of(a): there}) for a in keys)  # type: ignore[assignment]
    if way == "ulysses":
        q, *exchanged = (_heads_for_positions(a, there, axes) for a in (q, *keys))
        keys = tuple(exchanged)  # type: ignore[assignment]
    if way == "ring" and any(key.axes_of("T") != q.axes_of("T") for key in keys):
        raise InputError(f"ring attention of {q} with {keys[0]}: positions must be split alike.")
    return _Layout(
        way=way,
        axes=axes,
        partial=axes if way == "gather" else (),
        q=q,
        keys=keys,
        places=tuple(a for place in everywhere for a in (like(place, q), place)),
        documents=tuple(a for other in others if "B" in other.dims for a in (like(other, q), other)),
        sinks=tuple(like(other, q) for other in others if "B" not in other.dims),
    )


def _heads_for_positions(array: ShardedArray, there: tuple[str, ...], axes: tuple[str, ...]) -> ShardedArray:
    """Every position of the device's share of heads."""
    heads = _heads(array)
    return array.resharded({positions_of(array): there, heads: array.axes_of(heads) + axes})


def _round(
    layout: _Layout, array: ShardedArray, result: ShardedArray, ring: Literal["past", "home"], details: Attention
) -> Step:
    """A permute of an array round the ring, as `num_moves` reads it."""
    moves = Round(ring=ring, window=details.window)
    return Step(op="permute", inputs=(array,), result=result, axes=layout.axes, details=moves)


def _details(layout: _Layout, details: Attention) -> Attention:
    """Those of the op, and the axes of the ring of its keys."""
    return msgspec.structs.replace(details, ring=layout.axes) if layout.way == "ring" else details


def forward(op: Op, trace: Trace, form: type[Attention] = Attention) -> None:
    """Queries, keys and values where the layout has them; the result where the stream is. ``form`` are the details."""
    details = details_of(op, form)
    layout, out = _layout(op, trace, details), trace.declared(op.out)
    for name, target in zip(op.inputs[:3], (layout.q, *layout.keys), strict=True):
        moved(trace, trace.declared(name), target)
    _move_facts(op, trace, layout)
    passing: tuple[ShardedArray, ...] = ()
    if layout.way == "ring":
        passing = tuple(key.replace(name=f"{key.name}_passing") for key in layout.keys)
        trace.add(*(_round(layout, a, b, "past", details) for a, b in zip(layout.keys, passing, strict=True)))
    result, lse = layout.statistics(out)
    trace.add(local(op.kind, (*passing, *layout.arrays), result, lse, details=_details(layout, details)))
    moved(trace, result, out)


def _move_facts(op: Op, trace: Trace, layout: _Layout) -> None:
    """Positions, documents and sinks of the device's own queries."""
    if layout.places:
        here, everywhere = layout.places
        moved(trace, everywhere, here)
    if layout.documents:
        here, everywhere = layout.documents
        moved(trace, everywhere, here)
    for sinks in layout.sinks:
        moved(trace, trace.declared(sinks.name), sinks)


def backward(op: Op, trace: Trace, form: type[Attention] = Attention) -> None:
    """Cotangents of queries, keys and values, left to be summed where each device saw a part of the queries."""
    details = details_of(op, form)
    layout = _layout(op, trace, details)
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
        _ring_backward(details, trace, layout, given, dq, results)
    else:
        inputs = (*given, *layout.arrays)
        trace.add(local(f"{op.kind}_backward", inputs, dq, *results, details=_details(layout, details)))
    names = (*op.inputs[:3], *(sinks.name for sinks in layout.sinks))
    for name, array in zip(names, (dq, *results), strict=True):
        trace.contribute(name, array)


def _sinks_cotangent(trace: Trace, sinks: ShardedArray, dq: ShardedArray) -> ShardedArray:
    cotangent = trace.cotangent(sinks.name)
    return cotangent.resharded({"N": sinks.axes_of("N")}, unreduced=axes_beside(dq, sinks))


def _ring_backward(
    details: Attention,
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
    trace.add(*(_round(layout, a, b, "past", details) for a, b in zip(layout.keys, passing, strict=True)))
    inputs = (*given, *passing, *layout.arrays)
    trace.add(local("attention_backward", inputs, dq, *collected, *others, details=_details(layout, details)))
    trace.add(*(_round(layout, a, b, "home", details) for a, b in zip(collected, dkeys, strict=True)))


# -- counts -----------------------------------------------------------------------------------------------


def keys_per_query(length: Number, *, window: int | None = None, causal: bool = False) -> Number:
    """Keys that a query of a sequence meets on average: T, or the window where that is shorter.

    Causal, the first queries meet fewer: W - W^2 / 2T with W the window or T, which is T / 2 without a window.
    """
    keys = length if window is None else np.minimum(length, window)
    return keys - keys**2 / (2 * length) if causal else keys


def num_ring_blocks(step: Step, sizes: OpSizes) -> Number:
    """Blocks of keys that attention works through one after the other: the devices of its ring, else 1."""
    return product(sizes.mesh[axis] for axis in step.details.ring)


def score_elements(step: Step, sizes: OpSizes) -> Number:
    """B x N x T x S local, S the keys that a query meets; masked ones too where the sizes count them."""
    arrays, window = AttentionArrays.of(step), step.details.window
    rows = sizes.local(arrays.q)
    length = sizes.local(arrays.k)[positions_of(arrays.k)] * num_ring_blocks(step, sizes)
    causal = sizes.causal and not step.details.sees_all
    if window is not None or causal:
        length = keys_per_query(length, window=window, causal=causal)
    return rows["B"] * rows["N"] * rows[positions_of(arrays.q)] * length


def _widths(step: Step, sizes: OpSizes) -> tuple[Number, Number]:
    """Head width of queries and keys, and of values."""
    arrays = AttentionArrays.of(step)
    return sizes.dims[arrays.q.dims[-1]], sizes.dims[arrays.v.dims[-1]]


def flops(step: Step, sizes: OpSizes) -> Number:
    """2 B T S N (H + Hv): scores and the weighted sum; 4 B T S N H where values are as wide as keys."""
    width, value_width = _widths(step, sizes)
    return 2.0 * score_elements(step, sizes) * (width + value_width)


def backward_flops(step: Step, sizes: OpSizes) -> Number:
    """2 B T S N (3 H + 2 Hv): the scores again, then the products for dV, dP, dQ and dK."""
    width, value_width = _widths(step, sizes)
    return 2.0 * score_elements(step, sizes) * (3 * width + 2 * value_width)


def hbm_bytes(step: Step, sizes: OpSizes) -> Number:
    """Inputs and results, once for every block of keys; in memory also the scores (written, read twice) and weights
    (written, read)."""
    moved = _stream_per_block(step, sizes)
    if sizes.scores == "on_chip":
        return moved
    return moved + score_elements(step, sizes) * (3 * sizes.score_bytes + 2 * sizes.width)


def backward_bytes(step: Step, sizes: OpSizes) -> Number:
    """As forward; scores in memory are moved again, dP is written and read twice, dS written and read twice."""
    moved = _stream_per_block(step, sizes)
    if sizes.scores == "on_chip":
        return moved
    return moved + score_elements(step, sizes) * (6 * sizes.score_bytes + 5 * sizes.width)


def _stream_per_block(step: Step, sizes: OpSizes) -> Number:
    own = stream(step, sizes) - sizes.total(*AttentionArrays.of(step).passing)
    return own * num_ring_blocks(step, sizes)


def scratch_bytes(step: Step, sizes: OpSizes) -> Number:
    """T x S arrays where no kernel keeps them on chip: scores in float32 and the weights; backward both cotangents."""
    if sizes.scores == "on_chip":
        return 0.0
    arrays = AttentionArrays.of(step)
    rows = sizes.local(arrays.q)
    wide = 8 if arrays.given else 4
    length = sizes.local(arrays.k)[positions_of(arrays.k)]
    return rows["B"] * rows["N"] * rows[positions_of(arrays.q)] * length * (wide + sizes.width)


OP = OpKind(
    forward=forward,
    backward=backward,
    steps={
        "attention": StepKind(flops=flops, hbm_bytes=hbm_bytes, group="attention", scratch_bytes=scratch_bytes),
        "attention_backward": StepKind(
            flops=backward_flops, hbm_bytes=backward_bytes, group="attention", scratch_bytes=scratch_bytes
        ),
    },
)
