"""FLOPs of products in small programs: loops, shared functions, branches, loops that depend on data."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from meshwright.core.labels import find_label
from meshwright.parallel.pipeline.executor import at_most_once
from meshwright.verify.flops import compare_products, count_products

A, B, C = 8, 16, 32
ONE = 2 * A * B * C
UP, DOWN = (find_label(text) for text in ("layer:forward:up=einsum", "layer:forward:down=einsum"))


def program(function, *arguments) -> str:
    """The HLO that XLA is given."""
    return jax.jit(function).lower(*arguments).as_text(dialect="hlo", debug_info=True)


def zeros(*dims, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(dims, dtype)


def up(x, w):
    with jax.named_scope(str(UP)):
        return x @ w


@pytest.mark.parametrize(
    ("function", "shapes", "flops"),
    [
        (up, ((A, B), (B, C)), {UP: ONE}),
        # batched and transposed
        (lambda x, w: jnp.einsum("bik,bjk->bij", x, w), ((3, A, B), (3, C, B)), {None: 3 * ONE}),
        # a sum over two dims and one over none
        (lambda x, w: jnp.einsum("ijk,jkl->il", x, w), ((A, 2, B), (2, B, C)), {None: 2 * ONE}),
    ],
)
def test_one_product(function, shapes, flops):
    assert count_products(program(function, *(zeros(*shape) for shape in shapes))).flops == flops


def test_a_loop():
    def looped(x, w):
        return lax.scan(lambda c, _: (up(c, w), None), x, None, length=5)[0]

    found = count_products(program(looped, zeros(A, B), zeros(B, B)))
    assert (found.flops, found.by_data) == ({UP: 5 * 2 * A * B * B}, frozenset())


def test_a_loop_in_a_loop():
    def looped(x, w):
        return lax.fori_loop(0, 3, lambda _, c: lax.fori_loop(0, 4, lambda _, d: up(d, w), c), x)

    assert count_products(program(looped, zeros(A, B), zeros(B, B))).flops == {UP: 12 * 2 * A * B * B}


def test_a_shared_function_takes_the_label_of_who_calls_it():
    shared = jax.jit(lambda x, w: x @ w)

    def both(x, w, v):
        with jax.named_scope(str(UP)):
            y = shared(x, w)
        with jax.named_scope(str(DOWN)):
            return shared(y, v)

    found = count_products(program(both, zeros(A, B), zeros(B, B), zeros(B, B)))
    assert found.flops == {UP: 2 * A * B * B, DOWN: 2 * A * B * B}


def test_a_loop_that_depends_on_data_is_left_out():
    def looped(x, w):
        return lax.while_loop(lambda c: c.sum() < 9, lambda c: up(c, w), up(x, w))

    text = program(looped, zeros(A, B), zeros(B, B))
    assert count_products(text).by_data == {UP}
    found = compare_products(text, {UP: 1.0, DOWN: 5.0})
    assert (found.derived, found.compiled, found.by_data) == (5.0, 0.0, (str(UP),))


def test_a_branch_kept_as_a_loop_counts_once():
    def once(x, w, runs):
        return at_most_once(runs, lambda w, c: (up(c, w),), w, x)[0]

    found = count_products(program(once, zeros(A, B), zeros(B, B), zeros(dtype=jnp.bool)))
    assert (found.flops, found.by_data) == ({UP: 2 * A * B * B}, frozenset())


def test_every_branch_of_a_conditional_counts():
    def either(x, w, runs):
        return lax.cond(runs, lambda: up(x, w), lambda: up(x, 2 * w))

    assert count_products(program(either, zeros(A, B), zeros(B, B), zeros(dtype=jnp.bool))).flops == {UP: 4 * A * B * B}


# -- beside the derivation ----------------------------------------------------------------------------


@pytest.mark.parametrize(("share", "differs"), [(1.0, False), (1.019, False), (1.03, True), (0.5, True), (0.0, True)])
def test_differences_over_two_percent_are_told(share, differs):
    found = compare_products(program(up, zeros(A, B), zeros(B, C)), {UP: ONE * share})
    assert bool(found.differences) is differs
    assert (found.derived, found.compiled) == (ONE * share, ONE)


def test_what_has_no_label_is_told():
    (one,) = compare_products(program(lambda x, w: x @ w, zeros(A, B), zeros(B, C)), {}).differences
    assert (one.where, one.derived, one.compiled) == ("no step", 0.0, ONE)


def test_attention_is_left_out_on_both_sides():
    attention = find_label("layer:forward:o=attention")

    def attend(x, w):
        with jax.named_scope(str(attention)):
            return x @ w

    found = compare_products(program(attend, zeros(A, B), zeros(B, C)), {attention: 1e9, UP: 3.0})
    assert (found.derived, found.compiled) == (3.0, 0.0)


def test_the_largest_difference_comes_first():
    found = compare_products(program(up, zeros(A, B), zeros(B, C)), {UP: 0.0, DOWN: 9.0 * ONE})
    assert [one.where for one in found.differences] == [str(DOWN), str(UP)]
