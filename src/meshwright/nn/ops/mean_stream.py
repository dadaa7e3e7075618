"""The mean of the first residual stream and of projections of the other streams."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from meshwright.nn.ops import backward_of, of_arrays
from meshwright.nn.ops.into_streams import at_magnitude


def mean_stream(x: Float[Array, "A B T D"], projections: Float[Array, "An B T Do"]) -> Float[Array, "B T D"]:
    """Returns the mean of ``x[0]`` and of the projections, each scaled to the magnitude of ``x[0]``."""
    return jnp.mean(jnp.concatenate([x[:1], at_magnitude(projections, x[0])]), axis=0)


_FORWARD = of_arrays(mean_stream)

STEPS = {"mean_stream": _FORWARD, "mean_stream_backward": backward_of(_FORWARD)}
