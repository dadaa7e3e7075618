"""A product with an int8 weight, times the scale of each output channel."""

from meshwright.algebra.einsum import product_steps
from meshwright.algebra.kinds import OpKind, StepKind
from meshwright.algebra.ops.einsum import flops
from meshwright.algebra.tape import Tape


def forward(tape: Tape) -> None:
    """Multiplies ``lhs * values`` by the rules of any product, and by the scale of each output channel."""
    lhs, values, scale = tape.inputs
    *before, product = product_steps(lhs, values, tape.out, slice_axes=tape.slice_axes)
    tape.add(*before)
    here = tape.move(scale, scale.like(product.result))
    tape.run("quantised_einsum", (*product.inputs, here), product.result)
    tape.move(product.result, tape.out)


OP = OpKind(forward=forward, steps={"quantised_einsum": StepKind(flops=flops, group="contraction", is_einsum=True)})
