"""Corrects predicted residual streams: adds one stream's prediction error times a coefficient per stream and token."""

from meshwright.algebra.ops.mix_predict import of_rows

OP = of_rows("mix_correct")
