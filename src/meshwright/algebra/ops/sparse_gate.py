"""Gates minus a bound where they exceed it, else zero: of normally distributed gates a fixed share is below the bound.

The bound is ``mean + by * deviation`` of a row over F, whose sums are reduced between devices."""

import msgspec

from meshwright.algebra.kinds import OpKind, StepKind
from meshwright.algebra.notation import ShardedArray
from meshwright.algebra.tape import Tape


class SparseGate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Details of the steps: the bound is ``by`` standard deviations above the mean."""

    by: float


def forward(tape: Tape) -> None:
    """Adds the steps that sum each row, then squared deviations from its mean, reduce both, and apply the bound."""
    (gates,) = tape.inputs
    whole_sums: list[ShardedArray] = []
    for name in ("sum", "squares"):
        tape.run(f"gate_{name}", (gates, *whole_sums), sums := _sums(tape, name))
        whole_sums.append(tape.move(sums, sums.replace(unreduced=())))
    local_out = tape.out.like(gates)
    tape.run("sparse_gate", (gates, *whole_sums), local_out, details=tape.details(SparseGate))
    tape.move(local_out, tape.out)


def backward(tape: Tape) -> None:
    """Adds the steps that sum a row's cotangent where gates exceed the bound, reduce it, and make their cotangent."""
    (gates,) = tape.inputs
    whole_sums = [_sums(tape, name).replace(unreduced=()) for name in ("sum", "squares")]
    above, details = _sums(tape, "above"), tape.details(SparseGate)
    dout = tape.move(tape.dout, tape.dout.like(gates))
    tape.run("sparse_gate_above", (dout, gates, *whole_sums), above, details=details)
    inputs = (gates, *whole_sums, tape.move(above, above.replace(unreduced=())))
    tape.run_backward(inputs, [(tape.op.inputs[0], tape.dinputs[0].like(gates))], dout=dout, details=details)


def _sums(tape: Tape, name: str) -> ShardedArray:
    """Returns sums over a device's part of each row."""
    (gates,) = tape.inputs
    row_axes, axes = gates.axes[:-1], gates.axes[-1]
    return ShardedArray(f"{tape.out.name}_{name}", gates.dims[:-1], row_axes, axes, "fp32")


_STEP = StepKind(group="normalisation")

OP = OpKind(
    forward=forward,
    backward=backward,
    steps=dict.fromkeys(
        ("gate_sum", "gate_squares", "sparse_gate", "sparse_gate_above", "sparse_gate_backward"), _STEP
    ),
)
