"""Multiplies two arrays by the letters of their dims, in the layout that is fast on the platform.

XLA's fast matrix product on CPU needs the summed dim last in its left factor. It computes a product that sums the first
dims of both factors, such as the gradient of a weight (over tokens), more slowly. Here the smaller factor is transposed
first: the copy costs less than the slower product. A product of bfloat16 widens both factors if its result is bfloat16,
and as a rule neither if it is float32. On other platforms XLA's own choice is fast.
"""

import math
from dataclasses import dataclass

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array

from meshwright.nn.attention.platform import default_platform, processor


@dataclass(frozen=True)
class Turned:
    """A weight whose first ``inputs`` dims are stored last in ``array``; `plain` is the weight with dims in order."""

    array: Array
    inputs: int

    @property
    def plain(self) -> Array:
        return jnp.moveaxis(self.array, range(-self.inputs, 0), range(self.inputs))


def contract(equation: str, lhs: Array, rhs: Array | Turned, *, dtype: DTypeLike | None = None) -> Array:
    """Returns `jnp.einsum` of two arrays; the result and its sums have ``dtype``, by default the operands' dtype."""
    factor_dims, out = equation.split("->")
    left, right = factor_dims.split(",")
    if isinstance(rhs, Turned):
        right, rhs = right[rhs.inputs :] + right[: rhs.inputs], rhs.array
        equation = f"{left},{right}->{out}"
    both = "".join(dim for dim in left if dim in right)
    batch = "".join(dim for dim in both if dim in out)
    rows, cols = left.removesuffix(both), right.removesuffix(both)
    if rows and cols and (rows + both, cols + both, rows + cols) == (left, right, out) and default_platform() == "cpu":
        num_rows, width = math.prod(lhs.shape[: len(rows)]), math.prod(lhs.shape[len(rows) :])
        if lhs.dtype == rhs.dtype and lhs.dtype in (jnp.float32, jnp.bfloat16) and 4 * num_rows <= width:
            product = _by_outputs(lhs.reshape(num_rows, width), rhs.reshape(-1, width)).astype(dtype or lhs.dtype)
            return product.reshape(*lhs.shape[: len(rows)], *rhs.shape[: len(cols)])
    lead = batch + both[len(batch) :]
    lhs_rest, rhs_rest = left[len(lead) :], right[len(lead) :]
    sums_first_dims = left.startswith(lead) and right.startswith(lead) and batch != lead and lhs_rest and rhs_rest
    fp32 = lhs.dtype == rhs.dtype == jnp.float32 and dtype in (None, jnp.float32)
    if sums_first_dims and sorted(out) == sorted(batch + lhs_rest + rhs_rest) and fp32 and default_platform() == "cpu":
        return _transposed_product((batch, lead[len(batch) :], lhs_rest, rhs_rest), out, lhs, rhs)
    if lhs.dtype == rhs.dtype == jnp.bfloat16 and default_platform() == "cpu":
        if batch and max(lhs.ndim, rhs.ndim) > 3:  # XLA lacks batched products of narrow factors with a wide result
            return jnp.einsum(equation, *(x.astype(dtype or lhs.dtype) for x in (lhs, rhs)))
        return _narrow_product((left, right, out), lhs, rhs).astype(dtype or lhs.dtype)
    return jnp.einsum(equation, lhs, rhs, preferred_element_type=dtype)


def _by_outputs(rows: Array, matrix: Array) -> Array:
    """Returns few rows [R, D] times a matrix [F, D] as [R, F] in float32. XLA repacks the right factor, so the rows go
    there; one row, and fewer than 16 of bfloat16 without CPU instructions for it, take other paths."""
    if len(rows) == 1 and rows.dtype == jnp.float32:
        return jnp.einsum("RD,FD->RF", rows, matrix)
    if len(rows) == 1:  # as a product XLA would widen the matrix
        # The rounding, which changes no entry, keeps XLA from fusing this with the previous product.
        row32, matrix = lax.optimization_barrier((lax.reduce_precision(rows.astype(jnp.float32), 8, 7), matrix))
        return lax.optimization_barrier(jnp.sum(matrix.astype(jnp.float32) * row32, axis=1))[None]
    if len(rows) < 16 and rows.dtype == jnp.bfloat16 and "bf16" not in processor():
        return _narrow_product(("RD", "FD", "RF"), rows, matrix)
    rows = lax.optimization_barrier(rows)  # a transposition that is folded into such a product is not executed
    product = jnp.einsum("ZFD,ZRD->ZFR", matrix[None], rows[None], preferred_element_type=jnp.float32)[0]
    return lax.optimization_barrier(product).T  # else XLA swaps the factors


