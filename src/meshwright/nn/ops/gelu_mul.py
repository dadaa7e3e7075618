"""A gated activation, gelu(gate) x up."""

from meshwright.nn.ops.silu_mul import activation_steps, gated

STEPS = activation_steps("gelu_mul", gated)
