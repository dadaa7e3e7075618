"""Dispatch steps: copies tokens to the slots of their experts, or packs them by expert like their weights."""

from meshwright.nn.experts import slots
from meshwright.nn.ops import of_arrays

STEPS = {
    "dispatch": of_arrays(slots.dispatch),
    "dispatch_backward": of_arrays(lambda dslots, chosen, *tokens: slots.combine(dslots, chosen)),
}
