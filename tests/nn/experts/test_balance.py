"""What a router's losses are, their gradients against JAX's own of the formulas, and the metrics."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.nn.experts.balance import balance_backward, correction_move, routing_counts, routing_metrics
from meshwright.nn.ops.route import route
from meshwright.spec import catalogue
from tests.nn.arrays import close

from . import plain_experts

BATCH, LENGTH, EXPERTS, CHOSEN = 2, 10, 6, 2
TOKENS = BATCH * LENGTH
MODEL = catalogue.load_model("mixtral-8x7b")


def draw_scores():
    skew = np.linspace(0, 2, EXPERTS)  # some experts are asked for more than others
    return (np.random.default_rng(3).normal(size=(BATCH, LENGTH, EXPERTS)) + skew).astype(np.float32)


def counts(scores, capacity):
    return routing_counts(scores, route(scores, MODEL, capacity=capacity)[1], capacity=capacity)


COUNTS = jax.jit(counts, static_argnums=1)


def test_metrics_are_the_formulas_of_the_papers():
    scores, capacity = draw_scores(), 5
    found = jax.tree.map(float, routing_metrics(COUNTS(scores, capacity), experts_per_token=CHOSEN))
    rows = scores.reshape(TOKENS, EXPERTS).astype(np.float64)
    load = np.bincount(np.argsort(-rows, -1)[:, :CHOSEN].ravel(), minlength=EXPERTS)
    assert found["balance_loss"] == pytest.approx(plain_experts.balance_loss(rows, CHOSEN), rel=1e-5)
    assert found["router_z_loss"] == pytest.approx(plain_experts.router_z_loss(rows), rel=1e-5)
    assert found["load_max_over_mean"] == pytest.approx(load.max() / load.mean(), rel=1e-6)
    assert found["dropped_share"] == pytest.approx(np.maximum(load - capacity, 0).sum() / load.sum(), rel=1e-5)
    assert found["dropped_share"] > 0


def test_an_even_router_has_the_smallest_balance_loss():
    numbers = np.arange(EXPERTS)
    even = np.where((numbers + np.arange(EXPERTS)[:, None]) % EXPERTS < CHOSEN, 1.0, 0.0).astype(np.float32)
    routing = COUNTS(even[None], EXPERTS)
    metrics = routing_metrics(routing, experts_per_token=CHOSEN)
    assert float(metrics["balance_loss"]) == pytest.approx(CHOSEN)
    assert float(metrics["load_max_over_mean"]) == pytest.approx(1)
    stacked = routing_metrics(jnp.stack([routing, 2 * routing]), experts_per_token=CHOSEN)
    assert np.asarray(stacked["balance_loss"]) == pytest.approx([CHOSEN, CHOSEN])  # of twice the tokens, too


@pytest.mark.parametrize(("balance", "z"), [(0.3, 0.0), (0.0, 0.2), (0.3, 0.2)])
def test_the_gradient_is_that_of_the_losses(balance, z):
    def losses(scores):
        shares = jax.nn.softmax(scores).reshape(-1, EXPERTS)
        numbers = jax.lax.top_k(scores, CHOSEN)[1].reshape(-1, CHOSEN)
        load = jax.nn.one_hot(numbers, EXPERTS).sum((0, 1)) / TOKENS
        squares = jax.nn.logsumexp(scores, axis=-1) ** 2
        return balance * EXPERTS * jnp.sum(load * shares.mean(0)) + z * squares.mean()

    @jax.jit
    def both(scores):
        given = {"experts_per_token": CHOSEN, "balance": balance, "z": z}
        return balance_backward(scores, counts(scores, 5), **given), jax.grad(losses)(scores)

    found, wanted = both(draw_scores())
    close(found, wanted)


def test_counts_of_parts_add_up_to_those_of_the_whole():
    """Two devices with half of the tokens each, without a bound on slots."""
    scores = draw_scores()
    halves = [COUNTS(scores[i : i + 1], LENGTH) for i in range(2)]
    np.testing.assert_allclose(halves[0] + halves[1], COUNTS(scores, TOKENS), rtol=1e-5)


def test_a_correction_moves_against_the_load():
    scores = draw_scores()
    load = np.bincount(np.argsort(-scores.reshape(TOKENS, EXPERTS), -1)[:, :CHOSEN].ravel(), minlength=EXPERTS)
    expected = [1 if number < load.mean() else -1 if number > load.mean() else 0 for number in load]
    np.testing.assert_array_equal(correction_move(COUNTS(scores, TOKENS)), expected)
