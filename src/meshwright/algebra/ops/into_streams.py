"""The first residual stream and projections of it, scaled to its magnitude, as one array."""

from meshwright.algebra.ops.mix_predict import of_rows

OP = of_rows("into_streams")
