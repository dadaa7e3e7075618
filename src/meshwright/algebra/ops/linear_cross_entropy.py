"""The loss head: statistics of the logits, reduced over the vocabulary, and the loss from them."""

import msgspec

from meshwright.algebra.einsum import align, local_product, reshard
from meshwright.algebra.kinds import OpKind, StepKind, row_stream
from meshwright.algebra.notation import ShardedArray
from meshwright.algebra.program import Op
from meshwright.algebra.steps import Step
from meshwright.algebra.trace import Trace, details_of, like, local, moved
from meshwright.core.errors import InputError


class LossHead(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Details: the cap of the logits (0 for none), and the weight of their squared log-sum in the loss."""

    softcap: float = 0.0
    z_loss: float = 0.0


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
        self.details = details_of(op, LossHead)

    def per_token(self, array: ShardedArray) -> ShardedArray:
        """The statistic reduced, and split over tokens as the residual stream is."""
        return array.replace(axes=self.token_axes, unreduced=())


def forward(op: Op, trace: Trace) -> None:
    """The loss from statistics of the logits, each reduced over the parts of V."""
    head = _Head(op, trace)
    x, table = moved(trace, head.x, head.left), moved(trace, head.table, head.right)
    here = moved(trace, head.labels, head.here)
    statistics = (head.peak, head.total, head.picked)
    trace.add(Step(op="einsum", inputs=(x, table), result=head.logits))
    trace.add(local("logits_statistics", (head.logits, here), *statistics, details=head.details))
    if head.split:
        largest = Step(op="all_reduce", inputs=(head.peak,), result=head.whole_peak, axes=head.split, reduction="max")
        trace.add(largest)
    trace.add(local("rescale", (head.total, head.peak, head.whole_peak), head.scaled))
    final = tuple(moved(trace, a, head.per_token(a)) for a in (head.whole_peak, head.scaled, head.picked))
    labels = moved(trace, head.labels, head.own_labels)
    loss = trace.declared(op.out).replace(unreduced=head.x.spread)
    trace.add(local("sum_loss", (*final, labels), loss, details=head.details))


def backward(op: Op, trace: Trace) -> None:
    """Cotangents of the stream and of the table, from the logits kept or made again."""
    head = _Head(op, trace)
    peak, scaled = head.per_token(head.whole_peak), head.per_token(head.scaled)
    dscaled, dpicked = (head.per_token(a).replace(name=f"d{a.name}") for a in (head.scaled, head.picked))
    trace.need(peak, scaled, head.own_labels)
    given = (trace.cotangent(op.out), peak, scaled, head.own_labels)
    trace.add(local("sum_loss_backward", given, dscaled, dpicked, details=head.details))
    rows = [moved(trace, a, head.whole_peak.replace(name=a.name)) for a in (dscaled, dpicked)]
    trace.need(head.peak, head.whole_peak)
    # as narrow as the state: the products that take it run at the rate of the stream's own
    dlogits = head.logits.replace(name="dlogits", dtype="")
    trace.need(head.logits, head.here)
    inputs = (head.logits, head.here, head.peak, head.whole_peak, *rows)
    trace.add(local("logits_backward", inputs, dlogits, details=head.details))
    dx, dtable = (trace.cotangent(n) for n in op.inputs[:2])
    dtable = like(dtable, head.right).replace(unreduced=head.peak.spread)
    trace.add(*reshard(head.x, head.left), Step(op="einsum", inputs=(head.left, dlogits), result=dtable))
    trace.contribute(op.inputs[1], dtable)
    dx = like(dx, head.left).replace(unreduced=head.split)
    trace.add(*reshard(head.table, head.right), Step(op="einsum", inputs=(dlogits, head.right), result=dx))
    trace.contribute(op.inputs[0], dx)


OP = OpKind(
    forward=forward,
    backward=backward,
    steps={
        "logits_statistics": StepKind(hbm_bytes=row_stream),
        "logits_backward": StepKind(in_place=True),
        "rescale": StepKind(),
        "sum_loss": StepKind(),
        "sum_loss_backward": StepKind(),
    },
)
