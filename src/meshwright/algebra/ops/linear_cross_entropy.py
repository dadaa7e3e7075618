"""The loss head: statistics of the logits, reduced over the vocabulary, and the loss from them. The rule writes the
AllReduce of the largest logits itself, as `reshard` only sums."""

import msgspec

from meshwright.algebra.einsum import align, local_product
from meshwright.algebra.kinds import OpKind, StepKind, row_stream
from meshwright.algebra.notation import ShardedArray
from meshwright.algebra.rewrites.remat import keeps_logits
from meshwright.algebra.sizes import Number, OpSizes
from meshwright.algebra.steps import Step
from meshwright.algebra.tape import Tape
from meshwright.core.errors import InputError


class LossHead(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Details: the cap of the logits (0 for none), and the weight of their squared log-sum-exp in the loss."""

    softcap: float = 0.0
    z_loss: float = 0.0


class _Head:
    """The arrays of one loss head, for both passes.

    Per token, ``peak`` is the largest logit, ``total`` the sum of exp(logit - peak) and ``picked`` the label's logit:
    first over a device's part of V, then over all of V.
    """

    def __init__(self, tape: Tape) -> None:
        self.x, self.table, self.labels, *bias = tape.inputs
        declared_logits = tape.declared("logits")
        self.left, self.right = align(self.x, self.table, declared_logits)
        self.logits = local_product(self.left, self.right, declared_logits).replace(dtype="fp32")
        if self.logits.unreduced:
            names = ", ".join(self.logits.unreduced)
            raise InputError(f"D is split over {names}; the loss head needs it whole. Assign {names} to another dim.")
        self.labels_of_logits, self.labels_of_stream = self.labels.like(self.logits), self.labels.like(self.x)
        self.vocabulary_axes = self.logits.axes_of("V")
        self.declared_bias = tuple(bias)  # of the logits: one array, or none
        self.bias = tuple(array.resharded({"V": self.vocabulary_axes}) for array in bias)
        row_dims = ("B", "T")
        row_axes = tuple(self.logits.axes_of(d) for d in row_dims)
        self.peak, self.total, self.picked = (
            ShardedArray(n, row_dims, row_axes, self.vocabulary_axes, "fp32") for n in ("peak", "total", "picked")
        )
        self.whole_peak = self.peak.replace(unreduced=())
        self.scaled = self.total.replace(name="scaled")
        self.details = tape.details(LossHead)
        self.in_chunks = not keeps_logits(tape.shardings.strategy)

    def per_token(self, array: ShardedArray) -> ShardedArray:
        """Returns a statistic reduced over V, and split over tokens as the residual stream is."""
        return array.replace(unreduced=()).like(self.x)


def forward(tape: Tape) -> None:
    """Adds the steps that make the loss from statistics of the logits, each reduced over the parts of V."""
    head = _Head(tape)
    x, table, local_labels = (
        tape.move(*pair)
        for pair in ((head.x, head.left), (head.table, head.right), (head.labels, head.labels_of_logits))
    )
    bias = tuple(map(tape.move, head.declared_bias, head.bias))
    statistics = (head.peak, head.total, head.picked)
    if head.in_chunks:
        tape.run("chunked_logits_statistics", (x, table, local_labels, *bias), *statistics, details=head.details)
    else:
        tape.run("einsum", (x, table), head.logits)
        tape.run("logits_statistics", (head.logits, local_labels, *bias), *statistics, details=head.details)
    if head.vocabulary_axes:
        max_step = Step(
            op="all_reduce", inputs=(head.peak,), result=head.whole_peak, axes=head.vocabulary_axes, reduction="max"
        )
        tape.add(max_step)
    tape.run("rescale", (head.total, head.peak, head.whole_peak), head.scaled)
    token_arrays = [tape.move(array, head.per_token(array)) for array in (head.whole_peak, head.scaled, head.picked)]
    labels = tape.move(head.labels, head.labels_of_stream)
    tape.run("sum_loss", (*token_arrays, labels), tape.out.replace(unreduced=head.x.spread), details=head.details)


def backward(tape: Tape) -> None:
    """Adds the steps for the cotangents of stream, table and bias, from kept logits or logits recomputed in chunks."""
    head = _Head(tape)
    peak, scaled_sum = head.per_token(head.whole_peak), head.per_token(head.scaled)
    dscaled_sum, dpicked_logit = (head.per_token(a).replace(name=f"d{a.name}") for a in (head.scaled, head.picked))
    inputs = (tape.dout, peak, scaled_sum, head.labels_of_stream)
    tape.run("sum_loss_backward", inputs, dscaled_sum, dpicked_logit, details=head.details)
    row_cotangents = [tape.move(a, head.whole_peak.replace(name=a.name)) for a in (dscaled_sum, dpicked_logit)]
    dx, dtable = tape.dinputs[0].like(head.left), tape.dinputs[1].like(head.right)
    dx, dtable = dx.replace(unreduced=head.vocabulary_axes), dtable.replace(unreduced=head.peak.spread)
    tape.need(head.whole_peak)
    operands = (head.labels_of_logits, head.whole_peak, *row_cotangents, *head.bias)
    dbias = [
        d.like(bias).replace(unreduced=head.peak.spread) for bias, d in zip(head.bias, tape.dinputs[3:], strict=True)
    ]
    trained = zip((tape.op.inputs[1], *tape.op.inputs[3:]), (dtable, *dbias), strict=True)
    cotangents = {name: array for name, array in trained if name in tape.shardings.differentiated}
    if head.in_chunks:
        tape.need(head.labels_of_logits)
        chunk_inputs = (head.left, head.right, *operands)
        tape.run("chunked_logits_backward", chunk_inputs, dx, *cotangents.values(), details=head.details)
        for name, array in cotangents.items():
            tape.contribute(name, array)
        tape.contribute(tape.op.inputs[0], dx)
        return
    # in the state's dtype, so that its products run at full rate
    dlogits = head.logits.replace(name="dlogits", dtype="")
    tape.run("logits_backward", (head.logits, *operands), dlogits, details=head.details)
    for name, array in zip(tape.op.inputs[3:], dbias, strict=True):
        tape.run("bias_add_backward", (dlogits,), array)
        tape.contribute(name, array)
    tape.move(head.x, head.left)
    tape.run("einsum", (head.left, dlogits), dtable)
    tape.contribute(tape.op.inputs[1], dtable)
    tape.move(head.table, head.right)
    tape.run("einsum", (dlogits, head.right), dx)
    tape.contribute(tape.op.inputs[0], dx)


def scratch_bytes(step: Step, sizes: OpSizes) -> Number:
    """Returns the bytes by which capped float32 logits exceed their cotangent in the backward pass; 0 without a cap."""
    return sizes.bytes(step.inputs[0]) - sizes.bytes(step.result) if step.details and step.details.softcap else 0.0


OP = OpKind(
    forward=forward,
    backward=backward,
    steps={
        # the steps in chunks are in `fused_head`
        "logits_statistics": StepKind(hbm_bytes=row_stream),
        "logits_backward": StepKind(in_place=True, scratch_bytes=scratch_bytes),
        "rescale": StepKind(),
        "sum_loss": StepKind(),
        "sum_loss_backward": StepKind(),
    },
)
