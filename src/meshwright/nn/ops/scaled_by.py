"""Multiplies an array by a number, in the dtype of the array."""

from meshwright.nn.ops import backward_of, of_arrays

_FORWARD = of_arrays(lambda array, number: array * number.astype(array.dtype))

STEPS = {"scaled_by": _FORWARD, "scaled_by_backward": backward_of(_FORWARD)}
