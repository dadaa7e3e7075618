"""An array times a weight that is a number, or a vector over the array's last dim."""

from meshwright.algebra.ops.silu_mul import elementwise

OP = elementwise("scaled_by")
