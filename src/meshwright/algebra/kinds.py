"""The op kinds: for each, its sharding rule forward and backward, as steps added to a trace.

Collectives are never written here: every rule says in which shardings it can work locally and calls
`reshard`, which is where they come from. The matching JAX functions are in `nn.ops`, one per kind; the
FLOPs and bytes of the local steps are in `cost.ops`.
"""

from collections.abc import Callable
from typing import Protocol

from meshwright.algebra.einsum import align, local_product, product_steps, reshard
from meshwright.algebra.notation import ShardedArray
from meshwright.algebra.program import Op
from meshwright.algebra.steps import Step
from meshwright.core.errors import InputError


class Trace(Protocol):
    """What a rule may do: look up declared shardings, add steps, need earlier results, hand on cotangents.

    ``contribute(name, array)`` says that ``array`` is one addend of the cotangent of ``name``.
    """

    slice_axes: tuple[str, ...]
    keeps_logits: bool

    def declared(self, name: str) -> ShardedArray: ...
    def cotangent(self, name: str) -> ShardedArray: ...
    def add(self, *steps: Step) -> None: ...
    def need(self, *arrays: ShardedArray) -> None: ...
    def contribute(self, name: str, array: ShardedArray) -> None: ...


def _local(op: str, inputs: tuple[ShardedArray, ...], result: ShardedArray, *more: ShardedArray) -> Step:
    return Step(op=op, inputs=inputs, result=result, more=more)


def _moved(trace: Trace, array: ShardedArray, target: ShardedArray) -> ShardedArray:
    """``target``, with the steps added that lead from ``array`` to it."""
    trace.add(*reshard(array, target))
    return target


def _like(array: ShardedArray, other: ShardedArray) -> ShardedArray:
    """``array`` with the axes that ``other`` has on the dims they share."""
    return array.resharded({d: other.axes_of(d) for d in array.dims if d in other.dims})


# -- einsum -----------------------------------------------------------------------------------------


def _einsum_forward(op: Op, trace: Trace) -> None:
    lhs, rhs, out = (trace.declared(n) for n in (*op.inputs, op.out))
    steps = product_steps(lhs, rhs, out, slice_axes=trace.slice_axes)
    trace.add(*steps, *reshard(steps[-1].result, out))


def _einsum_backward(op: Op, trace: Trace) -> None:
    """dB = A * dC first, then dA = dC * B, each with its primal's sharding (section 5.4.2)."""
    lhs, rhs = op.inputs
    dout = trace.cotangent(op.out)
    for left, right, name in ((trace.declared(lhs), dout, rhs), (dout, trace.declared(rhs), lhs)):
        steps = product_steps(left, right, trace.cotangent(name), slice_axes=trace.slice_axes)
        trace.add(*steps)
        trace.contribute(name, steps[-1].result)


# -- local ops --------------------------------------------------------------------------------------


def _whole(array: ShardedArray, dim: str, kind: str) -> None:
    if array.axes_of(dim):
        raise InputError(
            f"{kind} needs {dim} whole, and {array} splits it over {', '.join(array.axes_of(dim))}. "
            f"Assign those axes to another dim (T, for the residual stream)."
        )


def _norm_forward(op: Op, trace: Trace) -> None:
    x, scale, out = (trace.declared(n) for n in (*op.inputs, op.out))
    _whole(x, "D", op.kind)
    whole = _moved(trace, scale, scale.resharded({"D": ()}))
    trace.add(_local(op.kind, (x, whole), _like(out, x)), *reshard(_like(out, x), out))


def _norm_backward(op: Op, trace: Trace) -> None:
    x, scale = (trace.declared(n) for n in op.inputs)
    dx, dscale = (trace.cotangent(n) for n in op.inputs)
    dscale_local = dscale.resharded({"D": ()}, unreduced=x.spread)
    whole = scale.resharded({"D": ()})
    trace.need(x, whole)
    trace.add(_local(f"{op.kind}_backward", (trace.cotangent(op.out), x, whole), dx, dscale_local))
    trace.contribute(op.inputs[0], dx)
    trace.contribute(op.inputs[1], dscale_local)


def _rope_forward(op: Op, trace: Trace) -> None:
    x, positions, out = (trace.declared(n) for n in (*op.inputs, op.out))
    trace.add(_local(op.kind, (x, _moved(trace, positions, _like(positions, x))), out))


def _rope_backward(op: Op, trace: Trace) -> None:
    x, positions = (trace.declared(n) for n in op.inputs)
    trace.need(_like(positions, x))
    inputs = (trace.cotangent(op.out), _like(positions, x))
    trace.add(_local("rope_backward", inputs, trace.cotangent(op.inputs[0])))
    trace.contribute(op.inputs[0], trace.cotangent(op.inputs[0]))


def _add_forward(op: Op, trace: Trace) -> None:
    out = trace.declared(op.out)
    moved = tuple(_moved(trace, trace.declared(n), _like(trace.declared(n), out)) for n in op.inputs)
    trace.add(_local(op.kind, moved, out))


