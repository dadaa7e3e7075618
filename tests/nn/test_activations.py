import math
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from msgspec.structs import replace

from meshwright.nn.activations import ACTIVATIONS, clamped_swiglu, gate
from meshwright.nn.ops import local_steps
from meshwright.spec import catalogue

X = np.linspace(-9, 9, 37).astype(np.float32)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


FORMULAS = {
    "silu": lambda x: x * sigmoid(x),
    "swish": lambda x: x * sigmoid(x),
    "gelu": lambda x: x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2))),
    **dict.fromkeys(
        ("gelu_new", "gelu_fast", "gelu_pytorch_tanh"),
        lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    ),
    "quick_gelu": lambda x: x * sigmoid(1.702 * x),
    "relu": lambda x: np.maximum(x, 0),
    "relu2": lambda x: np.maximum(x, 0) ** 2,
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_are_their_formulas(name):
    np.testing.assert_allclose(ACTIVATIONS[name](jnp.asarray(X)), FORMULAS[name](X.astype(np.float64)), atol=1e-5)


def test_gated_and_plain_layers_take_the_models_activation():
    g, u = jnp.asarray(X), jnp.asarray(X[::-1])
    gemma, gpt2 = catalogue.load_model("gemma2-9b"), catalogue.load_model("gpt2")
    np.testing.assert_array_equal(gate(gemma)(g, u), ACTIVATIONS["gelu_pytorch_tanh"](g) * u)
    np.testing.assert_array_equal(gate(replace(gemma, activation="relu"))(g, u), jnp.maximum(g, 0) * u)
    np.testing.assert_array_equal(
        local_steps()["gelu"](SimpleNamespace(model=gpt2), None, g), ACTIVATIONS["gelu_new"](g)
    )


def test_gpt_oss_clamps_and_adds_one():
    assert gate(catalogue.load_model("gpt-oss-20b")) is clamped_swiglu
    g, u = X.astype(np.float64), X[::-1].astype(np.float64)
    low = np.minimum(g, 7)
    expected = (np.clip(u, -7, 7) + 1) * low * sigmoid(1.702 * low)
    np.testing.assert_allclose(clamped_swiglu(jnp.asarray(X), jnp.asarray(X[::-1])), expected, atol=1e-4)
