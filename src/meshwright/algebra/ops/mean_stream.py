"""The mean of the first residual stream and projections of all other streams, scaled to the first one's magnitude."""

from meshwright.algebra.ops.mix_predict import of_rows

OP = of_rows("mean_stream")
