"""Predicted residual streams plus the error of the prediction of one, times a coefficient of each stream and token."""

from meshwright.algebra.ops.mix_predict import of_rows

OP = of_rows("mix_correct")
