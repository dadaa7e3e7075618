"""A gated activation, gelu(gate) x up."""

from meshwright.algebra.ops.silu_mul import elementwise, slope_bytes

OP = elementwise("gelu_mul", slope_bytes)
