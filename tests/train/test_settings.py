import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from meshwright.core.errors import InputError
from meshwright.nn.weights import init_params
from meshwright.train.settings import TrainSettings, in_float32, learning_rate, make_optimizer, settings_from_table
from tests.train.small import MODEL


def test_keys_that_are_left_out_have_their_default():
    assert settings_from_table({"steps": 7}) == TrainSettings(steps=7)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"learning_rat": 1.0}, "train.learning_rat is not a setting. Did you mean 'learning_rate'"),
        ({"steps": "many"}, "train.steps: expected `int`, got `str`"),
        ({"steps": 0}, "train.steps=0 must be at least 1"),
        ({"learning_rate": -1.0}, "train.learning_rate=-1.0 must be a number above 0"),
        ({"beta2": 1.0}, "train.beta2=1.0 must be at least 0 and less than 1"),
    ],
)
def test_bad_settings_give_one_line(table, message):
    with pytest.raises(InputError, match=message) as caught:
        settings_from_table(table)
    assert "\n" not in str(caught.value)


def test_the_rate_rises_in_a_line_and_falls_on_a_cosine():
    given = TrainSettings(steps=30, warmup_steps=10, learning_rate=1.0, min_learning_rate_ratio=0.1)
    rates = np.asarray(learning_rate(given)(jnp.arange(31, dtype=jnp.int32)))
    np.testing.assert_allclose(rates[:10], np.arange(1, 11) / 10, rtol=1e-6)
    half = 0.1 + 0.9 * 0.5
    np.testing.assert_allclose(rates[[10, 20, 30]], [1.0, half, 0.1], rtol=1e-5)


@pytest.mark.parametrize("warmup", [0, 1, 50])
def test_any_warmup_gives_positive_rates(warmup):
    rates = learning_rate(TrainSettings(steps=20, warmup_steps=warmup))(jnp.arange(20, dtype=jnp.int32))
    assert bool((rates > 0).all())
    assert float(rates.max()) <= 3e-3 * (1 + 1e-6)


def test_only_matrices_decay():
    optimizer = make_optimizer(MODEL, TrainSettings(weight_decay=0.5))
    params = init_params(MODEL, 0)
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, _ = optimizer.update(zeros, optimizer.init(params), params)
    changed = {name for name, update in updates.items() if bool(jnp.any(update != 0))}
    assert changed == set(params) - {"attn_norm", "mlp_norm", "final_norm"}


def test_moments_are_float32_and_updates_have_the_dtype_of_the_weights():
    optimizer = in_float32(optax.adamw(1e-3))
    params = {"w": jnp.full((4,), 1.0, jnp.bfloat16)}
    gradients = {"w": jnp.full((4,), 1e-3, jnp.bfloat16)}
    updates, state = optimizer.update(gradients, optimizer.init(params), params)
    assert updates["w"].dtype == jnp.bfloat16
    wide = [leaf for leaf in jax.tree.leaves(state) if leaf.shape == (4,)]
    assert [leaf.dtype for leaf in wide] == [jnp.float32, jnp.float32]
