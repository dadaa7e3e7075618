"""The activation of a feed-forward without a gate."""

from meshwright.nn.activations import ACTIVATIONS
from meshwright.nn.ops.silu_mul import activation_steps

STEPS = activation_steps("gelu", lambda context, step, up: ACTIVATIONS[context.model.activation](up))
