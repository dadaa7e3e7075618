"""Collective matmuls on emulated devices against the plain product, and its gradient."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from meshwright.core.errors import InputError
from meshwright.hlo.collectives import collectives
from meshwright.nn.ops import collective_matmul
from meshwright.nn.ops.collective_matmul import (
    Factor,
    Product,
    Round,
    all_gather_matmul,
    block_length,
    matmul_reduce_scatter,
)
from tests.nn.arrays import close

SEQS, D, F = 2, 6, 8
T_SPLIT, F_SPLIT, W_SPLIT = (PartitionSpec(*axes) for axes in ((None, "ring"), (None, None, "ring"), (None, "ring")))


def mesh_of(size):
    return jax.make_mesh((size,), ("ring",), axis_types=(AxisType.Auto,), devices=jax.devices()[:size])


def arrays(length):
    """x [B, T, D], a weight [D, F], a cotangent of their product [B, T, F]."""
    rng = np.random.default_rng(0)
    shapes = ((SEQS, length, D), (D, F), (SEQS, length, F))
    return tuple(jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes)


def product(equation, *factors, axis):
    """A product of factors; None stands for what goes round."""
    return Product(apply=partial(jnp.einsum, equation), factors=factors, axis=axis)


def on(size, function, in_specs, out_specs):
    return jax.jit(jax.shard_map(function, mesh=mesh_of(size), in_specs=in_specs, out_specs=out_specs, check_vma=False))


def gather_function(ways, *, divergent=False):
    """x split by T -> y split by F, the weight's gradient split by F, and x whole: one round for all three."""

    def run(x, w, dy):
        ring = Round(axes=("ring",), ways=ways, divergent=divergent)
        forward = product("btd,df->btf", None, Factor(w, None), axis=1)
        gradient = product("btd,btf->df", None, Factor(dy, 1), axis=None)
        return all_gather_matmul(x, [forward, gradient], ring, axis=1, gathers=True)

    return run, (T_SPLIT, W_SPLIT, F_SPLIT), (F_SPLIT, W_SPLIT, PartitionSpec())


def scatter_function(ways, *, num_products=1):
    """y split by F, twice -> the sum of both products, split by T."""

    def run(dy, w):
        ring = Round(axes=("ring",), ways=ways)
        products = [product("btf,df->btd", Factor(dy, 1), Factor(w, None), axis=1)] * num_products
        return matmul_reduce_scatter(products, ring, length=block_length(products, ring.size))

    return run, (F_SPLIT, W_SPLIT), T_SPLIT


@pytest.mark.parametrize("ways", [1, 2])
@pytest.mark.parametrize(("size", "length"), [(2, 6), (2, 2), (4, 16), (4, 12)])
def test_all_gather_matmul(size, length, ways):
    x, w, dy = arrays(length)
    y, dw, whole = on(size, *gather_function(ways))(x, w, dy)
    close(y, x @ w)
    close(dw, jax.grad(lambda w: (x @ w * dy).sum())(w))
    np.testing.assert_array_equal(whole, x)


@pytest.mark.parametrize("ways", [1, 2])
@pytest.mark.parametrize(("size", "length", "num_products"), [(2, 6, 2), (2, 2, 1), (4, 16, 1), (4, 12, 3)])
def test_matmul_reduce_scatter(size, length, num_products, ways):
    x, w, dy = arrays(length)
    dx = on(size, *scatter_function(ways, num_products=num_products))(dy, w)
    close(dx, num_products * jax.grad(lambda x: (x @ w * dy).sum())(x))


@pytest.mark.parametrize("ways", [1, 2])
def test_matmul_all_reduce_along_the_last_dim(ways):
    """Blocks of D: each needs its own rows of the weight alone."""
    _, w, dy = arrays(3)
    w = jnp.concatenate([w, 2 * w[:2]])  # D = 8

    def run(dy, w):
        ring = Round(axes=("ring",), ways=ways)
        products = [product("btf,df->btd", Factor(dy, None), Factor(w, 0), axis=2)]
        part = matmul_reduce_scatter(products, ring, length=block_length(products, ring.size))
        return lax.all_gather(part, "ring", axis=2, tiled=True)

    close(on(4, run, (F_SPLIT, W_SPLIT), PartitionSpec())(dy, w), dy @ w.T)


def moved(size, function, *given):
    """Permutes of the compiled program, how often each runs, and the bytes of all."""
    text = on(size, *function).lower(*given).compile().as_text()
    found = [c for c in collectives(text, {"ring": size}) if c.kind == "permute"]
    return sum(c.trips * c.num_arrays for c in found), sum(c.total_bytes for c in found)


@pytest.mark.parametrize(("ways", "length"), [(1, 16), (2, 16), (2, 12), (2, 4)])
def test_each_device_sends_as_many_bytes_as_a_ring_collective(ways, length):
    size, (x, w, dy) = 4, arrays(length)
    pieces = 1 if length == size else ways  # a block of one position goes one way
    moves = (pieces * (size - 1), x.nbytes // size * (size - 1))
    assert moved(size, gather_function(ways), x, w, dy) == moves
    assert moved(size, scatter_function(ways), dy, w) == moves


def test_more_devices_than_are_written_out(monkeypatch):
    monkeypatch.setattr(collective_matmul, "MAX_WRITTEN_OUT", 1)
    x, w, dy = arrays(24)
    y, dw, whole = on(8, *gather_function(2))(x, w, dy)
    close(y, x @ w)
    close(dw, jax.grad(lambda w: (x @ w * dy).sum())(w))
    np.testing.assert_array_equal(whole, x)
    close(on(8, *scatter_function(2))(dy, w), jax.grad(lambda x: (x @ w * dy).sum())(x))
    pieces, block = 2, x.nbytes // 8
    assert moved(8, gather_function(2), x, w, dy) == (pieces * 7, block * 7)
    assert moved(8, scatter_function(2), dy, w) == (pieces * 7, block * 7)


def test_where_devices_may_be_apart_no_permute_is_used():
    x, w, dy = arrays(16)
    function = gather_function(2, divergent=True)
    y, dw, _ = on(4, *function)(x, w, dy)
    close(y, x @ w)
    close(dw, jax.grad(lambda w: (x @ w * dy).sum())(w))
    assert moved(4, function, x, w, dy) == (0, 0)


def test_blocks_must_be_equal():
    products = [product("btf,df->btd", Factor(jnp.zeros((2, 6, 8)), 1), Factor(jnp.zeros((6, 8)), None), axis=1)]
    with pytest.raises(InputError, match="over 4 devices cannot cut 6 into equal blocks"):
        block_length(products, 4)
