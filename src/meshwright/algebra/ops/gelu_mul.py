"""A gated activation, gelu(gate) x up."""

from meshwright.algebra.ops.silu_mul import elementwise

OP = elementwise("gelu_mul")
