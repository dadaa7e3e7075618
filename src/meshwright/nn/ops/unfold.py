"""Unfolds each position with its two neighbours, and the transposed operation."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Float

from meshwright.algebra.ops.unfold import FRAMES
from meshwright.algebra.steps import Step
from meshwright.nn.context import Context

TAPS = 3


def unfold(frames: Float[Array, "B S M"], *, stride: int) -> Float[Array, "B T 3 M"]:
    """Returns every ``stride``-th position with its two neighbours (previous, own, next); zeros beyond the ends."""
    padded = jnp.pad(frames, ((0, 0), (1, 1), (0, 0)))
    end = frames.shape[1]
    return jnp.stack([padded[:, tap : tap + end : stride] for tap in range(TAPS)], axis=2)


def _unfold(context: Context, step: Step, array: Array) -> Array:
    frame_dim = step.inputs[0].dims.index(FRAMES)
    if frame_dim != 1:
        # with frames as the innermost dim XLA finds no tiles for the product on GPUs (jaxlib 0.10.2)
        array = with_layout_constraint(jnp.moveaxis(array, frame_dim, 1), Layout((0, 1, 2)))
    return unfold(array, stride=step.details.stride)


def _unfold_backward(context: Context, step: Step, dout: Array) -> Array:
    batch, length, _, width = dout.shape
    frames = jax.ShapeDtypeStruct((batch, length * step.details.stride, width), dout.dtype)
    (cotangent,) = jax.linear_transpose(partial(unfold, stride=step.details.stride), frames)(dout)
    return cotangent


STEPS = {"unfold": _unfold, "unfold_backward": _unfold_backward}
