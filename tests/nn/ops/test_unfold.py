"""Unfolded positions times a matrix are a convolution, and the backward step is its transpose."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.algebra.notation import ShardedArray
from meshwright.algebra.ops.unfold import Unfold
from meshwright.algebra.steps import Step
from meshwright.nn.ops.unfold import STEPS, unfold

FRAMES = np.random.default_rng(0).normal(size=(2, 10, 6)).astype(np.float32)
KERNEL = np.random.default_rng(1).normal(size=(3, 6, 5)).astype(np.float32)
WHOLE = ((), (), ())


@pytest.mark.parametrize("stride", [1, 2])
def test_a_product_of_unfolded_positions_is_a_convolution(stride):
    found = jnp.einsum("bstm,tmd->bsd", unfold(jnp.asarray(FRAMES), stride=stride), KERNEL)
    dims = ("NWC", "WIO", "NWC")
    expected = jax.lax.conv_general_dilated(FRAMES, KERNEL, (stride,), [(1, 1)], dimension_numbers=dims)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("stride", [1, 2])
def test_the_backward_step_is_the_transpose(stride):
    out = unfold(jnp.asarray(FRAMES), stride=stride)
    dout = np.random.default_rng(2).normal(size=out.shape).astype(np.float32)
    dims = ("B", "S", "Ct", "Dc")
    step = Step(
        op="unfold_backward",
        inputs=(ShardedArray("dout", dims, ((),) * 4),),
        result=ShardedArray("dx", ("B", "Sf", "Dc"), WHOLE),
        details=Unfold(stride=stride),
    )
    (expected,) = jax.vjp(lambda frames: unfold(frames, stride=stride), jnp.asarray(FRAMES))[1](jnp.asarray(dout))
    np.testing.assert_allclose(STEPS["unfold_backward"](None, step, jnp.asarray(dout)), expected, rtol=1e-6)


def test_features_have_their_positions_last():
    step = Step(
        op="unfold",
        inputs=(ShardedArray("features", ("B", "M", "Sf"), WHOLE),),
        result=ShardedArray("f", ("B", "Sf", "Ct", "M"), ((),) * 4),
        details=Unfold(),
    )
    found = STEPS["unfold"](None, step, jnp.asarray(FRAMES.transpose(0, 2, 1)))
    np.testing.assert_array_equal(found, unfold(jnp.asarray(FRAMES), stride=1))
