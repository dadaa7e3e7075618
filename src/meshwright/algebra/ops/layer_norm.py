"""Layer norm of each row: scale and bias."""

from meshwright.algebra.ops.rms_norm import norm

OP = norm("layer_norm")