def _narrow_product(letters: tuple[str, str, str], lhs: Array, rhs: Array) -> Array:
    """Returns the product of bfloat16 arrays in float32, in a form for which XLA does not widen the factors.

    XLA widens factors if one has a single row, and two matrices if one is transposed.
    """
    lhs_dims, rhs_dims, out_dims = letters
    free_dims = [dim for dim in lhs_dims if dim not in rhs_dims]
    lone_dim = free_dims[:1] if math.prod(lhs.shape[lhs_dims.index(dim)] for dim in free_dims) == 1 else []
    if lone_dim:
        lhs = jnp.concatenate([lhs, lhs], lhs_dims.index(lone_dim[0]))
    if lhs.ndim == 2:
        lhs = lax.optimization_barrier(lhs)  # a transposition that is folded into such a product is not executed
    if lhs.ndim == rhs.ndim == 2:
        lhs, lhs_dims, out_dims = lhs[None], f"Z{lhs_dims}", f"Z{out_dims}"
    product = jnp.einsum(f"{lhs_dims},{rhs_dims}->{out_dims}", lhs, rhs, preferred_element_type=jnp.float32)
    product = product[0] if out_dims[0] == "Z" else product
    return lax.slice_in_dim(product, 0, 1, axis=letters[2].index(lone_dim[0])) if lone_dim else product


def _transposed_product(letters: tuple[str, str, str, str], out: str, lhs: Array, rhs: Array) -> Array:
    """Contracts [batch, summed, first] with [batch, summed, second] after transposing the smaller factor."""
    batch, summed, lhs_rest, rhs_rest = letters
    size_by_dim = dict(zip(batch + summed + lhs_rest, lhs.shape, strict=True))
    size_by_dim |= zip(batch + summed + rhs_rest, rhs.shape, strict=True)

    def size(dims: str) -> int:
        return math.prod(size_by_dim[c] for c in dims)

    if size(lhs_rest) > size(rhs_rest):
        lhs, rhs, lhs_rest, rhs_rest = rhs, lhs, rhs_rest, lhs_rest
    batch_shape = [*(size_by_dim[c] for c in batch), size(summed), -1]
    # The barriers keep XLA from folding a transposition back into the product.
    transposed_lhs = lax.optimization_barrier(jnp.swapaxes(lhs.reshape(batch_shape), -1, -2))
    product = jnp.matmul(transposed_lhs, rhs.reshape(batch_shape))
    product_dims = batch + lhs_rest + rhs_rest
    if product_dims != out:
        product = lax.optimization_barrier(product)
    product = product.reshape([size_by_dim[c] for c in product_dims])
    return jnp.transpose(product, [product_dims.index(c) for c in out])


FLOATS = {jnp.dtype(jnp.uint16): jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.uint8): jnp.dtype(jnp.float8_e4m3fn)}
"""Dtype of an integer array that stores the bits of floats -> dtype of the floats. XLA's CPU programs read and write
entries of arrays of these floats in a wider copy of the whole array."""


def floats(held: Array) -> Array:
    """Returns an integer array's bits as the floats of `FLOATS`; any other array unchanged."""
    return lax.bitcast_convert_type(held, FLOATS[held.dtype]) if held.dtype in FLOATS else held


def rows_at(table: Array, index: Array) -> Array:
    """Returns the rows of an array at the indices; on CPUs without a wider copy of the array."""
    if table.dtype != jnp.bfloat16 or default_platform() != "cpu":
        return jnp.take(table, index, axis=0)
    return floats(jnp.take(lax.bitcast_convert_type(table, jnp.uint16), index, axis=0))


def spread(x: Array, dims: tuple[str, ...], over: tuple[str, ...]) -> Array:
    """Transposes an array over ``dims`` and inserts dims of 1, to broadcast against an array over ``over``."""
    dim_order = [dims.index(dim) for dim in over if dim in dims]
    return jnp.expand_dims(x.transpose(dim_order), tuple(i for i, dim in enumerate(over) if dim not in dims))
