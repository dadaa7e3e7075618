"""A step without a finite loss or gradient: which array it was."""

import jax
import jax.numpy as jnp
import pytest

from meshwright.parallel.train_step import TrainStep
from meshwright.train.data import Batches, Source
from meshwright.train.divergence import where_not_finite
from tests.train.small import MODEL, strategy
from tests.train.test_evaluate import source


@pytest.fixture(scope="module")
def step():
    return TrainStep(MODEL, strategy(fsdp=2))


@pytest.fixture(scope="module")
def state(step):
    return step.init(0)


@pytest.fixture(scope="module")
def batch(step):
    text: Source = source(4)
    return Batches(text, batch_seqs=4, seq_len=32, seed=0).global_batch(0, step.batch_shardings)


def with_weight(state, name, change):
    changed = jax.device_put(change(state.params[name]), state.params[name].sharding)
    return state._replace(params={**state.params, name: changed})


def test_a_weight_is_named_with_its_layer(step, state, batch):
    broken = with_weight(state, "wq", lambda w: w.at[1, 0, 0, 0].set(jnp.nan))
    assert "in the weights after it, layers.wq of layer 1 holds NaN" in where_not_finite(
        step, broken, batch, model=MODEL
    )


def test_a_gradient_is_named_where_the_weights_are_finite(step, state, batch):
    huge = with_weight(state, "w_up", lambda w: jnp.full_like(w, 1e38))
    found = where_not_finite(step, huge, batch, model=MODEL)
    assert found.startswith("all weights are finite; in its gradients, ")
    assert "holds" in found


def test_nothing_is_named_where_nothing_is_found(step, state, batch):
    assert where_not_finite(step, state, batch, model=MODEL) == "weights and gradients are finite"
