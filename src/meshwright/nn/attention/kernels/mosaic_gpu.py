"""Flash attention for Hopper GPUs as Pallas kernels for Mosaic GPU, over the blocks that a mask leaves.

A program computes one block of rows of one head: two warpgroups compute half of it each, a third one copies tiles of
the columns into shared memory. Rows are queries, except in the kernel for the gradients of keys and values.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from meshwright.nn.attention.kernels.scores import LOWEST
from meshwright.nn.attention.tiles import BlockLists, DynamicInt, Tile, TileRule

BLOCKS = 128, 128
"""Queries and keys of a block: the fastest on an H200 (benchmarks/results/flex_gpu-2026-11-27.txt)."""

WARPGROUPS = 2
"""Warpgroups that compute; each has half of the rows of a block, a multiple of 64."""

_LOG2E = math.log2(math.e)

_Ref = Any  # Pallas has no public type of its references
_Carry = TypeVar("_Carry")


class _Step(NamedTuple):
    """One tile of columns in shared memory, as a warpgroup sees it."""

    tiles: tuple[_Ref, ...]
    vectors: tuple[_Ref, ...]
    seen: Callable[[Tile], Array] | None
    tile: Callable[[], Tile]
    wait: Callable[[int], None]
    """Waits for array i of the tile."""
    wait_next: Callable[[], None]
    """Waits for the first array of the next tile."""
    release: Callable[[int], None]


class _Program(NamedTuple):
    """The rows of one warpgroup in shared memory, and how it loops over tiles."""

    at: tuple[object, ...]
    """Index of the rows in an array [B, L, N, ...]."""
    vector_at: tuple[object, ...]
    """Index of the rows in an array [B, N, L]."""
    held: tuple[_Ref, ...]
    vectors: tuple[_Ref, ...]
    loop: Callable[[Callable[[_Step, Any], Any], Any], Any]
    """Runs a body over the tiles of all listed blocks."""
    warpgroup: Array
    turns: _Ref
    """Barrier at which the warpgroups pass the tensor cores to each other."""


class _Arrays(NamedTuple):
    """Operands along a tile's rows or columns: tiles of [B, L, heads, H], vectors of [B | 1, N | 1, L]."""

    tiles: tuple[Array, ...]
    own: tuple[Array, ...] = ()
    of_rule: tuple[Array, ...] = ()

    @property
    def vectors(self) -> tuple[Array, ...]:
        return self.own + self.of_rule


