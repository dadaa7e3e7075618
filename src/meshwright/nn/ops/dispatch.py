"""Tokens go into slots of their experts, or are packed by expert, as their weights are."""

from meshwright.nn.experts import slots
from meshwright.nn.ops import of_arrays

STEPS = {
    "dispatch": of_arrays(slots.dispatch),
    "dispatch_backward": of_arrays(lambda dslots, chosen, *tokens: slots.combine(dslots, chosen)),
}
