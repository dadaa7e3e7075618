import jax.numpy as jnp
import numpy as np

from meshwright.train.optimizers.table import average_decay, start_average, update_average


def test_the_decay_grows_to_the_one_that_is_set():
    found = np.asarray(average_decay(0.99, np.array([1, 8, 10**6])))
    np.testing.assert_allclose(found, [2 / 11, 9 / 18, 0.99], rtol=1e-6)


def test_the_mean_is_that_of_the_formula():
    rng = np.random.default_rng(0)
    weights = rng.standard_normal((6, 4)).astype(np.float32)
    expected = weights[0].astype(np.float64)
    mean = start_average({"w": jnp.asarray(weights[0])})
    for count in range(1, 6):
        decay = min(0.5, (1 + count) / (10 + count))
        expected = decay * expected + (1 - decay) * weights[count]
        mean = update_average(mean, {"w": jnp.asarray(weights[count])}, decay=0.5, count=count)
    np.testing.assert_allclose(mean["w"], expected, rtol=1e-5, atol=1e-6)


def test_small_changes_of_two_byte_weights_are_kept_in_four():
    mean = start_average({"w": jnp.ones((3,), jnp.bfloat16)})
    assert mean["w"].dtype == jnp.float32
    for count in range(1, 40):
        mean = update_average(mean, {"w": jnp.full((3,), 1.0078125, jnp.bfloat16)}, decay=0.999, count=count)
    assert (np.asarray(mean["w"]) > 1.0).all()
    assert (np.asarray(mean["w"]) < 1.0078125).all()
