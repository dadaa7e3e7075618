"""The loss head: statistics of the logits, reduced over the vocabulary, and the loss from them."""

import msgspec

from meshwright.algebra.einsum import align, local_product, reshard
from meshwright.algebra.kinds import OpKind, StepKind, row_stream, stream
from meshwright.algebra.notation import ShardedArray, product
from meshwright.algebra.program import Op
from meshwright.algebra.sizes import Number, OpSizes
from meshwright.algebra.steps import Step
from meshwright.algebra.trace import Trace, details_of, like, local, moved
from meshwright.core.dims import DTYPE_BYTES
from meshwright.core.errors import InputError

CHUNK_TOKENS = 1024
"""Tokens per device whose logits exist at once where the loss head works in chunks (remat "full")."""


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
    if trace.keeps_logits:
        trace.add(Step(op="einsum", inputs=(x, table), result=head.logits))
        trace.add(local("logits_statistics", (head.logits, here), *statistics, details=head.details))
    else:
        trace.add(local("chunked_logits_statistics", (x, table, here), *statistics, details=head.details))
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
    trace.add(local("logits_backward", inputs, dlogits, details=head.details))
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
    trace.add(local("chunked_logits_backward", arrays, dx, dtable, details=head.details))
    trace.contribute(op.inputs[1], dtable)
    trace.contribute(op.inputs[0], dx)


# -- counts -----------------------------------------------------------------------------------------------


def chunked_flops(step: Step, sizes: OpSizes) -> Number:
    """The product of the stream and the table."""
    return 2.0 * product(sizes.local(*step.inputs[:2]).values())


def chunked_backward_flops(step: Step, sizes: OpSizes) -> Number:
    """The logits again, then the products for the stream and for the table."""
    return 3 * chunked_flops(step, sizes)


def local_logits(step: Step, sizes: OpSizes) -> Number:
    """Local logits of a chunked step, which exist one chunk at a time."""
    local = sizes.local(*step.inputs[:2])
    return local["B"] * local["T"] * local["V"]


def num_chunks(step: Step, sizes: OpSizes) -> Number:
    """Chunks of a chunked loss head on one device; not rounded up, so that sizes may be arrays."""
    local = sizes.local(*step.inputs[:2])
    chunks = local["B"] * local["T"] / CHUNK_TOKENS
    return (chunks + 1 + abs(chunks - 1)) / 2  # the larger of chunks and 1


def chunked_bytes(step: Step, sizes: OpSizes) -> Number:
    """As the kept logits' product and statistics, the table once for every chunk."""
    again = (num_chunks(step, sizes) - 1) * sizes.bytes(step.inputs[1])
    return stream(step, sizes) + again + 3 * DTYPE_BYTES["fp32"] * local_logits(step, sizes)


def chunked_backward_bytes(step: Step, sizes: OpSizes) -> Number:
    """Logits and their cotangent written and read; the table and its gradient once for every chunk."""
    again = (num_chunks(step, sizes) - 1) * sizes.total(step.inputs[1], step.more[0])
    return stream(step, sizes) + again + 6 * DTYPE_BYTES["fp32"] * local_logits(step, sizes)


def chunk_bytes(step: Step, sizes: OpSizes) -> Number:
    """Logits of one chunk and their cotangent, in float32."""
    return 2 * DTYPE_BYTES["fp32"] * local_logits(step, sizes) / num_chunks(step, sizes)


OP = OpKind(
    forward=forward,
    backward=backward,
    steps={
        "logits_statistics": StepKind(hbm_bytes=row_stream),
        "logits_backward": StepKind(in_place=True),
        "chunked_logits_statistics": StepKind(
            flops=chunked_flops, hbm_bytes=chunked_bytes, group="contraction", chunk_bytes=chunk_bytes
        ),
        "chunked_logits_backward": StepKind(
            flops=chunked_backward_flops, hbm_bytes=chunked_backward_bytes, group="contraction"
        ),
        "rescale": StepKind(),
        "sum_loss": StepKind(),
        "sum_loss_backward": StepKind(),
    },
)
