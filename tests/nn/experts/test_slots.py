"""Slots and the router on one device against a loop over tokens, and against the gradient of dense formulas."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from meshwright.nn.experts import slots as experts
from meshwright.nn.ops.route import route, route_backward
from tests.nn.arrays import close, draw
from tests.nn.families import FAMILIES

from . import plain_experts

BATCH, LENGTH, WIDTH, HIDDEN, EXPERTS, CHOSEN = 2, 6, 8, 10, 8, 3
TOKENS = BATCH * LENGTH

MODEL = replace(FAMILIES["mixtral"], num_experts=EXPERTS, experts_per_token=CHOSEN)
GROUPS = {"expert_groups": 4, "groups_per_token": 2}
FORMS = {
    "mixtral": MODEL,
    "qwen2_moe": replace(MODEL, gates_sum_to_one=False),
    "deepseek_v2": replace(MODEL, gates_sum_to_one=False, routed_scale=1.5, **GROUPS),
    "deepseek_v3": replace(MODEL, router_scores="sigmoid", routed_scale=2.5, **GROUPS),
}


def plain_form(form):
    return {
        "num_chosen": form.experts_per_token,
        "shares": form.router_scores,
        "sum_to_one": form.gates_sum_to_one,
        "scale": form.routed_scale,
        "groups": form.expert_groups,
        "groups_per_token": form.groups_per_token,
    }


def weights():
    shapes = ((WIDTH, EXPERTS), (EXPERTS, WIDTH, HIDDEN), (EXPERTS, WIDTH, HIDDEN), (EXPERTS, HIDDEN, WIDTH))
    return [draw(*shape, seed=number) / 2 for number, shape in enumerate(shapes)]


def through_slots(x, router, gate, up, down, *, form, capacity):
    """The layer by the functions under test; also what the backward pass starts from."""
    scores = x @ router
    gates, chosen = route(scores, form, capacity=capacity)
    we = experts.dispatch_gates(gates, chosen, jnp.zeros((EXPERTS, capacity), jnp.float32))
    xe = experts.dispatch(x, chosen, we)
    me = jax.nn.silu(jnp.einsum("ecd,edf->ecf", xe, gate)) * jnp.einsum("ecd,edf->ecf", xe, up)
    ye = jnp.einsum("ecf,efd->ecd", me * we[..., None], down)
    return experts.combine(ye, chosen), (scores, gates, chosen, ye)


@pytest.mark.parametrize("family", ["deepseek_v3", "mixtral"])
def test_a_correction_chooses_and_does_not_weigh(family):
    form, scores = FORMS[family], draw(BATCH, LENGTH, EXPERTS)
    correction = np.linspace(0.4, -0.4, EXPERTS).astype(np.float32)
    gates, chosen = route(scores, form, correction, capacity=TOKENS)
    numbers = np.asarray(chosen) // TOKENS
    assert (numbers != np.asarray(route(scores, form, capacity=TOKENS)[1]) // TOKENS).any()
    for place in np.ndindex(BATCH, LENGTH):
        picked, weights = plain_experts.choose(scores[place].astype(np.float64), correction, **plain_form(form))
        assert numbers[place].tolist() == list(picked)
        close(gates[place], weights)


@pytest.mark.parametrize("family", FORMS)
def test_the_layer_is_what_a_loop_over_tokens_gives(family):
    x, given = draw(BATCH, LENGTH, WIDTH), weights()
    form = FORMS[family]
    y, _ = jax.jit(lambda *a: through_slots(*a, form=form, capacity=TOKENS))(x, *given)
    wide = [array.astype(np.float64) for array in (x.reshape(TOKENS, WIDTH), *given)]
    wanted, dropped = plain_experts.layer(*wide, **plain_form(form))
    assert not dropped
    close(y.reshape(TOKENS, WIDTH), wanted)


@pytest.mark.parametrize("factor", [0.5, 1.0])
def test_an_expert_drops_exactly_the_tokens_that_come_too_late(factor):
    x, given = draw(BATCH, LENGTH, WIDTH), weights()
    capacity = experts.expert_capacity(MODEL, TOKENS, factor)
    y, (_, _, chosen, _) = jax.jit(lambda *a: through_slots(*a, form=FORMS["mixtral"], capacity=capacity))(x, *given)
    wide = [array.astype(np.float64) for array in (x.reshape(TOKENS, WIDTH), *given)]
    wanted, dropped = plain_experts.layer(*wide, capacity=capacity, num_chosen=CHOSEN)
    flat = np.asarray(chosen).reshape(TOKENS, CHOSEN)
    assert {(token, -1 - flat[token, choice]) for token, choice in np.argwhere(flat < 0)} == set(dropped)
    assert dropped
    close(y.reshape(TOKENS, WIDTH), wanted)


def test_capacity():
    model = replace(MODEL, num_experts=8, experts_per_token=2)
    assert experts.expert_capacity(model, 100) == 100
    assert experts.expert_capacity(model, 100, 1.0) == 25
    assert experts.expert_capacity(model, 100, 1.25) == 32  # 31.25
    assert experts.expert_capacity(model, 100, 1.2) == 30  # the float product is above 30
    assert experts.expert_capacity(model, 100, 9.0) == 100
    assert experts.expert_capacity(model, 1, 1.0) == 1


# -- properties of slots ----------------------------------------------------------------------------------

ASSIGN = jax.jit(experts.assign_slots, static_argnames="num_experts")
DISPATCH, DISPATCH_GATES, COMBINE = map(jax.jit, (experts.dispatch, experts.dispatch_gates, experts.combine))
CAPACITY = 4


@st.composite
def choices(draw):
    """Distinct experts of every token."""
    order = st.permutations(range(EXPERTS)).map(lambda numbers: numbers[:CHOSEN])
    rows = draw(st.lists(order, min_size=TOKENS, max_size=TOKENS))
    return np.array(rows, np.int32).reshape(BATCH, LENGTH, CHOSEN)


@settings(max_examples=40, deadline=None)
@given(choices(), st.integers(1, TOKENS))
def test_every_kept_choice_has_a_slot_of_its_own_expert(numbers, capacity):
    chosen = np.asarray(ASSIGN(numbers, num_experts=EXPERTS, capacity=capacity))
    kept = chosen >= 0
    assert np.array_equal(np.where(kept, chosen // capacity, -1 - chosen), numbers)
    assert len(set(chosen[kept])) == kept.sum()
    asked = np.bincount(numbers.ravel(), minlength=EXPERTS)
    slots = np.bincount(chosen[kept] // capacity, minlength=EXPERTS)
    assert np.array_equal(slots, np.minimum(asked, capacity))
    for expert in range(EXPERTS):
        own = chosen[kept & (numbers == expert)]
        assert np.array_equal(own, expert * capacity + np.arange(len(own)))  # in the order of the tokens


@settings(max_examples=20, deadline=None)
@given(choices())
def test_slots_hold_their_tokens_and_nothing_else(numbers):
    x = draw(BATCH, LENGTH, WIDTH)
    chosen = np.asarray(ASSIGN(numbers, num_experts=EXPERTS, capacity=CAPACITY))
    slots = np.asarray(DISPATCH(x, chosen, jnp.zeros((EXPERTS, CAPACITY), jnp.float32))).reshape(-1, WIDTH)
    wanted = np.zeros_like(slots)
    for token, choice in np.argwhere(chosen.reshape(TOKENS, CHOSEN) >= 0):
        wanted[chosen.reshape(TOKENS, CHOSEN)[token, choice]] = x.reshape(TOKENS, WIDTH)[token]
    assert np.array_equal(slots, wanted)


@settings(max_examples=20, deadline=None)
@given(choices(), st.permutations(range(TOKENS)))
def test_without_a_bound_the_order_of_tokens_does_not_matter(numbers, order):
    """Each expert doubles its number times its input, so that a mistaken expert or slot shows."""
    x, gates = draw(BATCH, LENGTH, WIDTH), np.abs(draw(BATCH, LENGTH, CHOSEN))

    def run(x, gates, numbers):
        chosen = ASSIGN(numbers, num_experts=EXPERTS, capacity=TOKENS)
        weights = DISPATCH_GATES(gates, chosen, jnp.zeros((EXPERTS, TOKENS), jnp.float32))
        factors = weights * np.arange(1, EXPERTS + 1, dtype=np.float32)[:, None]
        return np.asarray(COMBINE(DISPATCH(x, chosen, weights) * factors[..., None], chosen))

    def shuffled(array):
        return array.reshape(TOKENS, -1)[list(order)].reshape(array.shape)

    np.testing.assert_allclose(
        run(shuffled(x), shuffled(gates), shuffled(numbers)), shuffled(run(x, gates, numbers)), rtol=1e-6, atol=1e-6
    )


# -- backward ---------------------------------------------------------------------------------------------


def dense_gates(scores, numbers, form):
    """Weights over all experts, zero outside of ``numbers``, by jnp operations that JAX can differentiate."""
    inside = jax.nn.one_hot(numbers, EXPERTS).sum(-2)
    share = jax.nn.softmax(scores) if form.router_scores == "softmax" else jax.nn.sigmoid(scores)
    share = share * inside
    return form.routed_scale * (share / share.sum(-1, keepdims=True) if form.gates_sum_to_one else share)


@pytest.mark.parametrize(
    ("family", "capacity"), [*((family, TOKENS) for family in FORMS), ("mixtral", 3), ("qwen2_moe", 3)]
)
def test_gradients_are_those_of_a_dense_formula(family, capacity):
    """Every expert runs on every token; choices that were dropped are masked. An expert squares its input."""
    form = FORMS[family]
    x, dy = draw(BATCH, LENGTH, WIDTH), draw(BATCH, LENGTH, WIDTH, seed=9)
    scores, factors = x @ weights()[0], draw(EXPERTS, WIDTH, seed=5)

    @jax.jit
    def found(x, scores, dy):
        gates, chosen = route(scores, form, capacity=capacity)
        we = experts.dispatch_gates(gates, chosen, jnp.zeros((EXPERTS, capacity), jnp.float32))
        xe = experts.dispatch(x, chosen, we)
        made = xe * xe * factors[:, None]
        dye = experts.dispatch(dy, chosen, we)
        dx = experts.combine(2 * xe * factors[:, None] * dye * we[..., None], chosen)
        dgates = experts.gates_backward((made * dye).sum(-1), chosen)
        dscores = route_backward(dgates, scores, chosen, form, capacity=capacity)
        return chosen, experts.combine(made * we[..., None], chosen), dx, dscores

    @jax.jit
    def dense(x, scores, numbers, kept, dy):
        def layer(x, scores):
            made = (x * x)[:, :, None] * factors[None, None]
            return jnp.einsum("bte,bted->btd", dense_gates(scores, numbers, form) * kept, made)

        y, vjp = jax.vjp(layer, x, scores)
        return y, *vjp(dy)

    chosen, *results = found(x, scores, dy)
    chosen = np.asarray(chosen)
    assert (chosen < 0).any() == (capacity < TOKENS)
    numbers = np.where(chosen < 0, -1 - chosen, chosen // capacity)
    kept = np.zeros(scores.shape, np.float32)
    np.put_along_axis(kept, numbers, (chosen >= 0).astype(np.float32), -1)
    for one, other in zip(results, dense(x, scores, numbers, kept, dy), strict=True):
        close(one, np.asarray(other))


def test_a_router_in_bfloat16_chooses_and_weighs_in_float32():
    @jax.jit
    def both(scores):
        gates, chosen = route(scores, FORMS["mixtral"], capacity=TOKENS)
        dscores = route_backward(gates, scores, chosen, FORMS["mixtral"], capacity=TOKENS)
        return gates, chosen, dscores, *route(scores.astype(jnp.float32), FORMS["mixtral"], capacity=TOKENS)

    gates, chosen, dscores, wanted, same = both(jnp.asarray(draw(BATCH, LENGTH, EXPERTS), jnp.bfloat16))
    assert (gates.dtype, dscores.dtype) == (jnp.float32, jnp.bfloat16)
    assert np.array_equal(gates, wanted)
    assert np.array_equal(chosen, same)
