"""A step without a finite loss or gradient: which array it was."""

import jax
import jax.numpy as jnp
import msgspec
import pytest

from meshwright.parallel.train_step import TrainStep
from meshwright.train.data.batches import Batches, Source
from meshwright.train.record.health import where_not_finite
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
    assert "in the weights after it, layers.wq of layer 1 holds NaN" in where_not_finite(step, broken, batch)


def test_a_gradient_is_named_where_the_weights_are_finite(step, state, batch):
    huge = with_weight(state, "w_up", lambda w: jnp.full_like(w, 1e38))
    found = where_not_finite(step, huge, batch)
    assert found.startswith("all weights are finite; in its gradients, ")
    assert "holds" in found


@pytest.fixture(scope="module")
def interleaved():
    """Four layers on two stages of two pieces: the first stage holds layers 0 and 2, the second 1 and 3."""
    choices = {"schedule": "interleaved", "chunks": 2, "num_microbatches": 2}
    split = msgspec.structs.replace(strategy(pipeline=2), **choices)
    return TrainStep(msgspec.structs.replace(MODEL, num_layers=4), split)


@pytest.mark.parametrize("layer", [1, 2])
def test_layers_have_the_model_s_numbers_whatever_stage_holds_them(interleaved, layer):
    state = interleaved.init(0)
    weights = interleaved.to_canonical(state.params)
    weights["wq"] = weights["wq"].at[layer, 0, 0, 0].set(jnp.nan)
    broken = state._replace(params=interleaved.from_canonical(weights))
    found = where_not_finite(interleaved, broken, None)
    assert found == f"in the weights after it, layers.wq of layer {layer} holds NaN"


def test_gradients_of_interleaved_stages(interleaved, batch, monkeypatch):
    """What the step gives is in the order of the stages; here the gradients of layer 2 lie second."""
    state = interleaved.init(0)

    def broken(params, batch):
        return jnp.zeros(()), {**params, "wq": params["wq"].at[1].set(jnp.inf)}

    monkeypatch.setattr(interleaved, "gradients", broken)
    found = where_not_finite(interleaved, state, batch)
    assert found == "all weights are finite; in its gradients, layers.wq of layer 2 holds infinity"


def test_nothing_is_named_where_nothing_is_found(step, state, batch):
    assert where_not_finite(step, state, batch) == "weights and gradients are finite"