def _add_backward(op: Op, trace: Trace) -> None:
    dout = trace.cotangent(op.out)
    for name in op.inputs:
        local = _like(trace.cotangent(name), dout)
        trace.add(_local("copy", (dout,), local))
        trace.contribute(name, local)


def _silu_mul_backward(op: Op, trace: Trace) -> None:
    gate, up = (_like(trace.declared(n), trace.declared(op.out)) for n in op.inputs)
    trace.need(gate, up)
    dgate, dup = (trace.cotangent(n) for n in op.inputs)
    dgate, dup = (_like(a, trace.declared(op.out)) for a in (dgate, dup))
    trace.add(_local("silu_mul_backward", (trace.cotangent(op.out), gate, up), dgate, dup))
    trace.contribute(op.inputs[0], dgate)
    trace.contribute(op.inputs[1], dup)


# -- attention --------------------------------------------------------------------------------------


def _gathered_keys(q: ShardedArray, key: ShardedArray, positions: ShardedArray) -> ShardedArray:
    """Keys or values with every position in place: T is S, and S is not split."""
    if key.axes_of("K") != q.axes_of("N") or key.axes_of("B") != q.axes_of("B"):
        raise InputError(f"attention of {q} with {key}: heads and sequences must be split alike.")
    return key.resharded({"T": positions.axes_of("T")})


def _attention_forward(op: Op, trace: Trace) -> None:
    q, k, v, positions = (trace.declared(n) for n in op.inputs)
    keys = tuple(_moved(trace, a, _gathered_keys(q, a, positions)) for a in (k, v))
    here = _moved(trace, positions, _like(positions, q))
    trace.add(_local(op.kind, (q, *keys, here, positions), trace.declared(op.out)))


def _attention_backward(op: Op, trace: Trace) -> None:
    q, k, v, positions = (trace.declared(n) for n in op.inputs)
    keys = tuple(_gathered_keys(q, a, positions) for a in (k, v))
    here = _like(positions, q)
    trace.need(q, *keys, here, positions)
    split = tuple(a for a in q.axes_of("T") if a not in positions.axes_of("T"))
    dq = trace.cotangent(op.inputs[0])
    dk, dv = (_gathered_keys(q, trace.cotangent(n), positions).replace(unreduced=split) for n in op.inputs[1:3])
    inputs = (trace.cotangent(op.out), q, *keys, here, positions)
    trace.add(_local("attention_backward", inputs, dq, dk, dv))
    for name, array in zip(op.inputs[:3], (dq, dk, dv), strict=True):
        trace.contribute(name, array)


# -- embedding: the product of a one-hot row and the table ---------------------------------------------


def _one_hot(tokens: ShardedArray, table: ShardedArray) -> ShardedArray:
    """Token numbers seen as rows of [B, T, V]; each device makes just the part of V that it needs."""
    return ShardedArray(tokens.name, (*tokens.dims, "V"), (*tokens.axes, table.axes_of("V")))


def _embed_forward(op: Op, trace: Trace) -> None:
    tokens, table, out = (trace.declared(n) for n in (*op.inputs, op.out))
    left, right = align(_one_hot(tokens, table), table, out)
    inputs = (_moved(trace, tokens, _like(tokens, left)), _moved(trace, table, right))
    result = local_product(left, right, out)
    trace.add(_local(op.kind, inputs, result), *reshard(result, out))


def _embed_backward(op: Op, trace: Trace) -> None:
    tokens, table = (trace.declared(n) for n in op.inputs)
    dout, dtable = trace.cotangent(op.out), trace.cotangent(op.inputs[1])
    left, right = align(_one_hot(tokens, table), dout, dtable)
    here = _like(tokens, left)
    trace.need(tokens)
    result = local_product(left, right, dtable)
    trace.add(*reshard(tokens, here), *reshard(dout, right), _local("embed_backward", (here, right), result))
    trace.contribute(op.inputs[1], result)


# -- loss head: statistics of the logits, reduced over the vocabulary ----------------------------------


class _Head:
    """The arrays of one loss head, worked out once for both passes.

    Per token: ``peak`` the largest logit, ``total`` the sum of exp(logit - peak), ``picked`` the label's
    logit; each over the part of V that a device holds, then over all of V.
    """

    def __init__(self, op: Op, trace: Trace) -> None:
        self.x, self.table, labels = (trace.declared(n) for n in op.inputs)
        declared = trace.declared("logits")
        self.left, self.right = align(self.x, self.table, declared)
        self.logits = local_product(self.left, self.right, declared).replace(dtype="fp32")
        if self.logits.unreduced:
            over = ", ".join(self.logits.unreduced)
            raise InputError(f"the loss head would have to sum logits over {over}; keep D whole.")
        self.labels, self.here = labels, _like(labels, self.logits)
        rows = ("B", "T")
        axes = tuple(self.logits.axes_of(d) for d in rows)
        self.split = self.logits.axes_of("V")
        self.peak, self.total, self.picked = (
            ShardedArray(n, rows, axes, self.split, "fp32") for n in ("peak", "total", "picked")
        )
        self.whole_peak = self.peak.replace(unreduced=())
        self.scaled = self.total.replace(name="scaled")
        self.token_axes = tuple(self.x.axes_of(d) for d in rows)

    def per_token(self, array: ShardedArray) -> ShardedArray:
        """The statistic reduced, and split over tokens as the residual stream is."""
        return array.replace(axes=self.token_axes, unreduced=())


