"""The model's activation, GELU or another, in a feed-forward layer without a gate.

The op has the name of one of them, since all read their input once and cost the same.
"""

from meshwright.nn.activations import ACTIVATIONS
from meshwright.nn.ops.silu_mul import activation_steps

STEPS = activation_steps("gelu", lambda context, step, up: ACTIVATIONS[context.model.activation](up))
