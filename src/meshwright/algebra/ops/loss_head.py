"""Rules of the loss head: statistics of the logits, reduced over the vocabulary, forward and backward."""

from meshwright.algebra.einsum import align, local_product, reshard
from meshwright.algebra.notation import ShardedArray
from meshwright.algebra.program import Op
from meshwright.algebra.steps import Step
from meshwright.algebra.trace import Trace, like, local, moved
from meshwright.core.errors import InputError


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
        self.labels, self.here = labels, like(labels, self.logits)
        rows = ("B", "T")
        axes = tuple(self.logits.axes_of(d) for d in rows)
        self.split = self.logits.axes_of("V")
        self.peak, self.total, self.picked = (
            ShardedArray(n, rows, axes, self.split, "fp32") for n in ("peak", "total", "picked")
        )
        self.whole_peak = self.peak.replace(unreduced=())
        self.scaled = self.total.replace(name="scaled")
        self.token_axes = tuple(self.x.axes_of(d) for d in rows)
        self.own_labels = like(labels, self.x)
        self.attributes = op.attributes

    def per_token(self, array: ShardedArray) -> ShardedArray:
        """The statistic reduced, and split over tokens as the residual stream is."""
        return array.replace(axes=self.token_axes, unreduced=())


def head_forward(op: Op, trace: Trace) -> None:
    """The loss from statistics of the logits, each reduced over the parts of V."""
    head = _Head(op, trace)
    x, table = moved(trace, head.x, head.left), moved(trace, head.table, head.right)
    here = moved(trace, head.labels, head.here)
    statistics = (head.peak, head.total, head.picked)
    if trace.keeps_logits:
        trace.add(Step(op="einsum", inputs=(x, table), result=head.logits))
        trace.add(local("logits_statistics", (head.logits, here), *statistics, attributes=head.attributes))
    else:
        trace.add(local("chunked_logits_statistics", (x, table, here), *statistics, attributes=head.attributes))
    if head.split:
        attributes = (("reduce", "max"),)
        trace.add(
            Step(op="all_reduce", inputs=(head.peak,), result=head.whole_peak, axes=head.split, attributes=attributes)
        )
    trace.add(local("rescale", (head.total, head.peak, head.whole_peak), head.scaled))
    final = tuple(moved(trace, a, head.per_token(a)) for a in (head.whole_peak, head.scaled, head.picked))
    labels = moved(trace, head.labels, head.own_labels)
    loss = trace.declared(op.out).replace(unreduced=head.x.spread)
    trace.add(local("sum_loss", (*final, labels), loss, attributes=head.attributes))


def head_backward(op: Op, trace: Trace) -> None:
    """Cotangents of the stream and of the table, from the logits kept or made again."""
    head = _Head(op, trace)
    peak, scaled = head.per_token(head.whole_peak), head.per_token(head.scaled)
    dscaled, dpicked = (head.per_token(a).replace(name=f"d{a.name}") for a in (head.scaled, head.picked))
    trace.need(peak, scaled, head.own_labels)
    given = (trace.cotangent(op.out), peak, scaled, head.own_labels)
    trace.add(local("sum_loss_backward", given, dscaled, dpicked, attributes=head.attributes))
    rows = [moved(trace, a, head.whole_peak.replace(name=a.name)) for a in (dscaled, dpicked)]
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
    # as narrow as the state: the products that take it run at the rate of the stream's own
    dlogits = head.logits.replace(name="dlogits", dtype="")
    trace.need(head.logits, head.here)
    inputs = (head.logits, head.here, head.peak, head.whole_peak, *rows)
    trace.add(local("logits_backward", inputs, dlogits, attributes=head.attributes))
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
    trace.add(local("chunked_logits_backward", arrays, dx, dtable, attributes=head.attributes))
    trace.contribute(op.inputs[1], dtable)
    trace.contribute(op.inputs[0], dx)
