"""The output of the shared experts times a gate of each token."""

from meshwright.algebra.ops.silu_mul import elementwise

OP = elementwise("token_gate")
