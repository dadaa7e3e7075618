import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.nn.contract import Turned, contract
from tests.nn.arrays import close

SIZES = dict(zip("abcdefghi", (2, 3, 5, 4, 7, 6, 8, 3, 1), strict=True))

TURNED = [
    "ab,ac->bc",  # a weight's gradient: tokens are summed
    "abe,abcd->ecd",  # several token dims, a result with heads
    "ace,acb->eb",  # the left factor is the larger one
    "ace,acb->be",  # the result in the other order
    "hge,hga->hea",  # experts: a batch dim in front
    "hgae,hgb->hbae",
]
PLAIN = [
    "ab,bc->ac",
    "ab,cb->ac",
    "abcd,cde->abe",
    "ba,cb->ac",  # summed first on the left, last on the right
    "abc,bad->cd",  # summed dims in another order
    "hab,hbc->hac",
    "ahb,ahc->hbc",  # a batch dim that is not in front
    "ab,ab->a",
    "ab,ab->",
    "ab,ac->abc",
    "abd,ac->bc",  # a dim of one factor summed by itself
]


def factors(equation, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    names = equation.split("->")[0].split(",")
    return [jnp.asarray(rng.normal(size=[SIZES[c] for c in name]), dtype) for name in names]


@pytest.fixture(params=["cpu", "tpu", "cuda"])
def platform(request, monkeypatch):
    """The platform that the program is for."""
    monkeypatch.setattr("meshwright.nn.contract.default_platform", lambda: request.param)
    return request.param


def transposes(equation):
    return str(jax.make_jaxpr(lambda *a: contract(equation, *a))(*factors(equation))).count("optimization_barrier")


@pytest.mark.parametrize("equation", TURNED + PLAIN)
def test_the_product_is_the_sum_over_letters(equation, platform):
    lhs, rhs = factors(equation)
    expected = np.einsum(equation, np.asarray(lhs, np.float64), np.asarray(rhs, np.float64))
    found = contract(equation, lhs, rhs)
    assert found.dtype == jnp.float32
    close(found, expected, 1e-6)


@pytest.mark.parametrize("equation", TURNED)
def test_only_cpu_turns_a_factor_round(equation, platform):
    assert (transposes(equation) >= 1) == (platform == "cpu")


@pytest.mark.parametrize("equation", PLAIN)
def test_products_that_sum_other_dims_are_left_to_xla(equation):
    assert transposes(equation) == 0


def test_the_smaller_factor_is_turned_round():
    traced = str(jax.make_jaxpr(lambda a, b: contract("te,tb->eb", a, b))(*sized((9, 7), (9, 3))))
    assert "f32[3,9]" in traced
    assert "f32[7,9]" not in traced


def sized(*shapes):
    return [jnp.ones(shape, jnp.float32) for shape in shapes]


@pytest.mark.parametrize("equation", TURNED)
def test_gradients_are_those_of_einsum(equation):
    lhs, rhs = factors(equation)

    def loss(product):
        return lambda a, b: jnp.sum(jnp.sin(product(a, b)))

    found = jax.grad(loss(lambda a, b: contract(equation, a, b)), argnums=(0, 1))(lhs, rhs)
    expected = jax.grad(loss(lambda a, b: jnp.einsum(equation, a, b)), argnums=(0, 1))(lhs, rhs)
    for one, other in zip(found, expected, strict=True):
        close(one, other)


def test_a_wide_result_of_narrow_factors_is_added_up_in_float32():
    lhs, rhs = factors("abe,abcd->ecd", jnp.bfloat16)
    found = contract("abe,abcd->ecd", lhs, rhs, dtype=jnp.float32)
    expected = np.einsum("abe,abcd->ecd", np.asarray(lhs, np.float64), np.asarray(rhs, np.float64))
    assert found.dtype == jnp.float32
    close(found, expected)
    assert contract("abe,abcd->ecd", lhs, rhs).dtype == jnp.bfloat16


@pytest.mark.parametrize("equation", TURNED + PLAIN + ["ib,bc->ic", "ibc,cd->ibd", "ib,cb->ic"])
def test_products_of_bfloat16_are_summed_in_float32(equation):
    lhs, rhs = factors(equation, jnp.bfloat16)
    expected = np.einsum(equation, np.asarray(lhs, np.float64), np.asarray(rhs, np.float64))
    close(contract(equation, lhs, rhs, dtype=jnp.float32), expected, 1e-6)
    assert contract(equation, lhs, rhs).dtype == jnp.bfloat16


@pytest.mark.parametrize("rows", [1, 2, 8])
@pytest.mark.parametrize("weight", ["bc", "cb"])
@pytest.mark.parametrize("turned", [False, True])
def test_few_rows_of_bfloat16_widen_no_weight(rows, weight, turned):
    x, w = jnp.ones((rows, 256), jnp.bfloat16), jnp.ones((256, 4096) if weight == "bc" else (4096, 256), jnp.bfloat16)
    equation = f"ab,{weight[::-1] if turned else weight}->ac"
    program = jax.jit(lambda x, w: contract(equation, x, w.T if turned else w)).lower(x, w).compile()
    # one row by a transposed view of a weight, which no model has, writes the transposition, still narrow
    narrow = 1.1 if (rows, weight, turned) == (1, "bc", True) else 1.0
    assert program.memory_analysis().temp_size_in_bytes < narrow * w.nbytes


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("rows", [1, 3, 8, 16])
@pytest.mark.parametrize("features", ["avx2", "avx2 avx512_bf16"])
def test_few_rows_are_the_right_factor_of_a_matrix_with_outputs_first(rows, dtype, features, monkeypatch):
    """XLA packs that factor: a weight there would be packed anew in every step. Tables of tied heads are such too."""
    monkeypatch.setattr("meshwright.nn.contract.processor", lambda: features)
    rng = np.random.default_rng(rows)
    lhs, weight = (jnp.asarray(rng.normal(size=sizes), dtype) for sizes in ((rows, 4, 16), (4, 16, 3, 32)))
    turned = Turned(jnp.moveaxis(weight, (2, 3), (0, 1)), 2)
    expected = np.einsum("rnh,nhke->rke", *(np.asarray(x, np.float64) for x in (lhs, weight)))
    close(contract("rnh,nhke->rke", lhs, turned, dtype=jnp.float32), expected, 1e-6)
    close(contract("rnh,kenh->rke", lhs, turned.array, dtype=jnp.float32), expected, 1e-6)
    np.testing.assert_array_equal(turned.plain, weight)
    program = jax.jit(lambda x, w: contract("rnh,nhke->rke", x, Turned(w, 2))).lower(lhs, turned.array).compile()
    found = re.findall(r"f32\[([\d,]+)\]\S* dot\(", program.as_text())
    if rows > 1:
        packed = dtype == jnp.float32 or rows == 16 or "bf16" in features
        assert [sizes.removeprefix("1,") for sizes in found] == [f"96,{rows}" if packed else f"{rows},96"]


def test_products_of_one_row_of_bfloat16_share_no_wide_copy_of_it():
    x, gate, up = (jnp.ones(size, jnp.bfloat16) for size in ((1, 256), (1024, 256), (1024, 256)))
    program = jax.jit(lambda x, *ws: [contract("rd,fd->rf", x, w) for w in ws]).lower(x, gate, up).compile()
    assert program.memory_analysis().temp_size_in_bytes < gate.nbytes / 8
