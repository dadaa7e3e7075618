"""Combine: results of experts brought back to their tokens' devices and summed per token."""

from meshwright.algebra.kinds import OpKind, StepKind, stream
from meshwright.algebra.ops.dispatch import own_slots
from meshwright.algebra.ops.route import chosen_of
from meshwright.algebra.program import Op
from meshwright.algebra.sizes import Number, OpSizes
from meshwright.algebra.steps import Step
from meshwright.algebra.trace import Trace, like, local, moved


def forward(op: Op, trace: Trace) -> None:
    """Results brought back to their tokens' devices, then summed per token with the weights."""
    slots, gates, out = (trace.declared(n) for n in (*op.inputs, op.out))
    own = moved(trace, slots, own_slots(slots, gates))
    trace.add(local(op.kind, (own, gates, chosen_of(gates)), like(out, gates)))
    moved(trace, like(out, gates), out)


def backward(op: Op, trace: Trace) -> None:
    """Cotangents of slots, which go to their experts' devices, and of the weights."""
    slots, gates = (trace.declared(n) for n in op.inputs)
    own, chosen = own_slots(slots, gates), chosen_of(gates)
    dout = trace.cotangent(op.out)
    dout = moved(trace, dout, like(dout, gates))
    trace.need(own, gates, chosen)
    dslots, dgates = own_slots(trace.cotangent(op.inputs[0]), gates), trace.cotangent(op.inputs[1])
    trace.add(local("combine_backward", (dout, own, gates, chosen), dslots, dgates))
    trace.contribute(op.inputs[0], dslots)
    trace.contribute(op.inputs[1], dgates)


def backward_bytes(step: Step, sizes: OpSizes) -> Number:
    """For every slot a row of the cotangent and one of the result are read, and one is written."""
    return sizes.bytes(step.result) + stream(step, sizes) - sizes.bytes(step.inputs[0])


OP = OpKind(
    forward=forward,
    backward=backward,
    steps={
        "combine": StepKind(group="embedding"),
        "combine_backward": StepKind(hbm_bytes=backward_bytes, group="embedding"),
    },
)
