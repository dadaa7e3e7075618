"""An array times a number that is a weight."""

from meshwright.algebra.ops.silu_mul import elementwise

OP = elementwise("scaled_by")