def _head_forward(op: Op, trace: Trace) -> None:
    head = _Head(op, trace)
    x, table = _moved(trace, head.x, head.left), _moved(trace, head.table, head.right)
    here = _moved(trace, head.labels, head.here)
    statistics = (head.peak, head.total, head.picked)
    if trace.keeps_logits:
        trace.add(Step(op="einsum", inputs=(x, table), result=head.logits))
        trace.add(_local("logits_statistics", (head.logits, here), *statistics))
    else:
        trace.add(_local("chunked_logits_statistics", (x, table, here), *statistics))
    if head.split:
        attributes = (("reduce", "max"),)
        trace.add(
            Step(op="all_reduce", inputs=(head.peak,), result=head.whole_peak, axes=head.split, attributes=attributes)
        )
    trace.add(_local("rescale", (head.total, head.peak, head.whole_peak), head.scaled))
    final = tuple(_moved(trace, a, head.per_token(a)) for a in (head.whole_peak, head.scaled, head.picked))
    trace.add(_local("sum_loss", final, trace.declared(op.out).replace(unreduced=head.x.spread)))


def _head_backward(op: Op, trace: Trace) -> None:
    head = _Head(op, trace)
    scaled = head.per_token(head.scaled)
    dscaled, dpicked = (head.per_token(a).replace(name=f"d{a.name}") for a in (head.scaled, head.picked))
    trace.need(scaled)
    trace.add(_local("sum_loss_backward", (scaled,), dscaled, dpicked))
    rows = [_moved(trace, a, head.whole_peak.replace(name=a.name)) for a in (dscaled, dpicked)]
    trace.need(head.peak, head.whole_peak)
    if trace.keeps_logits:
        _kept_logits_backward(op, trace, head, rows)
    else:
        _chunked_logits_backward(op, trace, head, rows)


def _head_cotangents(op: Op, trace: Trace, head: _Head) -> tuple[ShardedArray, ShardedArray]:
    """Local cotangents of the stream and of the table, before they are reduced."""
    dx, dtable = (trace.cotangent(n) for n in op.inputs[:2])
    token_axes = tuple(a for d in ("B", "T") for a in head.logits.axes_of(d))
    local_dx = dx.resharded({d: head.left.axes_of(d) for d in dx.dims}, unreduced=head.split)
    return local_dx, dtable.resharded({d: head.right.axes_of(d) for d in dtable.dims}, unreduced=token_axes)


def _kept_logits_backward(op: Op, trace: Trace, head: _Head, rows: list[ShardedArray]) -> None:
    dlogits = head.logits.replace(name="dlogits")
    trace.need(head.logits, head.here)
    trace.add(_local("logits_backward", (head.logits, head.here, head.peak, head.whole_peak, *rows), dlogits))
    dx, dtable = _head_cotangents(op, trace, head)
    for left, right, source, name, result in (
        (head.left, dlogits, head.x, op.inputs[1], dtable),
        (dlogits, head.right, head.table, op.inputs[0], dx),
    ):
        trace.add(*reshard(source, left if right is dlogits else right))
        trace.add(Step(op="einsum", inputs=(left, right), result=result))
        trace.contribute(name, result)


def _chunked_logits_backward(op: Op, trace: Trace, head: _Head, rows: list[ShardedArray]) -> None:
    trace.add(*reshard(head.x, head.left), *reshard(head.table, head.right))
    trace.need(head.here)
    dx, dtable = _head_cotangents(op, trace, head)
    arrays = (head.left, head.right, head.here, head.peak, head.whole_peak, *rows)
    trace.add(_local("chunked_logits_backward", arrays, dx, dtable))
    trace.contribute(op.inputs[1], dtable)
    trace.contribute(op.inputs[0], dx)


Rule = Callable[[Op, Trace], None]

KINDS: dict[str, tuple[Rule, Rule]] = {
    "einsum": (_einsum_forward, _einsum_backward),
    "rms_norm": (_norm_forward, _norm_backward),
    "rope": (_rope_forward, _rope_backward),
    "attention": (_attention_forward, _attention_backward),
    "add": (_add_forward, _add_backward),
    "silu_mul": (_add_forward, _silu_mul_backward),
    "embed": (_embed_forward, _embed_backward),
    "linear_cross_entropy": (_head_forward, _head_backward),
}
"""Op kind -> (forward rule, backward rule)."""
