"""Multiplies an array by a scalar array, or its rows by a vector, in the dtype of the array."""

from meshwright.nn.ops import backward_of, of_arrays
from meshwright.nn.ops.rms_norm import over_rows

_FORWARD = of_arrays(lambda array, number: array * over_rows(number.astype(array.dtype), array))

STEPS = {"scaled_by": _FORWARD, "scaled_by_backward": backward_of(_FORWARD)}
