"""A gated activation, gelu(gate) x up."""

from meshwright.nn.ops.silu_mul import backward_of, gated, over_slots

STEPS = {"gelu_mul": over_slots(gated), "gelu_mul_backward": over_slots(backward_of(gated))}
