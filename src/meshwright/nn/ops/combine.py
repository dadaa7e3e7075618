"""Combine steps: sums of the experts' weighted results per token."""

from meshwright.nn.experts import slots
from meshwright.nn.ops import of_arrays

STEPS = {"combine": of_arrays(slots.combine), "combine_backward": of_arrays(slots.dispatch)}
