"""The activation of a feed-forward without a gate."""

from meshwright.algebra.ops.silu_mul import elementwise

OP = elementwise("gelu")