def forward(
    rule: TileRule, lists: BlockLists, blocks: tuple[int, int], scale: float,
    q: Float[Array, "B T N H"], k: Float[Array, "B S K H"], v: Float[Array, "B S K H"],
    *, tile: int = 0, stages: int = 2, interpret: bool = False,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:  # fmt: skip
    """Returns the result and the log-sum-exp of each row in float32; 0 and -inf for a row that sees no key.

    T and S are multiples of the ``blocks`` of queries and keys, ``scale`` is positive, H a multiple of 64. A block has
    a multiple of 128 queries. ``stages`` tiles of ``tile`` keys (0: a whole block) are in flight.
    """
    (B, T, N, H), rule = q.shape, rule.widened()

    def compute(program: _Program, o_ref: _Ref, lse_ref: _Ref) -> None:
        (q_smem,), (lse_smem,) = program.held, program.vectors[:1]

        # while one warpgroup has the tensor cores, the other one computes exponentials
        def take_turn() -> None:
            plgpu.barrier_arrive(program.turns)
            plgpu.barrier_wait(program.turns)

        def body(step: _Step, carry: tuple[Array, ...]) -> tuple[Array, ...]:
            acc, peak, exp_sum = carry
            k_smem, v_smem = step.tiles
            scores = _product(q_smem, k_smem, interpret, take_turn)
            exp2_factor = scale * _LOG2E  # exp(score) = 2^(score * log2 e)
            if rule.score:
                scores, exp2_factor = rule.score(scores * scale, step.tile()), _LOG2E
            if step.seen:
                scores = jnp.where(step.seen(step.tile()), scores, -jnp.inf)
            # the keys' shared memory is free once their scores exist, before the values are needed
            step.release(0)
            new_peak = jnp.maximum(peak, scores.max(axis=1) * exp2_factor)
            p = jnp.exp2(scores * exp2_factor - lax.broadcast_in_dim(new_peak, scores.shape, [0]))
            shrink = jnp.exp2(peak - new_peak)
            acc *= lax.broadcast_in_dim(shrink, acc.shape, [0])
            exp_sum *= shrink
            p_narrow = p.astype(v.dtype)
            if H <= 128:
                exp_sum += p.sum(axis=1)
                acc, exp_sum, new_peak, p_narrow = lax.optimization_barrier((acc, exp_sum, new_peak, p_narrow))
            plgpu.barrier_arrive(program.turns)
            step.wait(1)
            plgpu.barrier_wait(program.turns)
            if H > 128:  # the sum overlaps the product: fewer registers are live
                exp_sum += p.sum(axis=1)
            acc = _added(acc, p_narrow, v_smem, interpret, step.wait_next)
            step.release(1)
            return acc, new_peak, exp_sum

        num_rows = q_smem.shape[0]
        start_carry = jnp.zeros((num_rows, H)), jnp.full((num_rows,), LOWEST), jnp.zeros((num_rows,))
        # the second warpgroup uses the tensor cores one tile after the first
        pl.when(program.warpgroup == 1)(take_turn)
        acc, peak, exp_sum = program.loop(body, tuple(_laid(x, interpret) for x in start_carry))
        # so both arrive at the barrier equally often
        pl.when(program.warpgroup == 0)(take_turn)
        lse_smem[...] = (peak + jnp.log(exp_sum) * _LOG2E) * (1 / _LOG2E)
        inverse_sum = 1 / jnp.where(exp_sum > 0, exp_sum, 1.0)
        # the queries are not read any more: their shared memory passes the result on
        q_smem[...] = (acc * lax.broadcast_in_dim(inverse_sum, acc.shape, [0])).astype(q.dtype)
        # only committed writes are visible to the copies that follow
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(q_smem, o_ref.at[program.at])
        plgpu.copy_smem_to_gmem(lse_smem, lse_ref.at[program.vector_at])
        plgpu.wait_smem_to_gmem(0)

    # the shared memory of a vector of zeros passes the log-sum-exp on
    row_arrays = _Arrays((q,), (jnp.zeros((1, 1, T), jnp.float32),), rule.rows)
    outs = jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct((B, N, T), jnp.float32)
    sizes = *blocks, tile or blocks[1]
    o, lse = _sweep(rule, lists, sizes, row_arrays, _Arrays((k, v), (), rule.columns), compute, outs, stages, interpret)
    return o, jnp.swapaxes(lse, 1, 2)


def backward(
    rule: TileRule, lists: tuple[BlockLists, BlockLists], blocks: tuple[int, int], scale: float,
    given: tuple[Array, Array, Array],
    q: Float[Array, "B T N H"], k: Float[Array, "B S K H"], v: Float[Array, "B S K H"],
    *, tiles: tuple[int, int] = (64, 64), stages: int = 2, interpret: bool = False,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B S K H"], Float[Array, "B S K H"]]:  # fmt: skip
    """Returns (dq, dk, dv) from ``given``: the cotangent of the result, the result and the log-sum-exp. ``lists`` are
    by blocks of queries, and by blocks of keys.

    A block has a multiple of 128 queries and of 128 keys; H is at most 128, as dk and dv fill the registers. One kernel
    recomputes the scores for dq, another one for dk and dv: no sum depends on the order of programs. ``tiles`` are the
    queries of a tile of the second kernel and the keys of a tile of the first; both divide their block.
    """
    (_, _, N, H), K, rule = q.shape, k.shape[2], rule.widened()
    dout, o, lse = given
    # tensor cores multiply factors of one dtype
    dout = dout.astype(q.dtype)
    delta = jnp.einsum("btnh,btnh->bnt", dout, o, preferred_element_type=jnp.float32)
    # exp2 of a score less this is 0 in rows that see no key
    log2_lse = jnp.swapaxes(jnp.where(jnp.isneginf(lse), -LOWEST, lse * _LOG2E), 1, 2)

    def probabilities(step: _Step, products: Array, lse_ref: _Ref, dim: int) -> tuple[Array, Callable[[Array], Array]]:
        """Returns the probabilities of a tile, and the map from a cotangent of scores to that of scaled products."""
        scores, exp2_factor, pull_back = products, scale * _LOG2E, lambda x: x
        if rule.score:
            _lower_sums_of_cotangents()
            tile = step.tile()
            score = rule.score
            scores, pull_score = jax.vjp(lambda x: score(x, tile), products * scale)
            exp2_factor, pull_back = _LOG2E, lambda x: pull_score(x)[0]
        p = jnp.exp2(scores * exp2_factor - _across(lse_ref, products.shape, dim, interpret))
        return (jnp.where(step.seen(step.tile()), p, 0.0) if step.seen else p), pull_back

    def compute_dq(program: _Program, dq_ref: _Ref) -> None:
        (q_smem, dout_smem), (log2_lse_smem, delta_smem) = program.held, program.vectors[:2]

        def body(step: _Step, dq: Array) -> Array:
            k_smem, v_smem = step.tiles
            products = _product(q_smem, k_smem, interpret)
            p, pull_back = probabilities(step, products, log2_lse_smem, 0)
            step.wait(1)
            dp = _product(dout_smem, v_smem, interpret)
            step.release(1)
            ds = pull_back(p * (dp - _across(delta_smem, p.shape, 0, interpret)))
            # the wait for the next tile hides behind the product
            dq = _added(dq, ds.astype(q.dtype), k_smem, interpret, step.wait_next)
            step.release(0)
            return dq

        dq = program.loop(body, _laid(jnp.zeros(q_smem.shape), interpret))
        _write(program, [(dq * scale, q_smem, dq_ref)])

    def compute_dkv(program: _Program, dk_ref: _Ref, dv_ref: _Ref) -> None:
        k_smem, v_smem = program.held

        def body(step: _Step, carry: tuple[Array, ...]) -> tuple[Array, ...]:
            dk, dv = carry
            (q_smem, dout_smem), (log2_lse_smem, delta_smem) = step.tiles, step.vectors[:2]
            products = _product(k_smem, q_smem, interpret)
            p, pull_back = probabilities(step, products, log2_lse_smem, 1)
            step.wait(1)
            dv = _added(dv, p.astype(q.dtype), dout_smem, interpret)
            dp = _product(v_smem, dout_smem, interpret)
            step.release(1)
            ds = pull_back(p * (dp - _across(delta_smem, p.shape, 1, interpret)))
            dk = _added(dk, ds.astype(q.dtype), q_smem, interpret, step.wait_next)
            step.release(0)
            return dk, dv

        zero_acc = _laid(jnp.zeros(k_smem.shape), interpret)
        dk, dv = program.loop(body, (zero_acc, zero_acc))
        _write(program, [(dk * scale, k_smem, dk_ref), (dv, v_smem, dv_ref)])

    q_arrays = _Arrays((q, dout), (log2_lse, delta), rule.rows)
    k_arrays = _Arrays((k, v), (), rule.columns)
    struct_like = lambda x: jax.ShapeDtypeStruct((*x.shape[:2], N, H), x.dtype)  # noqa: E731
    sweep = partial(_sweep, rule, stages=stages, interpret=interpret)
    (dq,) = sweep(lists[0], (*blocks, min(tiles[1], blocks[1])), q_arrays, k_arrays, compute_dq, (struct_like(q),))
    sizes = *blocks[::-1], min(tiles[0], blocks[0])
    dk, dv = sweep(lists[1], sizes, k_arrays, q_arrays, compute_dkv, (struct_like(k), struct_like(v)), by_query=False)
    if N != K:
        # without atomics every head of a group writes cotangents of its own, which XLA adds
        dk, dv = (
            x.reshape(*k.shape[:3], N // K, H).sum(3, dtype=jnp.float32).astype(k.dtype) for x in (dk, dv)
        )  # fmt: skip
    return dq, dk, dv


def _lower_sums_of_cotangents() -> None:
    """Lets JAX 0.11 lower the sums in a score rule's derivative (`add_any`) in kernels as it lowers other sums."""
    from jax._src.ad_util import add_any_p
    from jax._src.pallas.mosaic_gpu.lowering import mosaic_lowering_rules

    for rules in mosaic_lowering_rules.values():
        if lax.add_p in rules:
            rules.setdefault(add_any_p, rules[lax.add_p])


def _sweep(
    rule: TileRule, lists: BlockLists, sizes: tuple[int, int, int], row_arrays: _Arrays, column_arrays: _Arrays,
    compute: Callable[..., None], out: Sequence[jax.ShapeDtypeStruct], stages: int, interpret: bool,
    *, by_query: bool = True,
) -> tuple[Array, ...]:  # fmt: skip
    """Runs a kernel over (batch, head, block of rows); ``sizes`` are rows and columns of a block, columns of a tile.

    Blocks of one head run at the same time, so that they share its tiles in the cache; the last queries, which see most
    keys under a causal mask, start first.
    """
    block_rows, width, tile = sizes
    group_rows, num_tiles = block_rows // WARPGROUPS, width // tile
    B, L = row_arrays.tiles[0].shape[:2]
    N = max(x.shape[2] for x in row_arrays.tiles + column_arrays.tiles)
    stages = min(stages, column_arrays.tiles[0].shape[1] // tile)
    grid = B, N, L // block_rows
    query_dim = 0 if by_query else 1

    def kernel(
        row_refs: _Arrays, column_refs: _Arrays, head_refs: tuple[_Ref, ...], list_refs: tuple[_Ref, ...], *rest: Any
    ) -> None:
        *out_refs, scratch = rest
        row_tiles, row_vecs, column_tiles, column_vecs, rows_arrived, slots_filled, slots_freed, turns = scratch
        b, n, row_block = (lax.axis_index(name) for name in ("batch", "head", "block"))
        warpgroup = lax.axis_index("warpgroup")
        if by_query:
            row_block = grid[2] - 1 - row_block
        num_partial_ref, num_blocks_ref, block_ids = (_of(ref, b, n).at[row_block] for ref in list_refs)
        num_steps = num_blocks_ref[...] * num_tiles
        slot_of = lambda step: lax.rem(step, jnp.int32(stages))  # noqa: E731

        def start_of(step: DynamicInt) -> Array:
            if num_tiles == 1:
                return block_ids[step] * width
            return block_ids[lax.div(step, jnp.int32(num_tiles))] * width + lax.rem(step, jnp.int32(num_tiles)) * tile

        def tile_at(ref: _Ref, start: DynamicInt, size: int) -> _Ref:
            own_head = n if ref.shape[2] == N else lax.div(n, jnp.int32(N // ref.shape[2]))
            return ref.at[b, pl.ds(start, size), own_head]

        @pl.when(warpgroup < WARPGROUPS)
        def _() -> None:
            # (2 x 232 + 40) x 128 threads fit in an SM's 65,536 registers, and copies need few
            plgpu.set_max_registers(232, action="increase")
            first_row = row_block * block_rows + warpgroup * group_rows
            barrier = rows_arrived.at[warpgroup]
            my_tiles, my_vectors = (tuple(x.at[warpgroup] for x in refs) for refs in (row_tiles, row_vecs))
            for ref, smem_ref in zip(row_refs.tiles, my_tiles, strict=True):
                plgpu.copy_gmem_to_smem(tile_at(ref, first_row, group_rows), smem_ref, barrier)
            for ref, smem_ref in zip(row_refs.vectors, my_vectors, strict=True):
                plgpu.copy_gmem_to_smem(_of(ref, b, n).at[pl.ds(first_row, group_rows)], smem_ref, barrier)
            plgpu.barrier_wait(barrier)
            scalars = tuple(_of(ref, b, n)[...] for ref in head_refs)

            def loop(body: Callable[[_Step, _Carry], _Carry], carry: _Carry) -> _Carry:
                def run(step_index: Array, carry: _Carry, *, masked: bool) -> _Carry:
                    slot = slot_of(step_index)
                    slot_vectors = tuple(x.at[slot] for x in column_vecs)

                    def make_tile() -> Tile:
                        shape = group_rows, tile
                        iota = [_laid(lax.broadcasted_iota(jnp.int32, shape, d), interpret) for d in (0, 1)]
                        indices = iota[0] + first_row, iota[1] + start_of(step_index)
                        values_by_dim = [
                            tuple(_across(ref, shape, dim, interpret) for ref in refs)
                            for dim, refs in enumerate(
                                (my_vectors[len(row_arrays.own) :], slot_vectors[len(column_arrays.own) :])
                            )
                        ]  # fmt: skip
                        q_dim, k_dim = query_dim, 1 - query_dim
                        return Tile(indices[q_dim], indices[k_dim], scalars, values_by_dim[q_dim], values_by_dim[k_dim])

                    step = _Step(
                        tuple(x.at[slot] for x in column_tiles), slot_vectors, rule.mask if masked else None, make_tile,
                        lambda j: plgpu.barrier_wait(slots_filled[j].at[slot]),
                        lambda: pl.when(step_index + 1 < num_steps)(
                            lambda: plgpu.barrier_wait(slots_filled[0].at[slot_of(step_index + 1)])
                        ),
                        lambda j: plgpu.barrier_arrive(slots_freed[j].at[slot]),
                    )  # fmt: skip
                    return body(step, carry)

                pl.when(num_steps > 0)(lambda: plgpu.barrier_wait(slots_filled[0].at[0]))
                num_masked: DynamicInt = 0
                if rule.mask:
                    num_masked = num_partial_ref[...] * num_tiles
                    carry = lax.fori_loop(0, num_masked, partial(run, masked=True), carry)
                return lax.fori_loop(num_masked, num_steps, partial(run, masked=False), carry)

            span = pl.ds(first_row, group_rows)
            compute(_Program((b, span, n), (b, n, span), my_tiles, my_vectors, loop, warpgroup, turns.at[0]), *out_refs)

        @pl.when(warpgroup == WARPGROUPS)
        def _() -> None:
            plgpu.set_max_registers(40, action="decrease")

            @pl.loop(0, num_steps)
            def _(step_index: Array) -> None:
                slot, start = slot_of(step_index), start_of(step_index)
                for j, (ref, smem_ref) in enumerate(zip(column_refs.tiles, column_tiles, strict=True)):
                    pl.when(step_index >= stages)(partial(plgpu.barrier_wait, slots_freed[j].at[slot]))
                    plgpu.copy_gmem_to_smem(tile_at(ref, start, tile), smem_ref.at[slot], slots_filled[j].at[slot])
                    if j == 0:
                        for vector_ref, target_ref in zip(column_refs.vectors, column_vecs, strict=True):
                            tile_vector = _of(vector_ref, b, n).at[pl.ds(start, tile)]
                            plgpu.copy_gmem_to_smem(tile_vector, target_ref.at[slot], slots_filled[0].at[slot])

            @pl.loop(jnp.maximum(num_steps - stages, 0), num_steps)
            def _(step_index: Array) -> None:
                for barrier in slots_freed:
                    plgpu.barrier_wait(barrier.at[slot_of(step_index)])

    def entry(*refs: _Ref) -> None:
        pl.run_scoped(lambda *scratch: kernel(*refs, scratch), *scratch, collective_axes="warpgroup")

    # as the tensor cores read shared memory: 8 rows of 128 bytes, swizzled, of numbers of 2 bytes
    transforms = plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)
    smem = lambda count, size, x: plgpu.SMEM((count, size, x.shape[3]), x.dtype, transforms=transforms)  # noqa: E731
    vector_smem = lambda count, size, x: plgpu.SMEM((count, size), x.dtype)  # noqa: E731
    # vectors arrive at the barrier of the first array
    num_arrivals = 1 + len(column_arrays.vectors), *[1] * (len(column_arrays.tiles) - 1)
    scratch = (
        tuple(smem(WARPGROUPS, group_rows, x) for x in row_arrays.tiles),
        tuple(vector_smem(WARPGROUPS, group_rows, x) for x in row_arrays.vectors),
        tuple(smem(stages, tile, x) for x in column_arrays.tiles),
        tuple(vector_smem(stages, tile, x) for x in column_arrays.vectors),
        plgpu.Barrier(num_arrivals=len(row_arrays.tiles + row_arrays.vectors), num_barriers=WARPGROUPS),
        tuple(plgpu.Barrier(num_arrivals=count, num_barriers=stages) for count in num_arrivals),
        tuple(plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=stages) for _ in num_arrivals),
        plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=1),
    )
    interpret_params: Any = None
    if interpret:
        from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

        interpret_params = InterpretGPUParams()
    run = plgpu.kernel(
        entry, out_type=tuple(out), grid=grid, grid_names=("batch", "head", "block"), num_threads=WARPGROUPS + 1,
        thread_name="warpgroup", interpret=interpret_params,
        compiler_params=plgpu.CompilerParams(
            approx_math=True, reduction_scratch_bytes=1024, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
    )  # fmt: skip
    return run(row_arrays, column_arrays, rule.heads, tuple(lists[:3]))


def _write(program: _Program, results: Sequence[tuple[Array, _Ref, _Ref]]) -> None:
    """Writes accumulators to global memory through the shared memory of rows that are not needed any more."""
    for acc, smem_ref, _ in results:
        smem_ref[...] = acc.astype(smem_ref.dtype)
    plgpu.commit_smem()
    for _, smem_ref, out_ref in results:
        plgpu.copy_smem_to_gmem(smem_ref, out_ref.at[program.at])
    plgpu.wait_smem_to_gmem(0)


def _product(lhs: _Ref, rhs: _Ref, interpret: bool, meanwhile: Callable[[], object] = lambda: None) -> Array:
    """Returns lhs rhs' in float32; ``meanwhile`` runs while the tensor cores compute."""
    if interpret:  # the interpreter knows neither transposed references nor accumulators that start with a value
        meanwhile()
        return jnp.dot(lhs[...], rhs[...].T, preferred_element_type=jnp.float32)

    def multiply(ref: _Ref) -> Array:
        plgpu.wgmma(ref, lhs, rhs.transpose((1, 0)))
        meanwhile()
        return ref[...]

    return pl.run_scoped(multiply, plgpu.ACC((lhs.shape[0], rhs.shape[0]), jnp.float32))


def _added(acc: Array, lhs: Array, rhs: _Ref, interpret: bool, meanwhile: Callable[[], object] = lambda: None) -> Array:
    """Returns acc + lhs rhs; ``meanwhile`` runs while the tensor cores compute."""
    if interpret:
        meanwhile()
        return acc + jnp.dot(lhs, rhs[...], preferred_element_type=jnp.float32)

    def multiply(ref: _Ref) -> None:
        plgpu.wgmma(ref, lhs, rhs)
        meanwhile()

    return pl.run_state(multiply)(plgpu.ACC.init(acc))


def _of(ref: _Ref, b: DynamicInt, n: DynamicInt) -> _Ref:
    """Returns the part of an array [B | 1, N | 1, ...] for one sequence and head."""
    return ref.at[b if ref.shape[0] > 1 else 0, n if ref.shape[1] > 1 else 0]


def _laid(x: Array, interpret: bool, dim: int = 0) -> Array:
    """Casts a tile, or a vector along dim ``dim`` of a tile, to the layout of accumulators."""
    # Mosaic combines arrays of one layout only, and the products have this one
    layout = plgpu.Layout.WGMMA if x.ndim == 2 else plgpu.Layout.WGMMA.reduce(1 - dim)
    return x if interpret else plgpu.layout_cast(x, layout)


def _across(ref: _Ref, shape: tuple[int, ...], dim: int, interpret: bool) -> Array:
    """Loads a vector along a dim of a tile and repeats it along the other dim."""
    return lax.broadcast_in_dim(_laid(ref[...], interpret, dim), shape, [dim])
