"""Random arrays, and the tolerance of tests on them."""

import numpy as np


def draw(*shape, seed=0):
    """Normal numbers in float32, others for every shape and seed."""
    return np.random.default_rng(seed + sum(shape)).normal(size=shape).astype(np.float32)


def close(found, expected, relative=1e-5, what=""):
    """Within 1e-5 of the largest entry."""
    expected = np.asarray(expected)
    np.testing.assert_allclose(found, expected, rtol=0, atol=relative * np.abs(expected).max(), err_msg=what)
