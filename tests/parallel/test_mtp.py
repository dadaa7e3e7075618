"""Multi-token prediction: one device beside the paper's equation, meshes beside one device, collectives as derived."""

from functools import lru_cache

import jax
import numpy as np
import pytest
from msgspec.structs import replace

from meshwright.algebra.layers import ProgramOptions
from meshwright.core.errors import CannotRunError, InputError
from meshwright.nn.weights import init_params
from meshwright.parallel.second_labels import second_labels
from meshwright.parallel.train_step import TrainStep
from tests.parallel.cases import RELATIVE, keep_gradients, run, strategy_of
from tests.parallel.plain_mtp import MODEL, batch, plain_loss, plain_losses

DOCUMENTS = ProgramOptions(documents=True)
CORRECTIONS = ("router_correction_moe", "router_correction_mtp")


@lru_cache
def params_of():
    """Weights of which none is zero."""
    draw = np.random.default_rng(2).normal
    return {n: np.asarray(a + 0.1 * draw(size=a.shape), np.float32) for n, a in init_params(MODEL, 0).items()}


@lru_cache
def plain():
    """Both losses, and the gradients of their weighted sum, of plain JAX in float64."""
    with jax.enable_x64(True), jax.numpy_rank_promotion("allow"):
        wide = {name: np.asarray(array, np.float64) for name, array in params_of().items()}
        losses = jax.jit(lambda p: plain_losses(p, batch()))(wide)
        gradients = jax.jit(jax.grad(lambda p: plain_loss(p, batch())))(wide)
        return tuple(map(float, losses)), {name: np.asarray(value) for name, value in gradients.items()}


def differences(axes, **choices):
    """Largest difference of losses and gradients from those of plain JAX, over the largest entry of each."""
    step = TrainStep(MODEL, strategy_of(axes, **choices), optimizer=keep_gradients(), options=DOCUMENTS)
    params = jax.device_put(step.from_canonical(params_of()), step.state_shardings.params)
    (main, second), expected = plain()
    state, metrics = step.step(step.init(0)._replace(params=params), batch())
    assert abs(float(metrics.loss) / main - 1) < RELATIVE
    assert abs(float(metrics.extras["mtp_loss"]) / second - 1) < RELATIVE
    gradients = {name: np.asarray(value) for name, value in step.to_canonical(state.opt_state).items()}
    assert gradients.keys() == expected.keys() - set(CORRECTIONS)
    for name, value in gradients.items():
        scale = np.abs(expected[name]).max()
        assert scale > 0, f"{name} has no gradient"
        np.testing.assert_allclose(value, expected[name], rtol=0, atol=RELATIVE * scale, err_msg=name)


def test_losses_and_gradients_are_those_of_the_papers_equation():
    differences({})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axes", "choices"),
    [
        ({"fsdp": 2, "tensor": 2}, {}),
        ({"data": 2}, {"num_microbatches": 2, "remat": "none"}),
        ({"context": 2, "tensor": 2}, {"remat": "selective"}),
        ({"context": 2}, {"context_attention": "ring"}),
        ({"expert": 2}, {"remat": "every-2"}),
        ({"expert": 2, "tensor": 2}, {"zero": 1, "sequence_parallel": False}),
        ({"fsdp": 2}, {"prefetch": True, "num_microbatches": 2}),
    ],
    ids=["fsdp-tensor", "data", "context", "ring", "expert", "whole-stream", "ahead"],
)
def test_meshes_give_what_the_equation_does(axes, choices):
    differences(axes, **choices)
