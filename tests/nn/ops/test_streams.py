"""Residual streams and bounded gates: against transformers' modules, and what they do at their edges."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from msgspec.structs import replace

from meshwright.algebra.notation import parse_array
from meshwright.algebra.steps import Step
from meshwright.nn.ops import local_steps
from meshwright.nn.ops.into_streams import at_magnitude
from meshwright.nn.ops.mean_stream import mean_stream
from tests.nn.families import CONFIGS, FAMILIES

MODEL = FAMILIES["gemma3n"]
A, D = MODEL.num_streams, MODEL.d_model


def array(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def context(clip, seq_len=0):
    return SimpleNamespace(model=replace(MODEL, stream_clip=clip), seq_len=seq_len, alike=False)


WEIGHTS = (array(D, seed=1), 20 * array(D, A, seed=2))
PREDICT, CORRECT = array(A, A, A, seed=3), array(A, A, seed=4)


def streams(clip, x, made, predict=PREDICT, correct=CORRECT, seq_len=0):
    """Predicted and corrected streams of the ops."""
    steps, given = local_steps(), context(clip, seq_len)
    predicted = steps["mix_predict"](given, None, x, *WEIGHTS, predict)
    return predicted, steps["mix_correct"](given, None, predicted, made, *WEIGHTS, correct)


@pytest.mark.peer
@pytest.mark.parametrize("trains", [True, False])
def test_streams_are_predicted_and_corrected_as_in_transformers(trains):
    torch = pytest.importorskip("torch")
    module = pytest.importorskip("transformers.models.gemma3n.modeling_gemma3n")
    keys = {key: value for key, value in CONFIGS["gemma3n"].items() if key != "model_type"}
    theirs = module.Gemma3nTextAltUp(module.Gemma3nTextConfig(**keys | {"altup_coef_clip": 0.5})).train(trains)
    tensors = {
        "router_norm.weight": WEIGHTS[0],
        "modality_router.weight": WEIGHTS[1].T,
        "prediction_coefs.weight": jnp.moveaxis(PREDICT, 0, -1).reshape(A * A, A),
        "correction_coefs.weight": CORRECT.T,
        "correct_output_scale": jnp.ones(D),
    }
    theirs.load_state_dict({name: torch.tensor(np.asarray(values)) for name, values in tensors.items()})
    x, made = array(A, 2, 5, D, seed=5), array(2, 5, D, seed=6)
    with torch.no_grad():
        predicted = theirs.predict(torch.tensor(np.asarray(x)))
        expected = predicted.numpy(), theirs.correct(predicted, torch.tensor(np.asarray(made))).numpy()
    for found, wanted in zip(streams(0.5, x, made, seq_len=0 if trains else 8), expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())
    assert np.abs(np.asarray(streams(0.0, x, made)[1]) - expected[1]).max() > 1e-3 or not trains


def test_weights_beyond_their_bound_of_predictions_alone_train_on():
    x, made = array(A, 1, 3, D, seed=5), array(1, 3, D, seed=6)

    def total(predict, correct):
        predicted, corrected = streams(0.5, x, made, predict, correct)
        return jnp.sum(predicted**2) + jnp.sum(corrected**2)

    dpredict, dcorrect = jax.grad(total, argnums=(0, 1))(PREDICT, CORRECT)
    assert (np.asarray(dpredict)[np.abs(PREDICT) > 0.5] != 0).all()
    np.testing.assert_array_equal(np.asarray(dcorrect) == 0, np.abs(CORRECT) > 0.5)


def test_further_streams_have_the_magnitude_of_the_first_and_rows_of_zeros_a_gradient():
    x, projections = array(2, 3, D, seed=7).at[0, 0].set(0.0), array(A - 1, 2, 3, D, seed=8)
    found = np.asarray(at_magnitude(projections, x))
    squares = np.mean(np.asarray(x) ** 2, axis=-1)
    np.testing.assert_allclose(np.mean(found**2, axis=-1), np.stack([squares] * (A - 1)), rtol=1e-5)
    slopes = jax.grad(lambda x: jnp.sum(mean_stream(jnp.stack([x] * A), projections) ** 2))(x)
    assert np.isfinite(slopes).all()
    assert (np.asarray(slopes)[1] != 0).all()


GATES, WIDTH = array(2, 3, 48, seed=9) + 0.5, 48


def gate_steps(gates, dout):
    """The result and the cotangent of bounded gates, whose rows are in two parts."""
    steps, parts, douts = local_steps(), jnp.split(gates, 2, axis=-1), jnp.split(dout, 2, axis=-1)
    given = SimpleNamespace(model=SimpleNamespace(dims={"F": WIDTH}))
    step = Step(
        op="", inputs=(parse_array("g[B,T,F]"),), result=parse_array("y[B,T,F]"), details=SimpleNamespace(by=1.2)
    )
    total = sum(steps["gate_sum"](given, step, part) for part in parts)
    sums = total, sum(steps["gate_squares"](given, step, part, total) for part in parts)
    results = [steps["sparse_gate"](given, step, part, *sums) for part in parts]
    pairs = list(zip(douts, parts, strict=True))
    above = sum(steps["sparse_gate_above"](given, step, *pair, *sums) for pair in pairs)
    cotangents = [steps["sparse_gate_backward"](given, step, *pair, *sums, above)[0] for pair in pairs]
    return jnp.concatenate(results, axis=-1), jnp.concatenate(cotangents, axis=-1)


def test_parts_of_rows_of_gates_are_bounded_as_whole_rows_are():
    def whole(gates):
        bound = jnp.mean(gates, axis=-1, keepdims=True) + 1.2 * jnp.std(gates, axis=-1, keepdims=True)
        return jnp.maximum(gates - bound, 0.0)

    dout = array(2, 3, WIDTH, seed=10)
    expected, pull = jax.vjp(whole, GATES)
    found, cotangent = gate_steps(GATES, dout)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    np.testing.assert_allclose(cotangent, pull(dout)[0], atol=1e-5)
    assert 0 < np.mean(np.asarray(found) > 0) < 0.3


def test_gates_that_are_all_alike_have_a_gradient():
    alike = jnp.full((1, 1, WIDTH), 0.25)
    assert np.isfinite(gate_steps(alike, jnp.ones((1, 1, WIDTH)))[1]).all()
