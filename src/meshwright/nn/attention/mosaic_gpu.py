"""Flash attention for Hopper GPUs as Pallas kernels for Mosaic GPU, over the blocks that a mask leaves.

One program holds a block of rows: two warpgroups compute half of it each, a third one brings tiles of the columns
through shared memory. While one warpgroup multiplies, the other is busy with its softmax.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from meshwright.nn.attention.tiles import BlockLists, Tile, TileRule

WARPGROUPS = 2
"""Warpgroups that compute; each takes half of the rows of a block, a multiple of 64."""

SHARED_BYTES = 227 * 1024
"""Shared memory of one program on Hopper."""

_LOG2E = math.log2(math.e)
_LOWEST = -1e30
"""Start of a row's running maximum: finite, so that rows without a key yet stay free of NaN."""


def forward(
    rule: TileRule, lists: BlockLists, blocks: tuple[int, int], scale: float,
    q: Float[Array, "B T N H"], k: Float[Array, "B S K H"], v: Float[Array, "B S K H"],
    *, stages: int = 2, interpret: bool = False,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:  # fmt: skip
    """Returns the result and the log-sum-exp of each row in float32; 0 and -inf for a row that sees no key.

    T and S are multiples of the ``blocks`` of queries and keys. ``stages`` is the number of tiles of keys in flight.
    """
    (B, T, N, H), (_, S, K, _) = q.shape, k.shape
    rows, keys = blocks[0] // WARPGROUPS, blocks[1]
    stages = min(stages, S // keys)
    rule = _widened(rule)

    def kernel(q_ref, k_ref, v_ref, lists_ref, heads, by_row, by_column, o_ref, lse_ref, scratch):
        (q_s, k_s, v_s, lse_s, rows_s, columns_s), (q_in, k_in, v_in), (k_out, v_out), turn = scratch
        b, n, i = lax.axis_index("batch"), lax.axis_index("head"), T // blocks[0] - 1 - lax.axis_index("block")
        one = lax.axis_index("warpgroup")
        partial, total, index = (_of(ref, b, n).at[i] for ref in lists_ref)
        total_steps = total[...]

        def take_turn() -> None:
            plgpu.barrier_arrive(turn.at[0])
            plgpu.barrier_wait(turn.at[0])

        @pl.when(one < WARPGROUPS)
        def compute() -> None:
            plgpu.set_max_registers(232, action="increase")
            first = i * blocks[0] + one * rows
            mine = b, pl.ds(first, rows), n
            plgpu.copy_gmem_to_smem(q_ref.at[mine], q_s.at[one], q_in.at[one])
            for ref, into in zip(by_row, rows_s, strict=True):
                plgpu.copy_gmem_to_smem(_of(ref, b, n).at[pl.ds(first, rows)], into.at[one], q_in.at[one])
            plgpu.barrier_wait(q_in.at[one])
            scalars = tuple(_of(ref, b, n)[...] for ref in heads)
            shape = rows, keys
            row_values = tuple(_across(ref.at[one], shape, 0, interpret) for ref in rows_s)

            def tile(step, slot) -> Tile:
                query, key = (_laid(lax.broadcasted_iota(jnp.int32, shape, d), interpret) for d in (0, 1))
                columns = tuple(_across(ref.at[slot], shape, 1, interpret) for ref in columns_s)
                return Tile(query + first, key + index[step] * keys, scalars, row_values, columns)

            def body(step, carry, *, masked: bool):
                acc, top, norm = carry
                slot = lax.rem(step, jnp.int32(stages))

                scores = _product(q_s.at[one], k_s.at[slot], interpret, take_turn)
                factor = scale * _LOG2E
                if masked or rule.score:
                    here = tile(step, slot)
                    if rule.score:
                        scores, factor = rule.score(scores * scale, here), _LOG2E
                    if masked:
                        scores = jnp.where(rule.mask(here), scores, -jnp.inf)
                plgpu.barrier_arrive(k_out.at[slot])
                new = jnp.maximum(top, scores.max(axis=1) * factor)
                p = jnp.exp2(scores * factor - lax.broadcast_in_dim(new, shape, [0]))
                shrink = jnp.exp2(top - new)
                acc *= lax.broadcast_in_dim(shrink, acc.shape, [0])
                half = p.astype(v.dtype)
                norm = norm * shrink + p.sum(axis=1)
                acc, norm, new, half = lax.optimization_barrier((acc, norm, new, half))
                plgpu.barrier_arrive(turn.at[0])
                plgpu.barrier_wait(v_in.at[slot])
                plgpu.barrier_wait(turn.at[0])

                def wait() -> None:
                    next_slot = lax.rem(step + 1, jnp.int32(stages))
                    pl.when(step + 1 < total_steps)(lambda: plgpu.barrier_wait(k_in.at[next_slot]))

                acc = _added(acc, half, v_s.at[slot], interpret, wait)
                plgpu.barrier_arrive(v_out.at[slot])
                return acc, new, norm

            @pl.when(total_steps > 0)
            def wait() -> None:
                plgpu.barrier_wait(k_in.at[0])

            pl.when(one == 1)(take_turn)
            carry = (
                _laid(jnp.zeros((rows, H), jnp.float32), interpret),
                _laid(jnp.full((rows,), _LOWEST, jnp.float32), interpret),
                _laid(jnp.zeros((rows,), jnp.float32), interpret),
            )
            done = 0
            if rule.mask:
                done = partial[...]
                carry = lax.fori_loop(0, done, lambda *a: body(*a, masked=True), carry)
            acc, top, norm = lax.fori_loop(done, total_steps, lambda *a: body(*a, masked=False), carry)
            pl.when(one == 0)(take_turn)
            lse_s.at[one][...] = (top + jnp.log(norm) * _LOG2E) * (1 / _LOG2E)
            inverse = 1 / jnp.where(norm > 0, norm, 1.0)
            q_s.at[one][...] = (acc * lax.broadcast_in_dim(inverse, acc.shape, [0])).astype(q.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(q_s.at[one], o_ref.at[mine])
            plgpu.copy_smem_to_gmem(lse_s.at[one], lse_ref.at[b, n, pl.ds(first, rows)])
            plgpu.wait_smem_to_gmem(0)

        @pl.when(one == WARPGROUPS)
        def load() -> None:
            plgpu.set_max_registers(40, action="decrease")
            of = lax.div(n, jnp.int32(N // K))

            @pl.loop(0, total_steps)
            def _(step) -> None:
                slot = lax.rem(step, jnp.int32(stages))
                start = index[step] * keys
                at = b, pl.ds(start, keys), of
                pl.when(step >= stages)(lambda: plgpu.barrier_wait(k_out.at[slot]))
                plgpu.copy_gmem_to_smem(k_ref.at[at], k_s.at[slot], k_in.at[slot])
                for ref, into in zip(by_column, columns_s, strict=True):
                    plgpu.copy_gmem_to_smem(_of(ref, b, n).at[pl.ds(start, keys)], into.at[slot], k_in.at[slot])
                pl.when(step >= stages)(lambda: plgpu.barrier_wait(v_out.at[slot]))
                plgpu.copy_gmem_to_smem(v_ref.at[at], v_s.at[slot], v_in.at[slot])

    scratch = (
        (
            _tiles(WARPGROUPS, rows, H, q.dtype), _tiles(stages, keys, H, k.dtype), _tiles(stages, keys, H, v.dtype),
            plgpu.SMEM((WARPGROUPS, rows), jnp.float32),
            tuple(plgpu.SMEM((WARPGROUPS, rows), x.dtype) for x in rule.rows),
            tuple(plgpu.SMEM((stages, keys), x.dtype) for x in rule.columns),
        ),
        (
            plgpu.Barrier(num_arrivals=1 + len(rule.rows), num_barriers=WARPGROUPS),
            plgpu.Barrier(num_arrivals=1 + len(rule.columns), num_barriers=stages),
            plgpu.Barrier(num_barriers=stages),
        ),
        (plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=stages),) * 2,
        plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=1),
    )  # fmt: skip
    out = jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct((B, N, T), jnp.float32)
    run = _kernel(kernel, out, scratch, (B, N, T // blocks[0]), interpret)
    o, lse = run(q, k, v, tuple(lists), rule.heads, rule.rows, rule.columns)
    return o, jnp.swapaxes(lse, 1, 2)


def _kernel(
    body: Callable[..., None], out: Sequence[Any], scratch: Any, grid: tuple[int, int, int], interpret: bool
) -> Any:
    """Returns the launch of a kernel over (batch, head, block); blocks of one head run side by side, so that they
    share its tiles in the cache."""
    params: Any = None
    if interpret:
        from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

        params = InterpretGPUParams()

    def entry(*refs: Any) -> None:
        pl.run_scoped(lambda *given: body(*refs, given), *scratch, collective_axes="warpgroup")

    return plgpu.kernel(
        entry, out_type=out, grid=grid, grid_names=("batch", "head", "block"), num_threads=WARPGROUPS + 1,
        thread_name="warpgroup", interpret=params,
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
    )  # fmt: skip


def _nothing() -> None:
    pass


def _product(lhs: Any, rhs: Any, interpret: bool, meanwhile: Callable[[], None] = _nothing) -> Array:
    """lhs rhs' in float32; ``meanwhile`` runs while the tensor cores do."""
    if interpret:  # the interpreter knows neither transposed references nor accumulators that start with a value
        meanwhile()
        return jnp.dot(lhs[...], rhs[...].T, preferred_element_type=jnp.float32)

    def multiply(ref: Any) -> Array:
        plgpu.wgmma(ref, lhs, rhs.transpose((1, 0)))
        meanwhile()
        return ref[...]

    return pl.run_scoped(multiply, plgpu.ACC((lhs.shape[0], rhs.shape[0]), jnp.float32))


def _added(acc: Array, lhs: Array, rhs: Any, interpret: bool, meanwhile: Callable[[], None] = _nothing) -> Array:
    """acc + lhs rhs; ``meanwhile`` runs while the tensor cores do."""
    if interpret:
        meanwhile()
        return acc + jnp.dot(lhs, rhs[...], preferred_element_type=jnp.float32)

    def multiply(ref: Any) -> None:
        plgpu.wgmma(ref, lhs, rhs)
        meanwhile()

    return pl.run_state(multiply)(plgpu.ACC.init(acc))


def _tiles(count: int, rows: int, width: int, dtype: Any) -> Any:
    return plgpu.SMEM(
        (count, rows, width), dtype, transforms=(plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    )


def _of(ref: Any, b: Any, n: Any) -> Any:
    """The part of an array [B | 1, N | 1, ...] for one sequence and head."""
    return ref.at[b if ref.shape[0] > 1 else 0, n if ref.shape[1] > 1 else 0]


def _laid(x: Array, interpret: bool, dim: int = 0) -> Array:
    """Gives a tile, or a vector along a dim of one, the layout of accumulators."""
    layout = plgpu.Layout.WGMMA if x.ndim == 2 else plgpu.Layout.WGMMA.reduce(1 - dim)
    return x if interpret else plgpu.layout_cast(x, layout)


def _across(ref: Any, shape: tuple[int, int], dim: int, interpret: bool) -> Array:
    """Loads a vector along a dim of a tile and repeats it over the other one."""
    return lax.broadcast_in_dim(_laid(ref[...], interpret, dim), shape, [dim])


def _widened(rule: TileRule) -> TileRule:
    """The rule with operands of 32 bits, the smallest that registers of a tile hold."""

    def widen(arrays: tuple[Array, ...]) -> tuple[Array, ...]:
        kinds = (jnp.float32 if jnp.issubdtype(x.dtype, jnp.floating) else jnp.int32 for x in arrays)
        return tuple(x.astype(kind) for x, kind in zip(arrays, kinds, strict=True))

    return rule._replace(heads=widen(rule.heads), rows=widen(rule.rows), columns=widen(rule.columns))
