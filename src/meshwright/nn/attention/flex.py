"""Differentiable attention with a mask and a score rule as functions: the public entry to the kernels."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero
from jax.extend.core import ClosedJaxpr
from jaxtyping import Array, Float

from meshwright.core.errors import InputError, first_line
from meshwright.masks.mods import Mask, Score
from meshwright.masks.ranges import AnyArray, Index, NoRangesError, Ranges
from meshwright.masks.table import BlockTable
from meshwright.nn.attention.call import AttentionCall
from meshwright.nn.attention.choice import attention, attention_backward
from meshwright.nn.attention.kernels.scores import AttentionResult, HeadValues
from meshwright.nn.attention.platform import default_platform
from meshwright.nn.attention.tiles import Mod

_Arrays = tuple[Array, ...]


def flex_attention(
    q: AnyArray,
    k: AnyArray,
    v: AnyArray,
    score_mod: Score | None = None,
    mask_mod: Mask | None = None,
    *,
    block_table: BlockTable | None = None,
    scale: float | None = None,
    sinks: AnyArray | None = None,
    return_lse: bool = False,
    kernel: str = "",
) -> HeadValues | tuple[HeadValues, Float[Array, "B T N"]]:
    """Returns attention of q [B, T, N, H] on k [B, S, K, H] and v [B, S, K, Hv], [B, T, N, Hv] in the type of q.

    ``mask_mod(b, h, q_idx, kv_idx)`` says which keys a query sees, ``score_mod(score, b, h, q_idx, kv_idx)`` changes
    scaled scores in float32; indices are integer arrays that broadcast. Both may capture JAX arrays; those of the score
    rule have gradients (NaN where its slope is not finite, also on pairs that the mask hides). Blocks that the mask
    leaves empty are not computed; ``block_table`` lists the others if known, and has its own mask unless ``mask_mod``
    is given. Outside of `jax.jit` every call traces anew. K must divide N. ``scale`` is 1 / sqrt(H) by default,
    ``sinks`` an extra logit of each head. With ``return_lse`` the log-sum-exp of scores and sink, [B, T, N] in float32,
    is returned too; a query that sees nothing gets zeros and, without a sink, minus infinity. If the log-sum-exp has a
    gradient, XLA's kernel runs the backward pass. ``kernel`` forces one of `choice.KERNELS`.

    Raises: InputError: shapes do not match, or the kernel does not support the case.
    """
    q, k, v = (_floats(name, x) for name, x in (("q", q), ("k", k), ("v", v)))
    sinks = None if sinks is None else _floats("sinks", sinks)
    if q.ndim != 4 or k.ndim != 4 or v.ndim != 4 or k.shape[:3] != v.shape[:3] or q.shape[3] != k.shape[3]:
        raise InputError(f"q {q.shape}, k {k.shape}, v {v.shape}: give [B, T, N, H], [B, S, K, H] and [B, S, K, Hv].")
    if q.shape[0] != k.shape[0] or q.shape[2] % k.shape[2]:
        raise InputError(f"q {q.shape}, k {k.shape}: B must be equal, and {k.shape[2]} key heads must divide N.")
    if sinks is not None and sinks.shape != q.shape[2:3]:
        raise InputError(f"sinks {sinks.shape}: give one number for each of {q.shape[2]} heads.")
    if not min(*q.shape, *k.shape, *v.shape):
        raise InputError(f"q {q.shape}, k {k.shape}, v {v.shape}: every dim must be at least 1.")
    if block_table is not None:
        mask_mod = block_table.mask if mask_mod is None else mask_mod
    score = None if score_mod is None else _hoisted(score_mod, has_score=True)
    # an array known while tracing is a constant, without a gradient
    learned_arrays = (x for x in (score.arrays if score else ()) if isinstance(x, jax.core.Tracer))
    call = AttentionCall(
        scale=q.shape[3] ** -0.5 if scale is None else scale,
        mask=None if mask_mod is None else _hoisted(mask_mod, has_score=False),
        score=score,
        table=block_table,
        kernel=kernel,
        platform=default_platform(),
        learns=any(jnp.issubdtype(x.dtype, jnp.floating) for x in learned_arrays),
    )
    if block_table is not None:
        _check_table(block_table, mask_mod, q, k)
    o, lse = _flex(call, (q, k, v), sinks, *(mod.arrays if mod else () for mod in (call.mask, call.score)))
    return (o, lse) if return_lse else o


def _check_table(table: BlockTable, mask_mod: Mask | None, q: Array, k: Array) -> None:
    """Raises InputError unless a table has this number of queries and keys, and of sequences and heads (or 1, if the
    mask does not depend on them)."""
    sizes = q.shape[0], q.shape[2], q.shape[1], k.shape[1]
    dims = *table.kinds.shape[:2], table.q_len, table.kv_len
    is_shared = [False] * 4
    if mask_mod is not None:
        mask_jaxpr = jax.make_jaxpr(mask_mod)(*[jax.ShapeDtypeStruct((1, 1, 1, 1), jnp.int32)] * 4).jaxpr
        read_ids = {id(x) for eqn in mask_jaxpr.eqns for x in eqn.invars}
        is_shared[:2] = [id(x) not in read_ids for x in mask_jaxpr.invars[:2]]
    if any(n != size and not (n == 1 and may_share) for n, size, may_share in zip(dims, sizes, is_shared, strict=True)):
        raise InputError(
            f"block_table is for {dims[2]} queries, {dims[3]} keys, batch={dims[0]} and heads={dims[1]}. Make it with "
            f"q_len={sizes[2]}, kv_len={sizes[3]}, batch={sizes[0]} and heads={sizes[1]}, or 1 for all."
        )


def _floats(name: str, value: object) -> Array:
    """Returns an argument as an array; raises InputError unless it is an array of floating-point numbers."""
    if not hasattr(value, "dtype"):
        raise InputError(f"{name} is not an array ({type(value).__name__}). Give an array of floating-point numbers.")
    if not jnp.issubdtype(value.dtype, jnp.floating):
        raise InputError(f"{name} is an array of {value.dtype}. Give an array of floating-point numbers.")
    return jnp.asarray(value)


def _spread(mod: Callable[..., Index]) -> Callable[..., Index]:
    """Returns a rule that broadcasts the single value of ``mod`` to all pairs."""

    def function(*idx: Index) -> Index:
        if any(isinstance(x, Ranges) for x in idx):
            raise NoRangesError("the function does not read its indices.")
        value = mod(*idx)
        # of the program even where the value is a constant
        return jnp.broadcast_to(jnp.where(idx[-1] == idx[-1], value, value), jnp.broadcast_shapes(*map(jnp.shape, idx)))

    return function


def _hoisted(mod: Callable[..., Index], *, has_score: bool) -> Mod:
    """Returns a rule to which the arrays that ``mod`` captures are arguments. Raises InputError if ``mod`` fails."""

    def traced(*indices: Index) -> ClosedJaxpr:
        return jax.make_jaxpr(mod)(*indices)

    index_structs = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((), (), (2, 1), (1, 2))]
    mod_name, dtype_kind = ("score_mod", jnp.floating) if has_score else ("mask_mod", jnp.bool)
    try:
        first_jaxpr = traced(*[jax.ShapeDtypeStruct((2, 2), jnp.float32)] * has_score, *index_structs)
        if len(first_jaxpr.out_avals) != 1:
            raise InputError(f"it returns {len(first_jaxpr.out_avals)} arrays, not one.")
        aval = first_jaxpr.out_avals[0]
        shape = jnp.broadcast_shapes(aval.shape, (2, 2))
    except Exception as error:
        hint = " Capture jnp.asarray(x) in place of NumPy's x." if "Tracer" in type(error).__name__ else ""
        raise InputError(f"{mod_name} fails: {type(error).__name__}: {first_line(error)}{hint}") from error
    if shape != (2, 2) or not jnp.issubdtype(aval.dtype, dtype_kind):
        expected = "scores in float32" if has_score else "Booleans"
        raise InputError(f"{mod_name} returns {aval.dtype} of shape {aval.shape} for 2 x 2 pairs. Return {expected}.")
    if aval.ndim < 2:
        mod, first_jaxpr = _spread(mod), jax.make_jaxpr(_spread(mod))(*first_jaxpr.in_avals)
    consts = first_jaxpr.consts
    captured_indices = [const_index for const_index, x in enumerate(consts) if isinstance(x, jax.Array)]
    pair_structs = (jax.ShapeDtypeStruct((), aval.dtype) for aval in first_jaxpr.in_avals)
    pair_jaxpr = traced(*pair_structs) if captured_indices else first_jaxpr

    def make(*captured_arrays: Array) -> Callable[..., Index]:
        def function(*indices: Index) -> Index:
            if any(isinstance(x, Ranges) for x in indices):
                if captured_arrays:
                    raise NoRangesError("the function captures arrays.")
                return mod(*indices)
            try:
                closed_jaxpr, is_whole = traced(*indices), True
            except jax.errors.UnexpectedTracerError:  # since jax 0.11, once the trace of captured arrays has ended
                closed_jaxpr, is_whole = pair_jaxpr, False
            all_consts = list(closed_jaxpr.consts)
            for const_index, array in zip(captured_indices, captured_arrays, strict=True):
                all_consts[const_index] = array
            evaluate = partial(jax.core.eval_jaxpr, closed_jaxpr.jaxpr, all_consts)
            return evaluate(*indices)[0] if is_whole else jnp.vectorize(lambda *pair: evaluate(*pair)[0])(*indices)

        return function

    return Mod(make, tuple(consts[const_index] for const_index in captured_indices))


jax.tree_util.register_dataclass(
    BlockTable, data_fields=["kinds"], meta_fields=["q_block", "kv_block", "q_len", "kv_len", "mask"]
)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _flex(call: AttentionCall, qkv: _Arrays, sinks: Array | None, mask: _Arrays, score: _Arrays) -> AttentionResult:
    return attention(_with(call, sinks, mask, score), *qkv)


def _with(call: AttentionCall, sinks: Array | None, mask: _Arrays, score: _Arrays) -> AttentionCall:
    rules = [mod and mod._replace(arrays=arrays) for mod, arrays in ((call.mask, mask), (call.score, score))]
    return replace(call, sinks=sinks, mask=rules[0], score=rules[1])


def _flex_forward(call: AttentionCall, *args: CustomVJPPrimal) -> tuple[AttentionResult, tuple[Any, ...]]:
    qkv, sinks, mask, score = jax.tree.map(lambda x: x.value, args, is_leaf=lambda x: isinstance(x, CustomVJPPrimal))
    o, lse = attention(_with(call, sinks, mask, score), *qkv)
    return (o, lse), (qkv, sinks, mask, score, o, lse)


def _flex_backward(
    call: AttentionCall, residuals: tuple[Any, ...], cotangents: tuple[Array | SymbolicZero, Array | SymbolicZero]
) -> tuple[Any, ...]:
    qkv, sinks, mask_arrays, score_arrays, o, lse = residuals
    dout, dlse = cotangents
    dout = jnp.zeros_like(o) if isinstance(dout, SymbolicZero) else dout
    inputs = dout, o, lse, *([] if isinstance(dlse, SymbolicZero) else [dlse])
    dq, dk, dv, *other_cotangents = attention_backward(_with(call, sinks, mask_arrays, score_arrays), inputs, *qkv)
    dsinks = None if sinks is None else other_cotangents.pop(0)
    # None: arrays of the mask have no gradient
    return (dq, dk, dv), dsinks, None, tuple(other_cotangents) or None


# symbolic zeros say whether the log-sum-exp has a cotangent; if so XLA's kernel runs the backward pass
_flex.defvjp(_flex_forward, _flex_backward, symbolic_zeros=True)
