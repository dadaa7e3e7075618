"""The mean of the first residual stream and projections of the others, scaled to its magnitude."""

from meshwright.algebra.ops.mix_predict import of_rows

OP = of_rows("mean_stream")
