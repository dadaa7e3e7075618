"""Combine steps: the sum of each token's weighted expert results."""

from meshwright.nn.experts import slots
from meshwright.nn.ops import of_arrays

STEPS = {"combine": of_arrays(slots.combine), "combine_backward": of_arrays(slots.dispatch)}
