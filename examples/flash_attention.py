"""Flash attention of one head as a Pallas kernel, forward and backward; docs/flash.md derives every line.

Which tiles a step multiplies is no loop here: `tiled_loop` has the table that `meshwright stream` counts and draws.
"""

# mypy: disable-error-code="no-untyped-def, var-annotated"

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from meshwright.calculators.chips.stream import TiledArray, TiledLoop, tiled_loop

LOWEST = -1e30  # finite: the difference of two infinities is NaN


def dot(a, b, contract):
    """Product of two tiles over one dim of each, summed in fp32; the wider tile is rounded to the other's dtype."""
    dtype = min(a.dtype, b.dtype, key=lambda one: one.itemsize)
    dims = (((contract[0],), (contract[1],)), ((), ()))
    return jax.lax.dot_general(a.astype(dtype), b.astype(dtype), dims, preferred_element_type=jnp.float32)


def scores(table, q, k, causal):
    """Returns S[s, t] = k[s] . q[t] / sqrt(H), transposed so that one number a query is a row that broadcasts."""
    found = dot(k, q, (1, 1)) * q.shape[1] ** -0.5
    if not causal:
        return found
    query, key = (jax.lax.broadcasted_iota(jnp.int32, found.shape, dim) for dim in (1, 0))
    step, side = pl.program_id(0), q.shape[0]
    return jnp.where(table[1, step] * side + query >= table[0, step] * side + key, found, LOWEST)


def forward_kernel(table, q, k, v, o, lse, acc, top, total, *, causal):
    step = pl.program_id(0)

    @pl.when(table[2, step] == 1)
    def _():
        acc[:], top[:], total[:] = jnp.zeros_like(acc), jnp.full_like(top, LOWEST), jnp.zeros_like(total)

    S = scores(table, q[:], k[:], causal)
    new = jnp.maximum(top[:], S.max(0, keepdims=True))
    P, shrink = jnp.exp(S - new), jnp.exp(top[:] - new)
    total[:] = shrink * total[:] + P.sum(0, keepdims=True)
    acc[:] = shrink.T * acc[:] + dot(P, v[:], (0, 0))
    top[:] = new

    @pl.when(table[3, step] == 1)
    def _():
        o[:] = (acc[:] / total[:].T).astype(o.dtype)
        lse[:] = top[:] + jnp.log(total[:])


def backward_kernel(table, q, k, v, do, lse, delta, dk, dv, dq, dk_acc, dv_acc, *, causal):
    step = pl.program_id(0)

    @pl.when(step == 0)
    def _():
        dq[:] = jnp.zeros_like(dq)

    @pl.when(table[2, step] == 1)
    def _():
        dk_acc[:], dv_acc[:] = jnp.zeros_like(dk_acc), jnp.zeros_like(dv_acc)

    P = jnp.exp(scores(table, q[:], k[:], causal) - lse[:])
    dv_acc[:] += dot(P, do[:], (1, 0))
    dS = P * (dot(v[:], do[:], (1, 1)) - delta[:]) * q.shape[1] ** -0.5
    dk_acc[:] += dot(dS, q[:], (1, 0))
    rows = pl.ds(table[1, step] * q.shape[0], q.shape[0])
    dq[rows, :] += dot(dS, k[:], (0, 0))

    @pl.when(table[3, step] == 1)
    def _():
        dk[:], dv[:] = dk_acc[:].astype(dk.dtype), dv_acc[:].astype(dv.dtype)


def spec(array: TiledArray) -> pl.BlockSpec:
    """Returns the block spec of a tiled array; the prefetched table says which tile a step takes."""
    return pl.BlockSpec(array.tile, lambda step, table: array.number({"s": table[0, step], "t": table[1, step]}))


def call(kernel, loop: TiledLoop, interpret, *operands):
    """Runs the loop on its operands."""
    dtype = {2: operands[0].dtype, 4: jnp.float32}
    grid = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=(loop.num_steps,),
        in_specs=[spec(one) for one in loop.operands],
        out_specs=[spec(one) for one in loop.results],
        scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in loop.sums.values()],
    )
    shapes = [jax.ShapeDtypeStruct(one.shape, dtype[one.itemsize]) for one in loop.results]
    return pl.pallas_call(kernel, shapes, grid_spec=grid, interpret=interpret)(jnp.asarray(loop.table()), *operands)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def flash_attention(q, k, v, block=128, causal=False, interpret=False):
    """Returns o[T,H] = softmax(q k^T / sqrt(H)) v of q[T,H], k[T,H], v[T,H]; `jax.vmap` adds heads and sequences."""
    return forward(q, k, v, block, causal, interpret)[0]


def forward(q, k, v, block, causal, interpret):
    loop = tiled_loop("flash", seq=q.shape[0], width=q.shape[1], block=block, causal=causal)
    o, lse = call(partial(forward_kernel, causal=causal), loop, interpret, q, k, v)
    return o, (q, k, v, o, lse)


def backward(block, causal, interpret, kept, do):
    q, k, v, o, lse = kept
    delta = (do.astype(jnp.float32) * o.astype(jnp.float32)).sum(1)[None]
    loop = tiled_loop("flash-backward", seq=q.shape[0], width=q.shape[1], block=block, causal=causal)
    dk, dv, dq = call(partial(backward_kernel, causal=causal), loop, interpret, q, k, v, do, lse, delta)
    return dq.astype(q.dtype), dk, dv


flash_attention.defvjp(forward, backward)
