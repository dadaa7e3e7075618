"""An array times a number, or a vector over its last dim, that is a weight."""

from meshwright.algebra.ops.silu_mul import elementwise

OP = elementwise("scaled_by")
